"""LangChain integration of kvboost-rag."""

from kvboost_rag import MissingExtraError, RequestTimeoutError

try:
    from kvboost_rag.frameworks import release_engines, shared_engine

    from .chat_models import ChatKVBoost
    from .documents import awarm_documents, stored_documents, warm_documents
    from .errors import PromptOverflowError
    from .llms import KVBoostLLM
    from .ordering import PrefixOrderCompressor
    from .vectorstores import KVBoostVectorStore
except ModuleNotFoundError as error:
    raise MissingExtraError("langchain_kvboost", error, extra="langchain") from error

__all__ = [
    "ChatKVBoost",
    "KVBoostLLM",
    "KVBoostVectorStore",
    "PrefixOrderCompressor",
    "PromptOverflowError",
    "RequestTimeoutError",
    "awarm_documents",
    "release_engines",
    "shared_engine",
    "stored_documents",
    "warm_documents",
]
