"""Chunks for tests of the disk tier, which need no model: random ids and KV that only they can have."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvboost_rag.chunks import ChunkHeader, Scope, as_ids
from kvboost_rag.kv import KVRun, StoredRun
from kvboost_rag.store.files import on_disk, pack
from kvboost_rag.store.tier import Chunk

ALICE, BOB = Scope("f1", "alice"), Scope("f1", "bob")


def chunk_of(
    seed: int,
    *,
    tokens: int = 20,
    scope: Scope = ALICE,
    exact: bool = True,
    base: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Chunk[StoredRun]:
    """The same chunk for the same arguments."""
    draw = np.random.default_rng(seed)
    ids, before = as_ids(draw.integers(0, 50_000, tokens)), as_ids(draw.integers(0, 50_000, base))
    header = ChunkHeader.of(
        scope,
        ids,
        base=base,
        history=before if exact else None,
        behind=None if exact else before,
        origin="warm" if seed % 2 else "prompt",
    )
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, tokens, 8, generator=generator).to(dtype)
    return Chunk(header, KVRun(keys, (keys + 1).to(dtype)))


def equal(a: Chunk[StoredRun] | None, b: Chunk[StoredRun]) -> bool:
    """Whether two chunks hold the same KV for the same ids."""
    if a is None or a.header.key != b.header.key or a.header.origin != b.header.origin:
        return False
    x, y = a.kv.tensors(), b.kv.tensors()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def file_bytes(chunk: Chunk[StoredRun]) -> int:
    """What its file takes on the disk."""
    return on_disk(len(pack(chunk.header, chunk.kv, None)))


def files_in(folder: Path) -> Iterator[Path]:
    """All files of a store that hold KV, finished or not."""
    return (path for path in (folder / "chunks").rglob("*") if path.is_file())


def used_bytes(folder: Path) -> int:
    """What `du` says of the files that hold KV."""
    return sum(path.stat().st_blocks * 512 for path in files_in(folder))


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork here")


def in_child(work: Callable[[], None]) -> int:
    """Run something in another process; its id. It ends there, without anything that pytest does at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: nothing of theirs is used there
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(*children: int) -> None:
    """Wait until processes end, and see that nothing went wrong in them."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * len(children)
