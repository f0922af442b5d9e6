"""Text that several requests on their way have in common is computed once: the later wait until the first has read it.

One after the other, the second of two questions about the same new document finds it stored by the first. At the same
time both would miss it. So a request looks what earlier ones, still on their way, are computing, and waits for one that
computes a good part of what it needs; that one then stores its prompt as soon as it is read, and not only at the end of
its answer. Planning only; nothing here knows the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .anchors import window_hashes
from .chunks import IntArray, Scope
from .config import ANCHOR_TOKENS

LEAST_TOKENS = 2 * ANCHOR_TOKENS  # less than that cannot be found again
WORTH = 0.25  # of what the other computes must be shared, lest a short request wait for a long one
PATIENCE_S = 0.05

Spans = Sequence[tuple[int, int]]


class OnTheWay:
    """A request that is being served.

    Attributes:
        wanted: somebody waits for its prompt to be stored.
        late: somebody stored a prompt of the same scope since it began to look up what is stored.
    """

    def __init__(self, number: int, scope: Scope, ids: IntArray, *, moves: bool, stores: bool) -> None:
        self.number, self.scope, self.ids, self.moves = number, scope, ids, moves
        self.wanted = self.read = self.late = False
        self.stored = not stores  # nothing is to be had from it any more, that is
        self._new: Spans = ()
        self._work: _Work | None = None

    @property
    def work(self) -> _Work | None:
        """What it computes, as far as that is known."""
        return self._work

    def computes(self, new: Spans, *, prefix: int) -> bool:
        """Set what no stored chunk holds of it; returns whether that is news.

        Args:
            new: stretches ``(start, end)``.
            prefix: tokens from its start on that are stored.
        """
        if tuple(new) == self._new and self._work is not None:
            return False
        self._new = tuple(new)
        self._work = _Work(self.ids, self._new, prefix)
        return True

    def shares_with(self, earlier: OnTheWay) -> bool:
        """Whether to wait for an earlier request."""
        if earlier.work is None or self.work is None or earlier.stored or earlier.scope != self.scope:
            return False
        shared = self.work.shared(earlier.work) if self.moves else self.work.common_prefix(earlier.work)
        return shared >= LEAST_TOKENS and (earlier.read or shared >= WORTH * earlier.work.tokens)


class _Work:
    def __init__(self, ids: IntArray, new: Spans, prefix: int) -> None:
        self._ids, self._new, self._prefix = ids, new, prefix
        self.tokens = sum(end - start for start, end in new)

    @cached_property
    def windows(self) -> npt.NDArray[np.int32]:
        """Hashes of all windows of the new text."""
        return np.unique(
            np.concatenate([window_hashes(self._ids[:0]), *(window_hashes(self._ids[a:b]) for a, b in self._new)])
        )

    def shared(self, other: _Work) -> int:
        """Tokens, about, that both compute."""
        found = np.isin(self.windows, other.windows, assume_unique=True).sum()
        return int(found) + ANCHOR_TOKENS - 1 if found else 0

    def common_prefix(self, other: _Work) -> int:
        """Tokens that both compute at their beginning: all that an exact hit can use."""
        n = min(len(self._ids), len(other._ids))
        differs = np.flatnonzero(self._ids[:n] != other._ids[:n])
        return max((int(differs[0]) if len(differs) else n) - max(self._prefix, other._prefix), 0)


class Sharing:
    """Requests on their way, in the order in which they came. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: list[OnTheWay] = []
        self._numbers = self._changes = 0

    @contextmanager
    def enter(self, scope: Scope, ids: IntArray, *, moves: bool, stores: bool) -> Iterator[OnTheWay]:
        """Be on the way until the block is left.

        Args:
            scope: whose text it is.
            ids: the prompt, int32 ``(n,)``.
            moves: whether text can be used at another place than its own.
            stores: whether its new text will be stored.
        """
        with self._changed:
            self._numbers += 1
            mine = OnTheWay(self._numbers, scope, ids, moves=moves, stores=stores)
            self._all.append(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._all.remove(mine)
                self._store(mine)

    def wait(self, mine: OnTheWay, new: Spans, *, prefix: int, cancel: threading.Event) -> bool:
        """Say what ``mine`` is going to compute, and wait while somebody earlier computes a good part of it.

        Returns:
            Whether it waited, or others stored something meanwhile, so that what is stored should be looked up again.
        """
        with self._changed:
            if mine.computes(new, prefix=prefix):
                self._note()  # later ones may have less to wait for
            late, mine.late = mine.late, False
            if late:
                return True
            earlier = [other for other in self._all if other.number < mine.number and mine.shares_with(other)]
            for other in earlier:
                other.wanted = True
            seen = self._changes
            while earlier and self._changes == seen:
                if cancel.is_set():
                    return False
                self._changed.wait(PATIENCE_S)
            mine.late = False
            return bool(earlier)

    def has_read(self, mine: OnTheWay) -> None:
        """Its prompt is computed; whoever wants it gets it at the next step of its answer."""
        with self._changed:
            mine.read = True

    def has_stored(self, mine: OnTheWay) -> None:
        """Its prompt is stored, or will not be."""
        with self._changed:
            self._store(mine)

    def _store(self, mine: OnTheWay) -> None:
        if not mine.stored:
            mine.stored = True
            for other in self._all:
                other.late = other.late or other.scope == mine.scope
        self._note()

    def _note(self) -> None:
        self._changes += 1
        self._changed.notify_all()
