"""LangChain integration of kvboost-rag."""

from .chat_models import ChatKVBoost
from .engines import release_engines, shared_engine
from .errors import PromptOverflowError
from .llms import KVBoostLLM

__all__ = ["ChatKVBoost", "KVBoostLLM", "PromptOverflowError", "release_engines", "shared_engine"]
