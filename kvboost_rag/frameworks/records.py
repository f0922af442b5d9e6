"""Which document of a store needs which text, what a forgotten text may take with it, whose turn it is. Thread-safe."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from zlib import crc32

from ..errors import ConfigError
from .documents import text_key

REMEMBERED_GROUPS = 4  # per text: a text warmed again may keep chunks of an earlier call
SHINGLE_WORDS = 5
SHINGLES = 8  # per text: two texts that are half the same share one with 96 %
COMMON = 64  # texts: a shingle in more of them is a heading, and says nothing


class Records:
    """Texts by document id, groups of texts that were encoded together, and texts that look alike.

    Forgetting a text drops the KV of what was encoded behind it, and of near copies of it. The records tell which
    documents may be concerned, so that they can be warmed again.

    Args:
        keep_texts: hold the texts themselves, for stores that cannot give a document back by its id.
    """

    def __init__(self, *, keep_texts: bool) -> None:
        self.lock = threading.RLock()
        self.forgets = 0  # so far: tells a call whether something was forgotten while it worked
        self._keep_texts = keep_texts
        self._key_of: dict[str, bytes] = {}
        self._ids_of: dict[bytes, set[str]] = {}
        self._texts: dict[bytes, str] = {}
        self._claims: Counter[bytes] = Counter()
        self._groups_of: dict[bytes, list[int]] = {}
        self._groups: dict[int, set[bytes]] = {}
        self._next_group = 0
        self._shingles_of: dict[bytes, tuple[int, ...]] = {}
        self._with_shingle: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def ids(self) -> list[str]:
        """Ids of all recorded documents."""
        with self.lock:
            return list(self._key_of)

    def texts(self, ids: Iterable[str]) -> dict[str, str]:
        """Kept texts of documents, by id."""
        with self.lock:
            keys = {name: self._key_of.get(name, b"") for name in ids}
            return {name: self._texts[key] for name, key in keys.items() if key in self._texts}

    def claim(self, texts: Iterable[str]) -> None:
        """A call works on these texts, and nobody may forget them until it releases them."""
        with self.lock:
            self._claims.update({text_key(text) for text in texts})

    def release(self, texts: Iterable[str]) -> None:
        """The call is done with these texts."""
        with self.lock:
            self._claims -= Counter({text_key(text) for text in texts})

    def put(self, name: str, text: str) -> None:
        """A document of the store now has this text."""
        key = text_key(text)
        with self.lock:
            self.drop([name])
            self._key_of[name] = key
            self._ids_of.setdefault(key, set()).add(name)
            if self._keep_texts:
                self._texts[key] = text

    def put_all(self, texts: Iterable[tuple[str, str]]) -> None:
        """`put` for several documents."""
        with self.lock:
            for name, text in texts:
                self.put(name, text)

    def drop(self, names: Iterable[str]) -> None:
        """These documents left the store."""
        with self.lock:
            for name in names:
                key = self._key_of.pop(name, None)
                if key is not None:
                    self._ids_of[key].discard(name)

    def replace(self, texts: Mapping[str, str]) -> None:
        """These are the documents of the store, and no others."""
        with self.lock:
            self._key_of.clear()
            self._ids_of.clear()
            for name, text in texts.items():
                self.put(name, text)

    def warmed(self, texts: Iterable[str], *, computed: bool = True) -> None:
        """These texts were given to the engine in one call, which computed some of them, or found all of them warm."""
        with self.lock:
            group, self._next_group = self._next_group, self._next_group + 1
            for text in texts:
                key = text_key(text)
                if not computed and key in self._groups_of:
                    continue
                self._groups.setdefault(group, set()).add(key)
                groups = self._groups_of.setdefault(key, [])
                groups.append(group)
                if len(groups) > REMEMBERED_GROUPS:
                    self._leave(key, groups.pop(0))
                if key not in self._shingles_of:
                    self._shingles_of[key] = shingles(text)
                    for shingle in self._shingles_of[key]:
                        self._with_shingle.setdefault(shingle, set()).add(key)

    def unneeded(self, texts: Iterable[str]) -> list[str]:
        """Those that no document has and no call works on."""
        with self.lock:
            distinct = {text_key(text): text for text in texts}
            return [text for key, text in distinct.items() if not self._ids_of.get(key) and not self._claims[key]]

    def forgotten(self, texts: Iterable[str]) -> set[str]:
        """Strike texts whose KV is gone; returns ids of the documents that may have lost theirs with it."""
        with self.lock:
            self.forgets += 1
            keys = {text_key(text) for text in texts}
            alike = keys.union(*(self._alike(key) for key in keys))
            groups = {group for key in alike for group in self._groups_of.get(key, ())}
            # A text that is warmed in a call of its own is encoded behind the one before.
            companions = alike.union(*(self._groups.get(g, ()) for n in groups for g in (n, n + 1)))
            for key in keys:
                self._strike(key)
            return {name for key in companions - keys for name in self._ids_of.get(key, ())}

    def _alike(self, key: bytes) -> set[bytes]:
        sharing = (self._with_shingle.get(shingle, set()) for shingle in self._shingles_of.get(key, ()))
        return set().union(*(keys for keys in sharing if len(keys) <= COMMON))

    def _leave(self, key: bytes, group: int) -> None:
        self._groups[group].discard(key)
        if not self._groups[group]:
            del self._groups[group]

    def _strike(self, key: bytes) -> None:
        for group in self._groups_of.pop(key, ()):
            self._leave(key, group)
        self._texts.pop(key, None)
        self._ids_of.pop(key, None)
        for shingle in self._shingles_of.pop(key, ()):
            self._with_shingle[shingle].discard(key)
            if not self._with_shingle[shingle]:
                del self._with_shingle[shingle]


class Turns:
    """One write at a time, in the order in which they came. Futures wait, so that an event loop need not."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._line: deque[tuple[Future[None], object]] = deque()  # the first one's turn it is

    def check(self) -> None:
        """Refuse a sync write on an event loop that one of its own async writes waits for.

        Raises:
            ConfigError: the write would block the loop, and wait forever.
        """
        loop = _loop()
        with self._mutex:
            if loop is not None and any(other is loop and not turn.cancelled() for turn, other in self._line):
                raise ConfigError(
                    "a sync write would wait for an async write of the same event loop, and block that loop; await "
                    "aadd_documents, aadd_texts, adelete or awarm instead"
                )

    def join(self) -> Future[None]:
        """Queue; the result is set when it is this one's turn."""
        turn: Future[None] = Future()
        with self._mutex:
            self._line.append((turn, _loop()))
            if len(self._line) == 1:
                turn.set_result(None)
        return turn

    def end(self) -> None:
        """The turn is over."""
        with self._mutex:
            self._line.popleft()
            while self._line and not self._line[0][0].set_running_or_notify_cancel():
                self._line.popleft()
            if self._line:
                self._line[0][0].set_result(None)

    def leave(self, turn: Future[None]) -> None:
        """Wait no longer; if it is this one's turn already, that is over."""
        if not turn.cancel():
            self.end()


def _loop() -> object:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def shingles(text: str) -> tuple[int, ...]:
    """A sample of the text's runs of words, chosen alike in every text: the smallest hashes (bottom-k sketch).

    Source: A. Broder, "On the resemblance and containment of documents", 1997.
    """
    words = text.split()
    runs = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return tuple(sorted({crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode()) for i in runs})[:SHINGLES])
