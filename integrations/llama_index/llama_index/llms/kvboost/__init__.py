"""LlamaIndex integration of kvboost-rag."""

from kvboost_rag import RequestTimeoutError
from kvboost_rag.frameworks import release_engines, shared_engine

from .base import KVBoost
from .settings import configure_settings

__all__ = ["KVBoost", "RequestTimeoutError", "configure_settings", "release_engines", "shared_engine"]
