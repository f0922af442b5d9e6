"""Sphinx: `make docs` builds the site from these Markdown files and the docstrings."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "integrations" / "langchain"), str(ROOT / "integrations" / "llama_index")]
importlib.import_module("llama_index.llms.kvboost")  # whole, before autodoc looks for its names one by one

project = "kvboost-rag"
author = "kvboost-rag contributors"
copyright = f"2026, {author}"
release = metadata.version("kvboost-rag")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "kvboost-rag"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style = "default"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # docstrings name parameters and values in single backquotes, which is no cross-reference

# What the reference does not document: other packages, and our own insides.
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|annotated_types|collections\.abc|pathlib|typing)\..*"),
    (r"py:.*", r"(langchain_core|llama_index\.core|opentelemetry|prometheus_client|pydantic)\..*"),
    (r"py:.*", r"(numpy|np|npt|torch|transformers)\..*"),
    (r"py:.*", r"(kvboost_rag|langchain_kvboost|llama_index\.llms\.kvboost)\.\w+\..*"),
    (r"py:.*", r"(contextvars|threading|types)\..*|dict\[str"),
    (r"py:.*", r"(AIMessage|Base\w+|Document|LanguageModelInput|MetadataMode|NodeTemplate|Plan|Runnable|ToolLike)"),
]

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
_NAMES = re.compile(r"^( +)(\w+(?:,\s+\w+)+): ", flags=re.MULTILINE)


def _name_files_outside(app: Any, page: str, source: list[str]) -> None:
    """Links to files beside this folder work where the repository is shown; the site, which lacks them, names them."""

    def named(link: re.Match[str]) -> str:
        target = ((DOCS / page).parent / link[2]).resolve()
        return link[0] if target.is_relative_to(DOCS) else f"{link[1]} (`{target.relative_to(ROOT)}`)"

    source[0] = _LINK.sub(named, source[0])


def _mend_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon would take "a, b: text" of attributes, and a property's words up to a colon, for types."""
    text = _NAMES.sub(lambda found: found[1] + re.sub(r",\s+", ",\u200b", found[2]) + ": ", "\n".join(lines))
    lines[:] = text.split("\n")
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, since blank lines are passed over


def _shorten_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Frameworks' classes are pydantic models with dozens of inherited fields; the pages have tables of what counts."""
    return ("(**fields)", None) if what == "class" and hasattr(thing, "model_fields") else None


def setup(app: Any) -> None:
    """Before MyST and napoleon see the text."""
    app.connect("source-read", _name_files_outside)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _mend_docstring, priority=400)
