"""Bug localisation over Python's standard library: some functions, one with a misspelt variable; which one fails?

The shape of the KVBoost paper's benchmark, with what would give the answer away taken out: no path or module name
stands in a prompt, the typo stands nowhere but in the failing line, and that line names no candidate.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import keyword
import platform
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import MODULES

from .questions import BUCKETS, Question, bucket_of, check

LINES = (5, 70)  # of a function
TRIES = 4000
OVERHEAD = 110  # tokens of preamble, question and template
# Prompt tokens aimed at, inside each bucket's edges.
AIMS = ((350, 470), (600, 940), (1150, 1850), (2100, 2800))
PREAMBLES = (
    "You are a helpful assistant. Answer the question from the context only.",
    "You are an experienced Python programmer who finds bugs. Name the function, nothing else.",
    "You review Python code. Read the functions below carefully before you answer.",
    "Find the fault in the code given by the user, and answer in one short sentence.",
)
WORDINGS = (
    "One of these functions fails at the line\n\n    {line}\n\nwith NameError: name '{typo}' is not defined. Which?",
    "A test stops with\n\n    {line}\nNameError: name '{typo}' is not defined\n\nIn which function is this line?",
    "There is a misspelt variable, '{typo}', so this line raises NameError:\n\n    {line}\n\nName the function.",
    "The log says: NameError: name '{typo}' is not defined, raised by\n\n    {line}\n\nWhere is the bug?",
)


@dataclass(frozen=True)
class Function:
    """A function's source, without its place."""

    module: str
    name: str
    source: str


@dataclass(frozen=True)
class Mutation:
    """A function with one read of a variable misspelt."""

    function: Function
    typo: str
    line: str


class Bugs:
    """Sets: the same functions, one mutated, asked about in other words, orders and behind other preambles.

    Sets go through the buckets of prompt sizes in turn.

    Args:
        count_tokens: of a text; to choose functions of about the right size.
        count_prompt: tokens of a whole prompt of chat messages; what decides the bucket.
        per_set: questions of a set, at most as many as there are wordings.
        seed: of all choices.
        buckets: which to use.
    """

    def __init__(
        self,
        count_tokens: Callable[[str], int],
        count_prompt: Callable[[list[dict[str, str]]], int],
        *,
        per_set: int = 2,
        seed: int = 0,
        buckets: Sequence[str] = BUCKETS,
    ) -> None:
        if not 1 <= per_set <= len(WORDINGS):
            raise ValueError(f"per_set is {per_set}; there are 1 to {len(WORDINGS)} wordings of a question")
        self.per_set, self._seed = per_set, seed
        self._buckets = tuple(buckets)
        self._count_prompt = count_prompt
        self._functions = [(function, count_tokens(function.source)) for function in functions()]
        self.source = f"standard library of Python {platform.python_version()}"

    def questions(self, number: int) -> tuple[Question, ...]:
        """A set whose prompts all lie in the bucket of its number."""
        rng = random.Random(f"bugs {self._seed} {number}")
        bucket = self._buckets[number % len(self._buckets)]
        for _ in range(TRIES):
            made = self._attempt(bucket, rng)
            if made and all(bucket_of(self._count_prompt(q.messages())) == bucket for q in made):
                return made
        raise ValueError(f"no set of functions makes prompts of {bucket} tokens with this tokenizer; use other buckets")

    def _attempt(self, bucket: str, rng: random.Random) -> tuple[Question, ...] | None:
        chosen = self._draw(bucket, rng)
        if chosen is None:
            return None
        at = rng.randrange(len(chosen))
        mutation = mutate(chosen[at], chosen, rng)
        if mutation is None:
            return None
        chosen[at] = mutation.function
        preambles, wordings = rng.sample(PREAMBLES, self.per_set), rng.sample(WORDINGS, self.per_set)
        orders: list[list[Function]] = []
        while len(orders) < self.per_set:
            order = rng.sample(chosen, len(chosen))
            if order not in orders:
                orders.append(order)
        return tuple(_question(mutation, *parts, rng) for parts in zip(orders, preambles, wordings, strict=True))

    def _draw(self, bucket: str, rng: random.Random) -> list[Function] | None:
        """Four to six functions of other modules and names, together of about the right size."""
        low, high = AIMS[BUCKETS.index(bucket)]
        count = 4 if bucket == BUCKETS[0] else rng.randint(4, 6)
        each = (rng.uniform(low, high) - OVERHEAD) / count
        fitting = [function for function, tokens in self._functions if 0.6 * each <= tokens <= 1.4 * each]
        if len(fitting) < count:
            return None
        chosen = rng.sample(fitting, count)
        names = [function.name for function in chosen]
        modules = {function.module for function in chosen}
        same = any(one in other for i, one in enumerate(names) for j, other in enumerate(names) if i != j)
        return None if same or len(modules) < count else chosen


def mutate(function: Function, among: Sequence[Function], rng: random.Random) -> Mutation | None:
    """Misspell one read of a local variable; None if no line of the function is fit for it.

    Args:
        function: to mutate.
        among: all functions of the prompt: the typo stands in none of them, the line in no other one, and the line
            has no word of their names.
        rng: chooses.
    """
    everything = "\n".join(other.source for other in among)
    lines = function.source.split("\n")
    reads = _reads(function.source)
    rng.shuffle(reads)
    for row, column, name in reads:
        line = lines[row]
        fit = 12 <= len(line.strip()) <= 100 and line[column : column + len(name)] == name
        if not fit or everything.count(line.strip()) > 1 or any(_hints(line, other.name) for other in among):
            continue
        typo = _typo(name, everything, rng)
        if typo is not None:
            lines[row] = line[:column] + typo + line[column + len(name) :]
            mutated = Function(function.module, function.name, "\n".join(lines))
            return Mutation(mutated, typo, lines[row].strip())
    return None


@functools.cache
def functions() -> tuple[Function, ...]:
    """Functions and methods of the standard library that are neither tiny nor long, in a fixed order."""
    return tuple(function for module in MODULES for function in _functions_of(module))


def _functions_of(module: str) -> Iterator[Function]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    text = Path(spec.origin).read_text(encoding="utf-8")
    names: set[str] = set()
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.name in names or not _good_name(node.name):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if LINES[0] <= source.count("\n") + 1 <= LINES[1] and source.isascii() and _parses(source):
            if "/" in source or module in source.split():  # paths, and functions that name their module
                continue
            names.add(node.name)
            yield Function(module, node.name, source)


def _good_name(name: str) -> bool:
    return len(name) >= 5 and not name.startswith("__") and name not in ("main", "close", "write")


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:  # the text of a string that is indented less than the function
        return False
    return True


def _hints(line: str, name: str) -> bool:
    """Whether a line holds a word of a function's name."""
    words = re.findall(r"[A-Z]?[a-z]{3,}", name)
    return any(word.lower() in line.lower() for word in (name, *words))


def _reads(source: str) -> list[tuple[int, int, str]]:
    """Reads of local variables: row, column, name."""
    tree: Any = ast.parse(source).body[0]
    arguments = tree.args
    local = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    local |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    local -= {"self", "cls"}  # every method reads them
    body = tree.body[0].lineno  # not in the signature
    return [
        (node.lineno - 1, node.col_offset, node.id)
        for node in names
        if isinstance(node.ctx, ast.Load) and node.id in local and len(node.id) >= 4 and node.lineno >= body
    ]


def _typo(name: str, everything: str, rng: random.Random) -> str | None:
    """A misspelling that stands nowhere in a text."""
    swapped = [name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1) if name[i] != name[i + 1]]
    dropped = [name[:i] + name[i + 1 :] for i in range(1, len(name))]
    doubled = [name[: i + 1] + name[i:] for i in range(1, len(name))]
    made = sorted({*swapped, *dropped, *doubled} - {name})
    rng.shuffle(made)
    lower = everything.lower()
    for typo in made:
        taken = typo.lower() in lower or keyword.iskeyword(typo) or hasattr(builtins, typo)
        if not taken and re.fullmatch(r"[a-z_][a-z0-9_]*", typo):
            return typo
    return None


def _question(
    mutation: Mutation, order: Sequence[Function], preamble: str, wording: str, rng: random.Random
) -> Question:
    options = [function.name for function in order]
    rng.shuffle(options)
    return check(
        Question(
            preamble=preamble,
            documents=tuple(function.source for function in order),
            question=wording.format(line=mutation.line, typo=mutation.typo),
            prefix="The failing line is in the function `",
            options=tuple(options),
            gold=options.index(mutation.function.name),
            closing="`",
        )
    )
