"""One chunk in one safetensors file that says all there is to know of it.

Tensors of the run are stored as ``kv.<name>``, ids as ``ids.tokens``, ``ids.history`` and ``ids.behind``. The metadata
hold one JSON text under ``kvboost-rag`` and a checksum (xxh3-64) of that text and of every tensor. Files are read
through a private map: nothing is copied before somebody reads it, and no write can reach the file.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from safetensors.torch import save

from ..chunks import ChunkHeader, IntArray, Scope, chunk_key
from ..kv import StoredRun
from .codec import codec_of
from .locks import lock_alone, share

FORMAT = 1
SUFFIX, PART, DOOMED = ".safetensors", ".writing", ".doomed"
BLOCK = 4096  # files take whole blocks of a disk
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 1 << 24
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
Stamp: TypeAlias = tuple[int, int, int]  # inode, bytes and time of change: another one says that a file was written to


class BadEntry(Exception):
    """A file is no intact entry."""


class NewerEntry(Exception):
    """A file was written by a newer version; it is neither used nor deleted."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A chunk over a mapped file."""

    header: ChunkHeader
    run: StoredRun
    expires: float | None
    stamp: Stamp


def new_name() -> str:
    """A name that tells nothing of what the file holds; names are never used again."""
    return secrets.token_hex(16)


def place_of(folder: Path, name: str, suffix: str = SUFFIX) -> Path:
    """Where the file of a name lies."""
    return folder / "chunks" / name[:2] / (name + suffix)


def on_disk(nbytes: int) -> int:
    """Bytes that a file of a size takes."""
    return -(-nbytes // BLOCK) * BLOCK


def pack(header: ChunkHeader, run: StoredRun, expires: float | None) -> bytes:
    """The bytes of an entry's file."""
    tensors = {f"kv.{name}": _on_cpu(tensor) for name, tensor in run.tensors().items()}
    for name, ids in (("tokens", header.tokens), ("history", header.history), ("behind", header.behind)):
        if ids is not None:
            tensors[f"ids.{name}"] = torch.from_numpy(np.array(ids, dtype=np.int32))
    about = {
        "format": FORMAT,
        "key": header.key,
        "fingerprint": header.scope.fingerprint,
        "namespace": header.scope.namespace,
        "base": header.base,
        "origin": header.origin,
        "codec": run.codec,
        "codec_metadata": run.metadata(),
        "expires": expires,
    }
    text = json.dumps(about, sort_keys=True)
    return save(tensors, {"kvboost-rag": text, "checksum": _checksum(text, tensors)})


def write(folder: Path, name: str, data: bytes, *, sync: bool) -> Stamp:
    """Write a file under a temporary name and rename it, so that it is there entirely or not at all.

    Returns:
        What `load` need not verify again.

    Raises:
        OSError: no room, no permission; nothing is left behind.
    """
    part = place_of(folder, name, PART)
    new = [above for above in (part.parent, part.parent.parent) if not above.exists()]
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if sync:
                os.fsync(fd)
            stamp = _stamp(os.fstat(fd))
        finally:
            os.close(fd)
        part.rename(place_of(folder, name))
        if sync:
            for above in (part.parent, *(path.parent for path in new)):
                _sync_folder(above)
        return stamp
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def load(path: Path, *, known: Stamp | None = None) -> Loaded:
    """Map an entry's file.

    The file stays locked for sharing as long as a tensor of the run lives, so that nobody wipes it meanwhile.

    Args:
        path: the file.
        known: stamp of the file when it was found intact; unless it is the same now, the checksum is compared, which
            reads all of it.

    Raises:
        FileNotFoundError: it is gone.
        BadEntry: it is no intact entry.
        NewerEntry: a newer version wrote it.
        OSError: it cannot be read just now, which says nothing about what it holds.
    """
    try:
        text, tensors, checksum, stamp = _open(path)
    except OSError as error:
        if error.errno == errno.EIO:
            raise BadEntry(f"{path.name}: {error}") from error
        raise
    about = _about(text)
    if stamp != known and _checksum(text, tensors) != checksum:
        raise BadEntry(f"{path.name}: the checksum does not fit the content")
    try:
        return _entry(about, tensors, stamp)
    except _MALFORMED as error:
        raise BadEntry(f"{path.name}: {error}") from error


def remove(path: Path, *, wipe: bool) -> bool:
    """Remove a file, if asked after writing zeros over it; False if somebody reads it just now."""
    if not wipe:
        path.unlink(missing_ok=True)
        return True
    try:
        fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return True
    try:
        if not lock_alone(fd):
            return False
        left, zeros = os.fstat(fd).st_size, bytes(1 << 20)
        while left > 0:
            left -= os.write(fd, zeros[: min(left, len(zeros))])
        os.fsync(fd)
        if os.name != "nt":
            path.unlink(missing_ok=True)  # under the lock
    finally:
        os.close(fd)
    path.unlink(missing_ok=True)
    return True


def _open(path: Path) -> tuple[str, dict[str, torch.Tensor], str, Stamp]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # The map keeps a copy of the descriptor, and with it the lock. Who wipes a file has renamed it before.
        if not share(file.fileno()) or os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{path.name} is being removed")
        size = status.st_size
        if size < 8:
            raise BadEntry(f"{path.name}: {size} bytes are no safetensors file")
        # Private and writable: torch warns about memory that it may not write to.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    head = int.from_bytes(data[:8], "little")
    if not 2 <= head <= min(size - 8, _MAX_HEADER_BYTES):
        raise BadEntry(f"{path.name}: it is truncated, or no safetensors file")
    try:
        entries = json.loads(data[8 : 8 + head])
        metadata = entries.pop("__metadata__")
        text, checksum = str(metadata["kvboost-rag"]), str(metadata["checksum"])
        tensors = {name: _tensor(data, 8 + head, entry) for name, entry in entries.items()}
    except _MALFORMED as error:
        raise BadEntry(f"{path.name}: {type(error).__name__} in its header: {error}") from error
    return text, tensors, checksum, _stamp(status)


def _tensor(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    count = int(np.prod(shape, dtype=np.int64))
    if min([begin, *shape]) < 0 or end - begin != count * dtype.itemsize or start + end > len(data):
        raise ValueError(f"a tensor of shape {shape} does not fit bytes {begin} to {end}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).view(shape)


def _about(text: str) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(text)
        version = int(about["format"])
    except _MALFORMED as error:
        raise BadEntry(f"unreadable metadata: {error}") from error
    if version > FORMAT:
        raise NewerEntry(f"format {version}; this version knows {FORMAT}")
    return about


def _entry(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], stamp: Stamp) -> Loaded:
    scope = Scope(about["fingerprint"], about["namespace"])
    tokens = _ids(tensors.get("ids.tokens"))
    if tokens is None:
        raise ValueError("it holds no token ids")
    history, base = _ids(tensors.get("ids.history")), int(about["base"])
    if about["key"] != chunk_key(scope, tokens, base, history):
        raise ValueError("its key is not that of its ids")
    header = ChunkHeader(about["key"], scope, tokens, base, history, about["origin"], _ids(tensors.get("ids.behind")))
    try:
        codec = codec_of(about["codec"])
    except ValueError as error:
        raise NewerEntry(str(error)) from error
    kv = {name.removeprefix("kv."): tensor for name, tensor in tensors.items() if name.startswith("kv.")}
    run = codec.load(kv, about["codec_metadata"])
    if run.tokens != len(tokens):
        raise ValueError(f"it holds KV of {run.tokens} tokens and {len(tokens)} ids")
    return Loaded(header, run, about["expires"], stamp)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    """Bring names to the disk itself, where the system can."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _ids(tensor: torch.Tensor | None) -> IntArray | None:
    if tensor is None:
        return None
    ids: IntArray = tensor.numpy().astype(np.int32)  # a copy: a few ids must not keep a file mapped
    ids.flags.writeable = False
    return ids


def _checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    h = xxhash.xxh3_64(text.encode())
    for name, tensor in sorted(tensors.items()):
        h.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():  # torch has no bytes of nothing
            h.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
