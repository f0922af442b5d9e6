"""How model families write tool calls, and which of them a chat template speaks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import ConfigError


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

Template: TypeAlias = str | Mapping[str, str] | Sequence[Mapping[str, str]]

_TEXT = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE = re.compile(rf"\{{%((?:{_TEXT}|[^'\"])*?)%\}}|\{{\{{((?:{_TEXT}|[^'\"])*?)\}}\}}", re.DOTALL)
_TOOLS = re.compile(rf"{_TEXT}|(?<![.\w])(tools)\b(?!\s*=(?!=))", re.DOTALL)
# In this order: what a template tells its model to write. Mistral's and Llama's texts are in no other family.
_SIGNS = (
    (MISTRAL, ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
    (HERMES, ("<tool_call>",)),
    (LLAMA3, ("<|python_tag|>", "Environment: ipython")),
)


def of_name(name: str) -> ToolFormat:
    """The format that users call so.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(f"the tool format is {name!r}; choose one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def detect(template: Template | None) -> ToolFormat | None:
    """The format in which a chat template tells its model to call tools; JSON if it is none of the known ones.

    Args:
        template: the template, or several by name as tokenizers have them. Of several the one counts that Hugging Face
            renders tools with: "tool_use", or else "default".

    Returns:
        None if the template does nothing with tools; describe them in a message then (`prompting.fallback`).

    Raises:
        ConfigError: this is no template.
    """
    chosen = _with_tools(template)
    if chosen is None or not _has_tools(chosen):
        return None
    for known, signs in _SIGNS:
        if any(sign in chosen for sign in signs):
            return known
    # Templates in the manner of Llama 3.2 that name neither token nor environment.
    return LLAMA3 if "ipython" in chosen and '"parameters"' in chosen else JSON


def _with_tools(template: Any) -> str | None:
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, Sequence) and all(isinstance(one, Mapping) for one in template):
        template = {one.get("name"): one.get("template") for one in template}
    if not isinstance(template, Mapping):
        raise ConfigError(f"the chat template is a {type(template).__name__}; give a string, or templates by name")
    chosen = template.get("tool_use", template.get("default"))
    if chosen is not None and not isinstance(chosen, str):
        raise ConfigError(f"the chat template holds a {type(chosen).__name__}; give strings by name")
    return chosen


def _has_tools(template: str) -> bool:
    """Whether the template's code reads the variable `tools`; the word in its texts and comments is nothing."""
    code = (match[1] or match[2] or "" for match in _CODE.finditer(_COMMENT.sub("", template)))
    return any(match[1] for block in code for match in _TOOLS.finditer(block))
