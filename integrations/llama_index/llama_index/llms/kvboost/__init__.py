"""LlamaIndex integration of kvboost-rag."""

from kvboost_rag import MissingExtraError, RequestTimeoutError

try:
    from kvboost_rag.frameworks import release_engines, shared_engine

    from .base import KVBoost
    from .ingestion import WarmKV, aforget_nodes, awarm_nodes, forget_nodes, warm_nodes
    from .nodes import stored_nodes
    from .postprocessor import KVBoostNodePostprocessor
    from .settings import configure_settings
    from .vectorstores import KVBoostVectorStore
except ModuleNotFoundError as error:
    raise MissingExtraError("llama_index.llms.kvboost", error, extra="llama-index") from error

__all__ = [
    "KVBoost",
    "KVBoostNodePostprocessor",
    "KVBoostVectorStore",
    "RequestTimeoutError",
    "WarmKV",
    "aforget_nodes",
    "awarm_nodes",
    "configure_settings",
    "forget_nodes",
    "release_engines",
    "shared_engine",
    "stored_nodes",
    "warm_nodes",
]
