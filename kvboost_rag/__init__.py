"""kvboost-rag: a local model that reads every document once."""

from .config import EngineConfig, SamplingParams
from .engine import Engine
from .errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    KVBoostError,
    MissingExtraError,
    ModelLoadError,
    PromptError,
    RequestTimeoutError,
    StoreError,
    TransferError,
    UnsupportedModelError,
)
from .observing import Observer, RequestRecord
from .stats import (
    AuditStats,
    Delta,
    DiskStats,
    EngineStats,
    Fallback,
    Generation,
    NamespaceAudits,
    Prefill,
    Timing,
    Usage,
    WarmReport,
)
from .transfer.mapping import TransferMap

__all__ = [
    "AuditStats",
    "ConfigError",
    "ContextOverflowError",
    "Delta",
    "DiskStats",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "Fallback",
    "Generation",
    "KVBoostError",
    "MissingExtraError",
    "ModelLoadError",
    "NamespaceAudits",
    "Observer",
    "Prefill",
    "PromptError",
    "RequestRecord",
    "RequestTimeoutError",
    "SamplingParams",
    "StoreError",
    "Timing",
    "TransferError",
    "TransferMap",
    "UnsupportedModelError",
    "Usage",
    "WarmReport",
]
