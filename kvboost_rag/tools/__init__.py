"""Tool calls of local models, for every integration: descriptions, formats, parsing, constrained decoding."""

from .calls import InvalidCall, Reply, ReplyReader, ToolCall
from .choices import Choice, check_flags, choice_of, schema_in
from .dialect import AnswerReader, Dialect, Turn
from .formats import FORMATS, ToolFormat
from .schemas import canonical_tool, canonical_tools, distinct_tools
from .strict import check_size

__all__ = [
    "FORMATS",
    "AnswerReader",
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
    "check_flags",
    "check_size",
    "choice_of",
    "distinct_tools",
    "schema_in",
]
