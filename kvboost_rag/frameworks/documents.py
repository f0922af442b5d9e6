"""Warming texts as a prompt will show them: in batches, each distinct text once, with the border to what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from ..engine import Engine
from ..errors import ConfigError, PromptError
from ..progress import progress as bar
from ..stats import WarmReport
from .waiting import off_loop

BATCH_DOCUMENTS = 32  # several packs of the engine; an async call can be cancelled between two batches
TAIL_CHARACTERS = 48  # of a text: enough to see how its last word becomes tokens
NEXT_TEXT = "A"  # stands for the document behind a separator


class TextWarmer:
    """Warms and forgets rendered texts of one tenant.

    Args:
        engine: the engine the model uses.
        separator: what prompts put between two documents. It is warmed with the text only if this tokenizer merges it
            with the end of the text, so that the text's last tokens would not be found without it.
        namespace: tenant that may use them; the engine's default if None.
        batch_size: texts per call of the engine, which encodes neighbours together.

    Raises:
        ConfigError: an argument has no such value.
    """

    def __init__(self, engine: Engine, *, separator: str, namespace: str | None, batch_size: int) -> None:
        check_engine(engine)
        if not isinstance(separator, str):
            raise ConfigError(f"separator is {separator!r}; it must be a string, such as '\\n\\n'")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
        self._engine, self._separator = engine, separator
        self._namespace, self.batch_size = namespace, batch_size

    def warm(self, texts: Sequence[str]) -> WarmReport:
        """Warm rendered texts in one call of the engine."""
        return self._engine.warm([self._with_border(text) for text in texts], namespace=self._namespace)

    def forget(self, texts: Sequence[str]) -> int:
        """Drop the KV of rendered texts, warmed or seen inside prompts; returns how many chunks held them."""
        return self._engine.forget([self._with_border(text) for text in texts], namespace=self._namespace)

    def batches(self, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """Distinct texts in batches, each with the number of texts they stand for."""
        seen: set[bytes] = set()
        batch: list[str] = []
        count = 0
        for text in texts:
            count += 1
            key = text_key(text)
            if key not in seen:
                seen.add(key)
                batch.append(text)
            if len(batch) == self.batch_size:
                yield count, batch
                batch, count = [], 0
        if count:
            yield count, batch

    def _with_border(self, text: str) -> str:
        """The text, and the separator if the text's last tokens are only met together with it."""
        if not self._separator or not text:
            return text
        tail = text[-TAIL_CHARACTERS:]
        met = self._engine.tokenize(tail + self._separator + NEXT_TEXT)
        alone = self._engine.tokenize(tail)
        if met[: len(alone)] == alone:
            return text
        longer = self._engine.tokenize(tail + self._separator)
        return text + self._separator if _shared(longer, met) > _shared(alone, met) else text


def warm_all(warmer: TextWarmer, texts: Iterable[str], *, total: int | None, show_progress: bool) -> WarmReport:
    """Warm texts batch by batch, and never hold them as a whole. Batches that were warmed before an error stay warm.

    Args:
        warmer: warms each batch.
        texts: rendered documents.
        total: how many, if that is known.
        show_progress: draw a progress bar.
    """
    report = warmer.warm([])  # bad arguments raise before the first text is asked for
    with progress(total, show_progress) as bar:
        for count, batch in warmer.batches(texts):
            report = add_reports(report, warmer.warm(batch))
            bar.update(count)
    return report


async def awarm_all(warmer: TextWarmer, texts: Iterable[str], *, total: int | None, show_progress: bool) -> WarmReport:
    """`warm_all` off the event loop. Cancelling the task ends it after the batch that is running."""
    report = await off_loop(lambda: warmer.warm([]))
    batches = warmer.batches(texts)
    with progress(total, show_progress) as bar:
        while (found := await off_loop(lambda: next(batches, None))) is not None:
            count, batch = found
            report = add_reports(report, await off_loop(lambda batch=batch: warmer.warm(batch)))  # type: ignore[misc]
            bar.update(count)
    return report


def check_engine(engine: object) -> None:
    """Refuse what is no engine.

    Raises:
        ConfigError: says what to give instead.
    """
    if not isinstance(engine, Engine):
        hint = "give its get_engine()" if hasattr(engine, "get_engine") else "give an Engine, or a model's get_engine()"
        raise ConfigError(f"engine is a {type(engine).__name__}; {hint}")


def untorn(text: str, name: str) -> str:
    """The text, if it can be encoded.

    Raises:
        PromptError: it holds half of a surrogate pair; says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text of {name} holds {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair, which is no text; decode the source with errors='replace'"
        ) from error
    return text


def text_key(text: str) -> bytes:
    """What identifies a text: equal for equal texts."""
    return blake2b(text.encode(), digest_size=16).digest()


def add_reports(one: WarmReport, other: WarmReport) -> WarmReport:
    """Both reports as one."""
    return WarmReport(**{part.name: getattr(one, part.name) + getattr(other, part.name) for part in fields(WarmReport)})


def size_of(docs: Iterable[Any]) -> int | None:
    """How many documents there are, if that can be known without reading them."""
    return len(docs) if isinstance(docs, Sized) else None


def progress(total: int | None, show: bool) -> Any:
    """A bar that counts documents."""
    return bar("warming", total, unit="doc", show=show)


def _shared(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
