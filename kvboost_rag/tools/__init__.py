"""Tool calls of local models, for every integration: descriptions, formats, parsing, constrained decoding."""

from .calls import InvalidCall, Reply, ReplyReader, ToolCall
from .dialect import Choice, Dialect, Turn
from .formats import FORMATS, ToolFormat
from .schemas import canonical_tool, canonical_tools
from .strict import check_size

__all__ = [
    "FORMATS",
    "Choice",
    "Dialect",
    "InvalidCall",
    "Reply",
    "ReplyReader",
    "ToolCall",
    "ToolFormat",
    "Turn",
    "canonical_tool",
    "canonical_tools",
    "check_size",
]
