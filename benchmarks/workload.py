"""The benchmarks' text: passages and questions from the Python standard library's own docstrings (PSF licence).

Library versions differ between machines, so figures are compared only within one run.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MODULES = (
    "argparse asyncio base64 bdb binascii bisect calendar cmd code codecs collections colorsys configparser contextlib "
    "copy csv datetime decimal difflib dis doctest email.message enum filecmp fileinput fnmatch fractions ftplib "
    "functools getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http.client http.cookies imaplib "
    "inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox math mimetypes netrc numbers "
    "operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint profile queue quopri "
    "random re reprlib sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl "
    "statistics string struct subprocess symtable sysconfig tarfile tempfile textwrap threading timeit tokenize trace "
    "traceback types typing unittest urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom "
    "xmlrpc.client zipfile zipimport zoneinfo"
).split()

PREAMBLES = (
    "You are a helpful assistant. Answer the question from the context only.",
    "You are a careful technical writer. Use the passages below to answer. If they do not say, say so.",
    "Answer briefly and precisely, using only the documentation given by the user.",
    "You help programmers with Python's standard library. Base every statement on the excerpts that follow, and keep "
    "the answer short.",
)

QUESTIONS = (
    "What is {name} for, and how is it used?",
    "Explain in one or two sentences what {name} does.",
    "Which arguments or options matter when one uses {name}?",
    "What should a programmer know before using {name}?",
)


@dataclass(frozen=True)
class Passage:
    """A titled piece of documentation."""

    name: str
    text: str


@dataclass(frozen=True)
class Item:
    """One prompt: which passages in which order, and what is asked."""

    preamble: str
    passages: tuple[Passage, ...]
    question: str

    def messages(self, *, passages: tuple[Passage, ...] | None = None) -> list[dict[str, str]]:
        """Chat messages; ``passages`` replaces the item's own, () leaves them out."""
        docs = self.passages if passages is None else passages
        context = "\n\n".join(p.text for p in docs)
        return [
            {"role": "system", "content": self.preamble},
            {"role": "user", "content": f"Context:\n\n{context}\n\nQuestion: {self.question}"},
        ]


def passages(count_tokens: Callable[[str], int], *, low: int = 150, high: int = 280) -> list[Passage]:
    """All passages between ``low`` and ``high`` tokens, in a fixed order."""
    found, seen = [], set()
    for name, doc in _docstrings():
        text = _fit(f"{name}\n\n{doc}", count_tokens, low, high)
        if text is not None and doc[:80] not in seen:
            seen.add(doc[:80])
            found.append(Passage(name, text))
    return found


def sample(pool: list[Passage], count: int, seed: int) -> list[Passage]:
    """At most ``count`` passages, in the pool's order."""
    if len(pool) <= count:
        return pool
    chosen = set(random.Random(f"sample {seed}").sample(range(len(pool)), count))
    return [passage for number, passage in enumerate(pool) if number in chosen]


def items(pool: list[Passage], count: int, *, docs: int = 6, seed: int = 0, preamble: str | None = None) -> list[Item]:
    """``count`` prompts of ``docs`` passages each; every passage of a prompt comes from another module."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        chosen: list[Passage] = []
        while len(chosen) < docs:
            passage = rng.choice(pool)
            if all(passage.name.split(".")[0] != other.name.split(".")[0] for other in chosen):
                chosen.append(passage)
        asked = rng.choice(chosen)
        question = QUESTIONS[index % len(QUESTIONS)].format(name=asked.name)
        made.append(Item(preamble or PREAMBLES[index % len(PREAMBLES)], tuple(chosen), question))
    return made


def _docstrings() -> Iterator[tuple[str, str]]:
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        if module.__doc__:
            yield module_name, inspect.cleandoc(module.__doc__)
        for name, member in sorted(vars(module).items()):
            public = not name.startswith("_") and getattr(member, "__module__", None) == module.__name__
            if not public or not (inspect.isclass(member) or inspect.isroutine(member)):
                continue
            doc = inspect.getdoc(member)
            if doc and len(doc) > 300:
                yield f"{module_name}.{name}", doc
            if inspect.isclass(member):
                for method, function in sorted(vars(member).items()):
                    own = getattr(function, "__doc__", None)
                    if not method.startswith("_") and inspect.isroutine(function) and own and len(own) > 500:
                        yield f"{module_name}.{name}.{method}", inspect.cleandoc(own)


def _fit(text: str, count_tokens: Callable[[str], int], low: int, high: int) -> str | None:
    paragraphs = text.split("\n\n")
    kept = ""
    for paragraph in paragraphs:
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph
        if count_tokens(longer) > high:
            break
        kept = longer
    return kept if kept and count_tokens(kept) >= low else None
