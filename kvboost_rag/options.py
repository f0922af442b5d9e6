"""Options of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .config import EngineConfig, Reuse, SamplingParams, check_reuse
from .errors import ConfigError

_MODES: dict[str, tuple[str, ...]] = {
    "off": ("off",),
    "exact": ("off", "exact"),
    "approximate": ("off", "exact", "approximate"),
}


class Options(TypedDict, total=False):
    """Options of `Engine.generate` and of its streaming and async forms.

    Attributes:
        sampling: see `SamplingParams`; greedy by default.
        namespace: tenant whose chunks may be used and added to; the configured one by default.
        reuse: a mode no wider than the configured one.
        tools: tool descriptions for the chat template.
        store: keep the KV of new text in this prompt; as configured by default.
        timeout_s: stop the computation and raise `RequestTimeoutError` this many seconds after the call; None waits.
    """

    sampling: SamplingParams | None
    namespace: str | None
    reuse: Reuse | None
    tools: Sequence[Mapping[str, Any]] | None
    store: bool | None
    timeout_s: float | None


def mode_of(config: EngineConfig, reuse: Reuse | None) -> Reuse:
    """The mode of a request: the engine's own, or a narrower one that was asked for.

    Raises:
        ConfigError: there is no such mode, or it is wider than the engine's.
    """
    mode = config.reuse if reuse is None else check_reuse(reuse)
    if mode not in _MODES[config.reuse]:
        raise ConfigError(
            f"reuse is {reuse!r} but this engine was made with reuse={config.reuse!r}; choose one of "
            f"{', '.join(map(repr, _MODES[config.reuse]))}, or make the engine with a wider mode"
        )
    return mode
