"""Documents of the demo: a folder of text and Markdown, or what every Python installation has written about itself."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvboost_rag import PromptError

SUFFIXES = (".md", ".txt")
PASSAGE_TOKENS = 280
FILE_CHARACTERS = 1800  # one or two passages a file: many subjects, and warming takes a minute
SHORTEST_CHARACTERS = 180
TOPICS = (
    "assert booleans break class comparisons continue del dict else exceptions for function global if import lambda "
    "lists pass raise return strings truth try while with yield"
).split()
MODULES = "base64 copy heapq json pickle random secrets shutil statistics textwrap".split()
LICENCE_NOTE = "From the documentation that Python carries in itself (PSF licence): help() topics and docstrings."


def write_python_documents(folder: Path) -> Path:
    """Write a Markdown file per topic of the language and per module of the library; returns `folder`.

    Other Markdown files in the folder are removed: it belongs to this function. The text comes from the running
    interpreter, so it is the same on every machine with that Python version.

    Raises:
        PromptError: this interpreter carries no documentation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.md": topic_document(topics.get(name, "")) for name in TOPICS}
    texts |= {f"module-{name}.md": module_document(importlib.import_module(name)) for name in MODULES}
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        raise PromptError("this interpreter carries no documentation (python -OO removes it); name a folder: --docs")
    for stale in folder.glob("*.md"):
        if stale.name not in texts:
            stale.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "LICENCE").write_text(LICENCE_NOTE + "\n", encoding="utf-8")
    return folder


def topic_document(text: str) -> str:
    """Markdown of a help topic: titles marked, grammar left out, cut at a paragraph; empty if there is none."""
    marked = re.sub(r"^(.+)\n[*=\-]{3,}$", r"## \1", text, flags=re.MULTILINE)
    paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", marked) if p.strip() and "::=" not in p]
    room = itertools.accumulate(map(len, paragraphs))
    kept = [paragraph for paragraph, used in zip(paragraphs, room, strict=True) if used <= FILE_CHARACTERS]
    return _joined(kept)


def module_document(module: ModuleType) -> str:
    """Markdown of a module's own explanations: the whole sections that fit, in order; empty if there are none."""
    kept: list[str] = []
    room = FILE_CHARACTERS
    for title, text in _explanations(module):
        if SHORTEST_CHARACTERS <= len(text) <= room:
            kept.append(f"## {title}\n\n{text}")
            room -= len(text)
    return _joined(kept)


def load_passages(
    folder: Path, count_tokens: Callable[[str], int], passage_tokens: int = PASSAGE_TOKENS
) -> list[Document]:
    """Passages of every text and Markdown file below a folder, in the order of their paths.

    Raises:
        PromptError: the folder does not exist or holds no text.
    """
    if not folder.is_dir():
        raise PromptError(f"{folder} is not a folder; name one that holds .txt or .md files")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    documents = [
        Document(page_content=path.read_text(encoding="utf-8", errors="replace"), metadata={"source": path.name})
        for path in paths
    ]
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=passage_tokens,
        chunk_overlap=0,
        length_function=count_tokens,
        separators=["\n## ", "\n\n", "\n", ". ", " ", ""],
    )
    passages = [passage for passage in splitter.split_documents(documents) if passage.page_content.strip()]
    if not passages:
        raise PromptError(f"{folder} holds no text in .txt or .md files ({len(paths)} such files); name another folder")
    return passages


def _joined(pieces: list[str]) -> str:
    return "\n\n".join(pieces) + "\n" if pieces else ""


def _explanations(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Titles and prose: the module, its public functions and classes, and the classes' methods."""
    yield f"About {module.__name__}", _prose(inspect.getdoc(module))
    names = getattr(module, "__all__", None) or [name for name in sorted(vars(module)) if not name.startswith("_")]
    for name in names:
        thing = getattr(module, name, None)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)) or not _belongs(thing, module):
            continue
        yield f"{module.__name__}.{name}", _prose(inspect.getdoc(thing))
        if inspect.isclass(thing):
            for method, function in sorted(vars(thing).items()):
                if not method.startswith("_") and inspect.isroutine(function):
                    yield f"{module.__name__}.{name}.{method}", _prose(inspect.getdoc(function))


def _belongs(thing: object, module: ModuleType) -> bool:
    home = getattr(thing, "__module__", None) or ""
    return home.lstrip("_").split(".")[0] == module.__name__.split(".")[0]


def _prose(text: str | None) -> str:
    """The text without interpreter sessions and runs of blank lines."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    kept = [p.rstrip() for p in paragraphs if not p.lstrip().startswith((">>>", "..."))]
    return "\n\n".join(p for p in kept if p.strip())
