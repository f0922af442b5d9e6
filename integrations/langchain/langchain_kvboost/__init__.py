"""LangChain integration of kvboost-rag."""

from .chat_models import ChatKVBoost
from .engines import release_engines, shared_engine

__all__ = ["ChatKVBoost", "release_engines", "shared_engine"]
