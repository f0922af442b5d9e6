"""Shared fixtures. One torch thread: timings on a busy machine are steadier, and results do not depend on threads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from fetch_assets import ASSETS, cache_root
from kvboost_rag.memory import Memory

torch.set_num_threads(1)
_empty = Memory.empty


def _poisoned(memory: Memory, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A request's memory as an earlier one may have left it: whoever reads a slot that was not written reads NaN."""
    tensor = _empty(memory, shape, dtype, device)
    return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor


Memory.empty = _poisoned  # type: ignore[method-assign]
asyncio.set_event_loop(None)  # LlamaIndex would else take the loop that Python makes unasked, and never close it


def _asset(name: str) -> Path:
    folder = cache_root() / "models" / ASSETS[name].folder
    if not (folder / "config.json").is_file():
        pytest.fail(f"{folder} is missing; `make test` fetches it, or run: python scripts/fetch_assets.py {name}")
    return folder


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real small model, SmolLM2-135M-Instruct in float32."""
    return _asset("model")


@pytest.fixture(scope="session")
def embeddings_path() -> Path:
    """The real embedding model, all-MiniLM-L6-v2."""
    return _asset("embeddings")
