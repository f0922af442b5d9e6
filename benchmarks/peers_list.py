"""The arms of `peers.py`: how each is installed and started, what differs in it, what it promises."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_child import python_command
from peers_gguf import float32_file
from peers_install import NotInstalled, environment
from peers_report import OURS, REFERENCE

from fetch_assets import MODEL

KVBOOST = "kvboost==0.9.0"
LLAMA_CPP = "xllamacpp==2026.10.11549"
STORE_BYTES = 2 << 30  # of stored KV for every arm: the default of kvboost-rag
CONTEXT_TOKENS = 4096
CACHE_REUSE_TOKENS = 64  # 16, 64 and 128 keep the same here; 256, often seen in examples, keeps half of that
README_SETTINGS = {"recompute_strategy": "cacheblend", "chunk_boundary_window": 16, "overlap_k": 16, "sink_tokens": 32}
ROOMY = {"max_cache_bytes": STORE_BYTES, "max_chunks": 1 << 16}
SCRIPTS = Path(__file__).resolve().parent / "peers_arms"

Command = Callable[[Path, Path], list[str]]  # of a model folder and the peers' cache folder


@dataclass(frozen=True)
class Peer:
    """An arm of the benchmark.

    Attributes:
        command: makes the process's command; installs and converts what it needs.
        learns: it only learns from prompts it was asked, so it is asked one before.
        differs: what differs from plain Hugging Face besides reuse.
        promises: what the peer says about its answers.
    """

    command: Command
    learns: bool
    differs: str
    promises: str


def _hugging_face(prefix: bool) -> Command:
    settings = {"prefix": prefix, "budget_bytes": STORE_BYTES}
    script = SCRIPTS / "hugging_face.py"
    return lambda model, cache: python_command(sys.executable, script, {"model": str(model), **settings})


def _ours(model: Path, cache: Path) -> list[str]:
    return python_command(sys.executable, SCRIPTS / "ours.py", {"model": str(model)})


def _kvboost(**engine: Any) -> Command:
    def command(model: Path, cache: Path) -> list[str]:
        python = environment(cache, KVBOOST, shares_torch=True)
        settings = {"model": str(model), "engine": {**ROOMY, **engine}}
        return python_command(python, SCRIPTS / "kvboost_package.py", settings)

    return command


def _llama_cpp(find: Callable[[Path, Path], Path]) -> Command:
    def command(model: Path, cache: Path) -> list[str]:
        python = environment(cache, LLAMA_CPP, shares_torch=False)
        settings = {
            "model": str(find(model, cache)),
            "cache_reuse_tokens": CACHE_REUSE_TOKENS,
            "context_tokens": CONTEXT_TOKENS,
            "cache_mib": STORE_BYTES >> 20,
        }
        return python_command(python, SCRIPTS / "llama_cpp.py", settings)

    return command


def published_file(model: Path, cache: Path) -> Path:
    """The quantised file that the demo model was converted from, out of the wheel that `make demo` fetched.

    Raises:
        NotInstalled: another model, or one that came from the hub.
    """
    name, version = MODEL.packages[0].split("==")
    wheel = next(iter((cache.parent / "dl").glob(f"{name.replace('-', '_')}-{version}-*.whl")), None)
    if model.name != MODEL.folder or wheel is None:
        raise NotInstalled("not installed: only for the demo model, where it was converted from a quantised file")
    target = cache / Path(MODEL.members[0]).name
    if not target.is_file():
        scratch = target.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive:
            scratch.write_bytes(archive.read(MODEL.members[0]))
        scratch.replace(target)
    return target


_KVBOOST_DIFFERS = "same float32 weights, torch and transformers; 128-token grid; {}; documents warmed one by one"
_KVBOOST_PROMISES = "README: argmax-equivalent under greedy decoding by design"
_LLAMA_DIFFERS = (
    "ggml kernels of the packaged wheel (AVX2 at most, torch uses what the CPU has), float16 KV, flash attention as it "
    "chooses, one slot, prompt given as ids; {}"
)
_LLAMA_PROMISES = "exact for prefixes; none for shifted chunks"
PEERS: Mapping[str, Peer] = {
    REFERENCE: Peer(_hugging_face(False), False, "the reference: everything is computed", "exact"),
    "Hugging Face, prefix reuse": Peer(
        _hugging_face(True), True, "same weights and kernels; deep copy of the cache that agrees longest", "exact"
    ),
    "kvboost, README settings": Peer(
        _kvboost(**README_SETTINGS),
        True,
        _KVBOOST_DIFFERS.format("its `cacheblend` with the options of its README's benchmarks"),
        _KVBOOST_PROMISES,
    ),
    "kvboost, no repair": Peer(
        _kvboost(recompute_strategy="none"),
        True,
        _KVBOOST_DIFFERS.format("its fastest setting, `recompute_strategy='none'`"),
        "its docs: slight quality risk",
    ),
    "llama.cpp, float32": Peer(
        _llama_cpp(float32_file),
        True,
        _LLAMA_DIFFERS.format("the same float32 weights, written as GGUF"),
        _LLAMA_PROMISES,
    ),
    "llama.cpp, Q4_1": Peer(
        _llama_cpp(published_file),
        True,
        _LLAMA_DIFFERS.format("the quantised file that the float32 weights were made from, activations in 8 bits"),
        _LLAMA_PROMISES,
    ),
    OURS: Peer(_ours, False, "same weights and kernels; default configuration", "close to full recompute, measured"),
}
