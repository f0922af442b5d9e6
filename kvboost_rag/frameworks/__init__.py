"""What the classes of every framework have in common: engines they share, options, one turn, warming, orders.

Needs pydantic, which every framework brings.
"""

from ..streaming import Deltas
from .documents import (
    BATCH_DOCUMENTS,
    TextWarmer,
    add_reports,
    awarm_all,
    check_engine,
    progress,
    size_of,
    text_key,
    untorn,
    warm_all,
)
from .engines import loaded_engine, release_engines, shared_engine
from .options import CALL_FIELDS, SAMPLING_FIELDS, STRICT, EngineOptions, Reuse, checked
from .ordering import PrefixOrders
from .records import Records, Turns
from .turns import Asked, ReplyPieces, ask, ask_text, warm_tools
from .usage import cached_tokens, finish_reason, reuse_of
from .waiting import all_of, at_once, finished, off_loop, settled

__all__ = [
    "BATCH_DOCUMENTS",
    "CALL_FIELDS",
    "SAMPLING_FIELDS",
    "STRICT",
    "Asked",
    "Deltas",
    "EngineOptions",
    "PrefixOrders",
    "Records",
    "ReplyPieces",
    "Reuse",
    "TextWarmer",
    "Turns",
    "add_reports",
    "all_of",
    "ask",
    "ask_text",
    "at_once",
    "awarm_all",
    "cached_tokens",
    "check_engine",
    "checked",
    "finish_reason",
    "finished",
    "loaded_engine",
    "off_loop",
    "progress",
    "release_engines",
    "reuse_of",
    "settled",
    "shared_engine",
    "size_of",
    "text_key",
    "untorn",
    "warm_all",
    "warm_tools",
]
