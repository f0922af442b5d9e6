"""How model families write tool calls, and which of them a chat template speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes tool calls in its answer.

    An answer is text, then maybe calls: ``begin call between call … end``, where each call is ``call_begin``, a JSON
    object with the name and the arguments, ``call_end``.

    Attributes:
        name: what users choose it by.
        begin: text in front of the first call.
        call_begin: text in front of each call's JSON.
        call_end: text behind each call's JSON.
        between: text between two calls.
        end: text behind the last call.
        name_key: key of the tool's name.
        arguments_key: key of the arguments.
        special: markers among these texts that are special tokens in the family's tokenizers; an answer that is
            decoded without special tokens has lost them.
    """

    name: str
    begin: str = ""
    call_begin: str = ""
    call_end: str = ""
    between: str = ""
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    special: tuple[str, ...] = ()


HERMES = ToolFormat("hermes", call_begin="<tool_call>\n", call_end="\n</tool_call>", between="\n")
LLAMA3 = ToolFormat("llama3", between="; ", arguments_key="parameters", special=("<|python_tag|>",))
MISTRAL = ToolFormat("mistral", begin="[TOOL_CALLS] [", between=", ", end="]", special=("[TOOL_CALLS]",))
JSON = ToolFormat("json", begin="[", between=", ", end="]")

FORMATS = {known.name: known for known in (HERMES, LLAMA3, MISTRAL, JSON)}
