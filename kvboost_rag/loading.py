"""What a user names as a model, and what can be wrong with it: told in one line, and before loading if possible."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import HfApi, get_local_safetensors_metadata, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from safetensors import SafetensorError, safe_open

from .errors import ConfigError, KVBoostError, MissingExtraError, ModelLoadError

HUB_TIMEOUT_S = 10.0
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_OWN_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # these become the dtype that is asked for; others stay
_BYTES = {**_OWN_FLOATS, "I64": 8, "I32": 4, "I16": 2, "U64": 8, "U32": 4, "U16": 2}
_UNKNOWN_TYPE = re.compile(r"model type `([^`]*)` but Transformers does not recognize")
GIVE = "give a hub id such as 'organisation/name', or the folder that a model was saved in"


def place_of(model: str, gguf_file: str | None) -> str:
    """The folder, or the hub id. A mistyped path would be taken for a hub id, whose error says nothing of paths.

    Raises:
        ConfigError: what is meant as a folder is none, or holds no model.
    """
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"the model is a {type(model).__name__}; give a hub id or a folder, or use Engine(model, …)")
    if not str(model).strip():
        raise ConfigError(f"the model is {str(model)!r}; {GIVE}")
    place = Path(model).expanduser()
    if place.is_file():
        hint = f"; for a GGUF file add gguf_file={place.name!r}" if place.suffix == ".gguf" else ""
        raise ConfigError(f"{model} is a file; give its folder, {str(place.parent)!r}{hint}")
    if place.is_dir():
        wanted = gguf_file or "config.json"
        if not (place / wanted).is_file():
            found = next((file.name for file in sorted(place.glob("*.gguf"))), None)
            hint = f"; for the GGUF file there, gguf_file={found!r}" if found and gguf_file is None else ""
            raise ConfigError(f"the folder {model} holds no {wanted}; give the folder that a model was saved in{hint}")
        return str(place)
    if str(model).startswith(("/", "./", "../", "~")) or str(model).count("/") > 1:
        raise ConfigError(f"there is no folder {model}; {GIVE}")
    return str(model)


def check_gguf(gguf_file: str) -> None:
    """Import what reading a GGUF file needs.

    Raises:
        MissingExtraError: it is not installed.
    """
    for package in ("gguf", "accelerate"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"the GGUF file {gguf_file}", error, extra="gguf") from error


def check_reachable(place: str, hf: dict[str, Any]) -> None:
    """Ask the hub for a model that is not on this machine: transformers would try for half a minute before it says so.

    Raises:
        ModelLoadError: there is none of that id, or the hub cannot be reached.
    """
    where = {"revision": hf.get("revision"), "cache_dir": hf.get("cache_dir")}
    if Path(place).is_dir() or hf.get("local_files_only"):
        return
    with explaining(place):
        if not isinstance(try_to_load_from_cache(place, "config.json", **where), str):
            HfApi().model_info(place, revision=hf.get("revision"), token=hf.get("token"), timeout=HUB_TIMEOUT_S)


def check_memory(place: str, dtype: torch.dtype | None, hf: dict[str, Any]) -> None:
    """Refuse a model whose weights do not fit the memory of this machine: it would be killed, or never answer.

    Weights that were not downloaded yet are not looked at.

    Args:
        place: folder or hub id.
        dtype: of the weights in memory; None leaves each as it is.
        hf: further arguments of `from_pretrained`.

    Raises:
        ModelLoadError: says what is needed and what is there.
    """
    needed, free = weight_bytes(place, dtype, hf), available_bytes()
    if needed <= free:
        return
    remedies = ["take a smaller model", "end other programs"]
    if dtype is None or dtype.itemsize > 2:
        remedies.insert(0, "load it with dtype='bfloat16', if that is half as large")
    raise ModelLoadError(
        f"the weights of {place} take {needed / _GIB:.1f} GiB of memory as {dtype or 'they are stored'}, and "
        f"{free / _GIB:.1f} GiB are free; {', or '.join(remedies)}"
    )


def weight_bytes(place: str, dtype: torch.dtype | None, hf: dict[str, Any]) -> int:
    """Bytes of a model's weights in memory, from the headers of its safetensors files; 0 if they are not here."""
    folder = Path(place)
    try:
        if not folder.is_dir():
            names = {name: hf[name] for name in ("revision", "cache_dir") if name in hf}
            folder = Path(snapshot_download(place, local_files_only=True, **names))
        metadata = get_local_safetensors_metadata(folder / (hf.get("subfolder") or ""))
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return 0  # other formats; what is broken is told by whoever loads it
    sizes = _BYTES if dtype is None else {**_BYTES, **dict.fromkeys(_OWN_FLOATS, dtype.itemsize)}
    return sum(count * sizes.get(kind, 1) for kind, count in metadata.parameter_count.items())


def available_bytes() -> int:
    """Memory that may still be used, also within a container's limit."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stats = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free  # no container, or an older kind
    # Cached pages of files count as used, but are given up when somebody needs memory.
    return free if limit == "max" else min(free, int(limit) - used + int(stats.get("file", 0)))


@contextmanager
def explaining(place: str) -> Iterator[None]:
    """Say in one line what is wrong with a model, and what to do, whoever raises.

    Raises:
        ModelLoadError: instead of what the block raised.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{place} needs the package {error.name!r}; install it with: pip install {error.name}"
        ) from error
    except Exception as error:
        if isinstance(error, (KVBoostError, TypeError)):  # the latter: an argument that transformers does not know
            raise
        raise ModelLoadError(_explained(place, error)) from error


def _explained(place: str, error: BaseException) -> str:
    local = Path(place).is_dir()
    for cause in _causes(error):
        if isinstance(cause, GatedRepoError) or _status(cause) == 403:
            return (
                f"{place} is gated: accept its terms on its page of the hub, then type `hf auth login` (or give "
                "token=…), or take a model that is not gated"
            )
        if isinstance(cause, RevisionNotFoundError):
            return f"{place} has no such revision; leave revision out, or give a branch, tag or commit of it"
        if isinstance(cause, RepositoryNotFoundError) or _status(cause) == 401:
            return (
                f"there is no folder and no model on the hub called {place}, or it is private; check the spelling, or "
                "type `hf auth login` if it is private"
            )
        if isinstance(cause, HFValidationError):
            return f"{place!r} is no folder and no hub id; {GIVE}"
        if isinstance(cause, SafetensorError):
            return _damaged(place)
    if match := _UNKNOWN_TYPE.search(str(error)):
        return (
            f"{place} is a model of type {match[1]!r}, which the installed transformers does not know; type `pip "
            "install --upgrade transformers`, or take another model"
        )
    if not local and any(_is_of_the_network(cause) for cause in _causes(error)):
        return (
            f"{place} is no folder here, and the hub cannot be reached; give the path of a folder, or on a machine "
            f"with network type `hf download {place}`, which puts it where it is found without one"
        )
    if "backend tokenizer" in str(error):
        return f"{place} holds no tokenizer; save it there with tokenizer.save_pretrained({place!r}), or use Engine(…)"
    remedy = "; give the folder that model.save_pretrained(…) and tokenizer.save_pretrained(…) wrote" if local else ""
    return f"{place} cannot be loaded: {_one_line(error)}{remedy}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """What the hub answered; a mirror of it may leave out the header by which the client tells the reason."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _is_of_the_network(error: BaseException) -> bool:
    """Whether nobody answered; by name, for the hub's client may use another HTTP library in its next version."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout", "OfflineModeIsEnabled"}) or (
        "couldn't connect" in str(error)
    )


def _damaged(place: str) -> str:
    """Which weights cannot be read, and why they often cannot."""
    for file in sorted(Path(place).glob("*.safetensors")) if Path(place).is_dir() else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            with file.open("rb") as opened:
                pointer = opened.read(40).startswith(b"version https://git-lfs")
            if pointer:
                return f"{file} is a pointer of Git LFS and no weights; type `git lfs pull` in {place}"
            return f"{file} is incomplete or damaged ({file.stat().st_size} bytes); download it again"
    return f"the weights of {place} are incomplete or damaged; type `hf download {place} --force-download`"


def _one_line(error: BaseException) -> str:
    """What an error says, without the lists and hints of its later lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
