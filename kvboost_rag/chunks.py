"""Identity of stored token runs: scopes, content hashes, prefix hashes, chunk headers.

Hashes are BLAKE2b, keyed by tenant and model, and canonical: the same tokens give the same hash in every process and
on every machine. The key of a scope is no secret, since whoever reads the store reads the ids in it. It keeps scopes
apart: nobody can choose a namespace or a document whose hash is that of another tenant's chunk, and so learn from a
chunk of his own that cannot be stored whether that one is there. (With xxHash one can, by pen and paper.) Even so a
hash only finds a candidate; the ids decide (see `index`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
Origin = Literal["warm", "prompt", "served"]


def as_ids(tokens: Sequence[int] | npt.NDArray[np.integer]) -> IntArray:
    """Token ids as a contiguous, read-only int32 array of shape ``(n,)``."""
    ids = np.array(tokens, dtype=np.int32, ndmin=1)
    ids.flags.writeable = False
    return ids


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may use a chunk: one tenant's namespace under one model fingerprint.

    Attributes:
        fingerprint: identity of weights, adapter, tokenizer, RoPE, dtype and codec (hex).
        namespace: the tenant. Chunks never cross it.
    """

    fingerprint: str
    namespace: str

    def digest(self) -> bytes:
        """32 bytes that key every hash of this scope."""
        # The length prefix keeps ("ab", "c") apart from ("a", "bc").
        head = f"{len(self.fingerprint)}:{self.fingerprint}:{self.namespace}"
        return blake2b(head.encode("utf-8", "surrogatepass"), digest_size=32, person=b"scope").digest()


class ScopedHash:
    """A hash of 128 bits over ids that are given piece by piece, keyed by a scope."""

    def __init__(self, scope: Scope, kind: bytes) -> None:
        self._hash = blake2b(digest_size=16, key=scope.digest(), person=kind)

    def update(self, data: bytes | memoryview) -> None:
        """Go on with raw ids, little-endian int32."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """The hash of what was given so far."""
        return self._hash.hexdigest()


def content_hash(scope: Scope, tokens: IntArray) -> str:
    """Hash of token ids in a scope, hex."""
    return _digest(scope, b"content", tokens)


def prefix_hash(scope: Scope, sequence: IntArray) -> str:
    """Hash of everything from position 0 to the end of ``sequence`` in a scope, hex.

    The streaming hash of a sequence continues the hash of any prefix of it, so the value chains the
    parent's without depending on where earlier chunks were cut.
    """
    return _digest(scope, b"prefix", sequence)


def chunk_key(scope: Scope, tokens: IntArray, base: int, history: IntArray | None) -> str:
    """Key of a chunk in every store tier: content plus the history its KV was computed behind.

    ``history=None`` marks KV computed behind an approximate context; it is keyed by its base position.
    """
    h = ScopedHash(scope, b"chunk")
    h.update(content_hash(scope, tokens).encode())
    h.update(prefix_hash(scope, history).encode() if history is not None else b"approximate:%d" % base)
    return h.hexdigest()


def _digest(scope: Scope, kind: bytes, tokens: IntArray) -> str:
    h = ScopedHash(scope, kind)
    h.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return h.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """What is known of a chunk without its tensors.

    Attributes:
        key: `chunk_key`, unique in every tier.
        scope: who may use it.
        tokens: ids of the chunk, int32 ``(n,)``.
        base: position of the chunk's first token when its keys were computed.
        history: the ``base`` ids in front of the chunk when ``exact``; None when the KV was computed
            behind an approximate context and may never serve an exact hit.
        origin: "warm" if the user asked for it, "prompt" if it was seen inside a prompt, "served" if it is a whole
            prompt and its answer with the moved and repaired KV that served them, for use at its own place only.
        behind: the ids in front of a chunk without history: what its KV has seen must be known to forget it.
    """

    key: str
    scope: Scope
    tokens: IntArray
    base: int
    history: IntArray | None
    origin: Origin
    behind: IntArray | None = None

    @classmethod
    def of(
        cls,
        scope: Scope,
        tokens: IntArray,
        *,
        base: int,
        history: IntArray | None,
        origin: Origin,
        behind: IntArray | None = None,
    ) -> ChunkHeader:
        """Build a header and its key."""
        if history is not None and len(history) != base:
            raise ValueError(f"history has {len(history)} tokens but base is {base}")
        return cls(chunk_key(scope, tokens, base, history), scope, tokens, base, history, origin, behind)

    @property
    def seen(self) -> IntArray:
        """Everything that the KV has seen: what stood in front of the chunk, and the chunk."""
        before = self.history if self.history is not None else self.behind
        return self.tokens if before is None else np.concatenate([before, self.tokens])

    def is_same(self, other: ChunkHeader) -> bool:
        """Whether both mean the same tokens behind the same history of the same tenant and model, id by id."""
        if self is other:
            return True
        if (self.scope, self.base, self.exact) != (other.scope, other.base, other.exact):
            return False
        same = np.array_equal(self.tokens, other.tokens)
        return same and (self.history is None or np.array_equal(self.history, other.history))  # type: ignore[arg-type]

    @property
    def ids_bytes(self) -> int:
        """Bytes of all ids held."""
        return sum(ids.nbytes for ids in (self.tokens, self.history, self.behind) if ids is not None)

    @property
    def exact(self) -> bool:
        """Whether the KV is what a full prefill of history and chunk gives."""
        return self.history is not None

    @property
    def mean(self) -> bool:
        """Whether the KV is the mean over several histories, all of which `behind` holds."""
        return self.origin == "warm" and not self.exact and self.behind is not None

    def __len__(self) -> int:
        return len(self.tokens)


def header_of(
    scope: Scope, sequence: IntArray, start: int, end: int, origin: Origin, *, exact: bool = True
) -> ChunkHeader:
    """Header of ``sequence[start:end]``; if ``exact``, computed behind ``sequence[:start]``."""
    before = sequence[:start]
    history, behind = (before, None) if exact else (None, before)
    return ChunkHeader.of(scope, sequence[start:end], base=start, history=history, origin=origin, behind=behind)


@dataclass(frozen=True, slots=True)
class Hit:
    """A run of the prompt that equals a run of a stored chunk, verified id by id.

    Attributes:
        start: position in the prompt.
        length: tokens.
        key: the chunk.
        offset: position inside the chunk.
    """

    start: int
    length: int
    key: str
    offset: int

    @property
    def end(self) -> int:
        """Position after the run in the prompt."""
        return self.start + self.length
