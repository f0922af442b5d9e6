"""Engines that a process shares, so that ten classes of one model id load it once and see each other's KV."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..engine import Engine

_Key = tuple[str, EngineConfig, str]
_engines: dict[_Key, Engine] = {}
_lock = threading.Lock()


def shared_engine(
    model: str, config: EngineConfig | None = None, *, options: Mapping[str, Any] | None = None, retries: int = 0
) -> Engine:
    """The engine of a model id or folder and configuration, loaded at the first call and then kept.

    Chains are often built anew for every request; keeping the engine is what keeps their documents warm. Free the
    memory with `release_engines`.

    Args:
        model: hub id or folder.
        config: see `EngineConfig`.
        options: further arguments of `Engine.from_pretrained`, such as ``revision`` or ``dtype``.
        retries: how often loading is tried again after an `OSError`, which is what a failing download raises.
    """
    options = options or {}
    engine = loaded_engine(model, config, options=options)
    if engine is None:
        with _lock:  # two threads that ask at once must not load the model twice
            engine = loaded_engine(model, config, options=options)
            if engine is None:
                engine = _engines[_key(model, config, options)] = _load(model, config, options, retries)
    return engine


def loaded_engine(
    model: str, config: EngineConfig | None = None, *, options: Mapping[str, Any] | None = None
) -> Engine | None:
    """What `shared_engine` gives, if it need not load it."""
    engine = _engines.get(_key(model, config, options or {}))
    return None if engine is None or engine.closed else engine  # somebody else may have closed it


def release_engines() -> None:
    """Close every shared engine and forget it; the next use loads the model again."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close()


def plain(value: Any) -> Any:
    """A value as JSON has it: a path or a torch dtype by its name, which mean the same to whoever loads a model."""
    if isinstance(value, Path):
        return str(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def place_of(model: str) -> str:
    """One spelling of a hub id or folder, however it was spelled."""
    place = Path(model).expanduser()
    return str(place.resolve()) if place.is_dir() else model


def _key(model: str, config: EngineConfig | None, options: Mapping[str, Any]) -> _Key:
    # Two spellings of one model, configuration or option are one engine.
    config = config or EngineConfig()
    config = replace(config, **{field.name: plain(getattr(config, field.name)) for field in fields(config)})
    return place_of(model), config, repr(sorted((name, plain(value)) for name, value in options.items()))


def _load(model: str, config: EngineConfig | None, options: Mapping[str, Any], retries: int) -> Engine:
    for _ in range(retries):
        try:
            return Engine.from_pretrained(model, config=config, **options)
        except OSError:
            continue
    return Engine.from_pretrained(model, config=config, **options)
