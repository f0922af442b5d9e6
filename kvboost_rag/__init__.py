"""kvboost-rag: a local model that reads every document once."""

from .config import EngineConfig, SamplingParams
from .engine import Engine
from .errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    KVBoostError,
    PromptError,
    RequestTimeoutError,
    StoreError,
    UnsupportedModelError,
)
from .stats import Delta, DiskStats, EngineStats, Generation, Prefill, Timing, Usage, WarmReport

__all__ = [
    "ConfigError",
    "ContextOverflowError",
    "Delta",
    "DiskStats",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "Generation",
    "KVBoostError",
    "Prefill",
    "PromptError",
    "RequestTimeoutError",
    "SamplingParams",
    "StoreError",
    "Timing",
    "UnsupportedModelError",
    "Usage",
    "WarmReport",
]
