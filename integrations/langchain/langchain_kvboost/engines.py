"""Engines that a process shares, so that ten chat models of one model id load it once and see each other's KV."""

from __future__ import annotations

import threading

from kvboost_rag import Engine, EngineConfig

_engines: dict[tuple[str, EngineConfig], Engine] = {}
_lock = threading.Lock()


def shared_engine(model: str, config: EngineConfig | None = None) -> Engine:
    """The engine of a model id or folder and configuration, loaded at the first call and then kept.

    Chains are often built anew for every request; keeping the engine is what keeps their documents warm. Free the
    memory with `release_engines`.
    """
    key = (model, config or EngineConfig())
    engine = _engines.get(key)
    if engine is None:
        with _lock:  # two threads that ask at once must not load the model twice
            engine = _engines.get(key)
            if engine is None:
                engine = _engines[key] = Engine.from_pretrained(model, config=config)
    return engine


def release_engines() -> None:
    """Close every shared engine and forget it; the next use loads the model again."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close()
