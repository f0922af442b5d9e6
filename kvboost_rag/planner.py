"""From hits to a plan: segments that tile the prompt. Pure; no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .chunks import ChunkHeader, Hit
from .config import ANCHOR_TOKENS
from .repair import Asked, Positions, Run

Kind = Literal["exact", "approximate", "transferred", "compute"]
Fresh: TypeAlias = npt.NDArray[np.bool_]
_CHANGED = ("approximate", "transferred")  # kinds whose KV a full prefill would not give


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt positions ``[start, end)`` and where their KV comes from.

    Attributes:
        kind: "exact", "approximate", "transferred" (approximate, and mapped from the KV of another model) or "compute".
        start, end: positions in the prompt.
        key: chunk that serves the segment; None for "compute". Of "transferred" ones it is the other model's.
        offset: first token inside that chunk.
        delta: how far the keys move, in positions; 0 for exact segments.
        settled: whether an approximate segment needs no repair: it was repaired at this very place when it was served
            before, or it is `lossy`.
        lossy: whether an approximate segment would be an exact hit, had its codec lost nothing.
    """

    kind: Kind
    start: int
    end: int
    key: str | None = None
    offset: int = 0
    delta: int = 0
    settled: bool = False
    lossy: bool = False

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """How one prompt is served. The segments tile ``[0, prompt_tokens)`` in order.

    Attributes:
        prompt_tokens: length of the prompt.
        segments: see there; the last token is always computed.
        runs: stretches of changed KV that moved as one piece: a seam lies only between runs.
        asked: what the question says of the runs; None until it is read.
    """

    prompt_tokens: int
    segments: tuple[Segment, ...]
    runs: tuple[Run, ...] = ()
    asked: Asked | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.end <= segment.start:
                raise ValueError(f"segment {segment} does not continue the plan at {at}")
            at = segment.end
        if at != self.prompt_tokens:
            raise ValueError(f"the segments end at {at}, the prompt at {self.prompt_tokens}")

    def tokens(self, kind: Kind) -> int:
        """Tokens of one kind."""
        return sum(len(s) for s in self.segments if s.kind == kind)

    @property
    def computed(self) -> Positions:
        """Positions that no chunk serves, ascending."""
        new = [np.arange(s.start, s.end) for s in self.segments if s.kind == "compute"]
        return np.concatenate([np.empty(0, np.int64), *new])

    @property
    def exact_end(self) -> int:
        """Tokens from position 0 that are exact hits."""
        return next((s.start for s in self.segments if s.kind != "exact"), self.prompt_tokens)

    @property
    def pure_until(self) -> int:
        """Position up to which everything computed sees only KV of its own history, exact but for a codec's loss."""
        return next((s.start for s in self.segments if s.kind in _CHANGED and not s.lossy), self.prompt_tokens)

    @property
    def keys(self) -> tuple[str, ...]:
        """Chunks of this model that the plan needs, in prompt order, without repeats."""
        return tuple(dict.fromkeys(s.key for s in self.segments if s.key is not None and s.kind != "transferred"))

    @property
    def transferred_keys(self) -> tuple[str, ...]:
        """Chunks of the other model that the plan needs, in prompt order, without repeats."""
        return tuple(dict.fromkeys(s.key for s in self.segments if s.key is not None and s.kind == "transferred"))


def make_plan(
    prompt_tokens: int,
    exact: Sequence[Hit],
    approximate: Sequence[Hit] = (),
    headers: Mapping[str, ChunkHeader] | None = None,
    served: Hit | None = None,
    *,
    transferred: Sequence[Hit] = (),
    lossy: bool = False,
) -> Plan:
    """Tile a prompt with hits; whatever no hit covers, and always the last token, is computed.

    Args:
        prompt_tokens: length of the prompt, at least 1.
        exact: hits that tile ``[0, e)``.
        approximate: hits behind these, ascending, not overlapping.
        headers: of all approximate and transferred hits.
        served: hit from e on that is not repaired again.
        transferred: hits on chunks of another model, where no other hit is.
        lossy: whether chunks lost something when they were stored, so that no hit is exact.
    """
    last = prompt_tokens - 1
    segments: list[Segment] = []
    for hit in exact:
        if hit.start < last:
            where = (hit.start, min(hit.end, last), hit.key, hit.offset)
            segments.append(
                Segment("approximate", *where, settled=True, lossy=True) if lossy else Segment("exact", *where)
            )
    if served is not None and served.start < last:
        end = min(served.end, last)
        segments.append(Segment("approximate", served.start, end, served.key, served.offset, settled=True))
    changed: list[tuple[Hit, Kind]] = [(hit, "approximate") for hit in approximate]
    changed += [(hit, "transferred") for hit in transferred]
    for hit, kind in sorted(changed, key=lambda pair: pair[0].start):
        if hit.start >= last:
            continue
        header = (headers or {})[hit.key]
        delta = hit.start - (header.base + hit.offset)
        _fill(segments, hit.start)
        segments.append(Segment(kind, hit.start, min(hit.end, last), hit.key, hit.offset, delta))
    _fill(segments, prompt_tokens)
    return Plan(prompt_tokens, tuple(segments), _runs(segments, headers or {}))


def without_approximate(plan: Plan) -> Plan:
    """The same plan with changed segments computed: exact, what a full prefill gives."""
    segments: list[Segment] = [s for s in plan.segments if s.kind == "exact"]
    _fill(segments, plan.prompt_tokens)
    return Plan(plan.prompt_tokens, tuple(segments))


def outside(hits: Sequence[Hit], taken: Sequence[Hit]) -> tuple[Hit, ...]:
    """What of some hits no other hit covers, in pieces of at least an anchor.

    Args:
        hits: ascending, not overlapping.
        taken: likewise.
    """
    pieces = []
    for start, end in gaps(max((hit.end for hit in hits), default=0), taken):
        for hit in hits:
            a, b = max(hit.start, start), min(hit.end, end)
            if b - a >= ANCHOR_TOKENS:
                pieces.append(Hit(a, b - a, hit.key, hit.offset + a - hit.start))
    return tuple(pieces)


def until(hits: Sequence[Hit], end: int, headers: Mapping[str, ChunkHeader]) -> tuple[Hit, ...]:
    """Hits whose text was met in a prompt cut off at ``end``, in pieces of at least an anchor; others as they are."""
    cut = [h if headers[h.key].origin == "warm" else replace(h, length=min(h.length, end - h.start)) for h in hits]
    return tuple(new for new, hit in zip(cut, hits, strict=True) if new is hit or new.length >= ANCHOR_TOKENS)


def fresh_of(plan: Plan, repaired: Positions, before: Fresh | None) -> Fresh:
    """What of a prompt's KV is not as it was moved, bool ``(n,)``.

    Args:
        plan: as it was run.
        repaired: approximate positions that were recomputed.
        before: the same of the prompt as it was served which it continues; None counts as nothing.
    """
    fresh = np.ones(plan.prompt_tokens, bool)
    for s in plan.segments:
        if s.kind in _CHANGED and not s.lossy:
            fresh[s.start : s.end] = before[s.start : s.end] if s.settled and before is not None else False
    fresh[repaired] = True
    return fresh


def gaps(n: int, taken: Sequence[Hit]) -> tuple[tuple[int, int], ...]:
    """Stretches of ``n`` positions that no hit covers."""
    found, at = [], 0
    for start, end in [*((hit.start, hit.end) for hit in sorted(taken, key=lambda hit: hit.start)), (n, n)]:
        if start > at:
            found.append((at, min(start, n)))
        at = max(at, end)
    return tuple(found)


def _fill(segments: list[Segment], end: int) -> None:
    start = segments[-1].end if segments else 0
    if start < end:
        segments.append(Segment("compute", start, end))


def _runs(segments: Sequence[Segment], headers: Mapping[str, ChunkHeader]) -> tuple[Run, ...]:
    runs: list[Run] = []
    before: Segment | None = None
    for segment in segments:
        repairable = segment.kind in _CHANGED and not segment.settled
        if repairable:
            if before is not None and _continues(before, segment, headers):
                runs[-1] = replace(runs[-1], end=segment.end)
            else:
                mapped = segment.kind == "transferred"
                mean = not mapped and headers[segment.key or ""].mean
                runs.append(Run(segment.start, segment.end, mean=mean, mapped=mapped))
        before = segment if repairable else None
    return tuple(runs)


def _continues(a: Segment, b: Segment, headers: Mapping[str, ChunkHeader]) -> bool:
    """Whether b's KV was computed right behind a's, behind the same ids: then no seam lies between them."""
    if (a.kind, a.end, a.delta) != (b.kind, b.start, b.delta) or a.key is None or b.key is None:
        return False
    first, second = headers[a.key], headers[b.key]
    before = b.start - b.delta
    return bool(np.array_equal(first.seen[:before], second.seen[:before]))
