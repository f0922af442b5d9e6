"""Documents of the demo: a folder of text and Markdown, or what every Python installation has written about itself."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvboost_rag import PromptError

SUFFIXES = (".md", ".txt")
PASSAGE_TOKENS = 280
MODULE_CHARACTERS = 2000  # two or three passages a module: many subjects, and warming takes a minute or two
SHORTEST_CHARACTERS = 180
MODULES = (
    "argparse base64 bisect configparser contextlib copy csv dataclasses difflib filecmp functools glob graphlib gzip "
    "hashlib heapq hmac html itertools json mimetypes pathlib pickle queue random sched secrets shelve shlex shutil "
    "smtplib statistics subprocess tempfile textwrap threading timeit urllib.parse uuid zipfile"
).split()
LICENCE_NOTE = "From the documentation strings of the Python standard library (PSF licence)."


def write_library_documents(folder: Path) -> Path:
    """Write one Markdown file per module of the standard library that explains itself well; returns `folder`.

    The text comes from the running interpreter, so it is the same on every machine with that Python version.

    Raises:
        PromptError: the interpreter was started with -OO, which removes documentation strings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for name in MODULES:
        text = module_document(importlib.import_module(name))
        if text:
            (folder / f"{name}.md").write_text(text, encoding="utf-8")
            written += 1
    (folder / "LICENCE").write_text(LICENCE_NOTE + "\n", encoding="utf-8")
    if not written:
        raise PromptError("no documentation strings in this interpreter; start Python without -OO or name --docs")
    return folder


def module_document(module: ModuleType) -> str:
    """Markdown of a module's own explanations, shortened to whole sections; empty if there are none."""
    sections: list[str] = []
    room = MODULE_CHARACTERS
    for title, text in _explanations(module):
        section = f"## {title}\n\n{text}"
        if len(text) >= SHORTEST_CHARACTERS and len(section) <= room:
            sections.append(section)
            room -= len(section)
    if not sections:
        return ""
    return "\n\n".join(sections) + "\n"


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
