"""Errors of the engine.

    KVBoostError
    ├── ConfigError            a configuration value that cannot take effect
    ├── PromptError            a prompt, document or message that cannot be run
    │   └── ContextOverflowError   prompt (plus answer) longer than the model's window
    ├── ModelLoadError         there is no such model, or it cannot be loaded here; also an `OSError`
    ├── UnsupportedModelError  the model cannot be served in the asked mode
    ├── TraceError             a trace that cannot be written, read or replayed
    ├── TransferError          a map of one model's KV to another's that cannot be made, read or used
    ├── StoreError             a folder of stored KV that cannot be used as it is
    ├── MissingExtraError      an optional extra is not installed; also an `ImportError`
    ├── RequestTimeoutError    no answer within the time that was asked for
    └── EngineClosedError      the engine was closed

Every message names the value, the limit and the remedy. What a caller must mend is no `ValueError`: LlamaIndex takes
that for a badly formed answer, and says "Empty Response" instead.
"""

from __future__ import annotations

from typing import Any


class KVBoostError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(KVBoostError):
    """A configuration or sampling value is out of its domain."""


class PromptError(KVBoostError):
    """A prompt, document or chat message cannot be turned into tokens to run."""


class ContextOverflowError(PromptError):
    """The prompt does not fit the model's context window.

    Attributes:
        prompt_tokens: tokens of the prompt.
        window_tokens: tokens the model can hold.
    """

    def __init__(self, prompt_tokens: int, window_tokens: int, *, extra: str = "") -> None:
        self.prompt_tokens = prompt_tokens
        self.window_tokens = window_tokens
        self._extra = extra
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but the model's context window holds {window_tokens}"
            f"{extra}; retrieve fewer documents, shorten them, or use a model with a longer window"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _overflow, (type(self), self.prompt_tokens, self.window_tokens, self._extra)


def _overflow(kind: type[ContextOverflowError], prompt_tokens: int, window_tokens: int, extra: str) -> Any:
    return kind(prompt_tokens, window_tokens, extra=extra)


class ModelLoadError(KVBoostError, OSError):
    """A model is not there, not allowed, damaged, unknown to transformers, or larger than memory."""


class UnsupportedModelError(KVBoostError):
    """The model (or its positional scheme) cannot be served in the asked mode.

    Attributes:
        layer: first layer that failed the check, where one is to blame.
    """

    def __init__(self, message: str, *, layer: int | None = None) -> None:
        self.layer = layer
        super().__init__(message)


class TraceError(KVBoostError, ValueError):
    """A trace cannot be written, read or replayed."""


class TransferError(KVBoostError):
    """A map for KV transfer cannot be made, read, or used with these models."""


class StoreError(KVBoostError):
    """A folder of stored KV cannot be used as it is: no store, damaged, of a newer version, or read-only."""


class MissingExtraError(KVBoostError, ImportError):
    """A package that only an optional extra brings is not installed.

    Attributes:
        extra: the one that brings it.
    """

    def __init__(self, what: str, missing: ImportError, *, extra: str) -> None:
        self.extra = extra
        # What is missing may be a package of that package, whose own message is of no use to anybody.
        super().__init__(
            f"{what} needs the package {(missing.name or '?').partition('.')[0]!r}, which is not installed; "
            f"install it with: pip install 'kvboost-rag[{extra}]'",
            name=missing.name,
        )


class RequestTimeoutError(KVBoostError, TimeoutError):
    """The answer was not finished within the time that the caller set; the computation was stopped."""


class EngineClosedError(KVBoostError, RuntimeError):
    """The engine was closed; make a new one."""
