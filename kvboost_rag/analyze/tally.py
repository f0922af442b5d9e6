"""Counts of a replayed log: a few dozen bytes for each request, whatever its length. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Mode = Literal["plain", "prefix", "exact", "approximate"]
MODES: tuple[Mode, ...] = ("plain", "prefix", "exact", "approximate")
Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request.

    Attributes:
        prompt_tokens: of the prompt.
        leading_tokens: that stood at the beginning of an earlier prompt, in the same order, from its first token on.
        moved_tokens: further ones that were seen anywhere else before.
        reused_tokens: that each mode would reuse.
        seconds: predicted to the first token, by mode.
        answer_tokens: of the answer; None if the log does not say.
        answer_s: predicted for decoding it.
        fell_back: whether moved text was found but would save too little.
    """

    prompt_tokens: int
    leading_tokens: int
    moved_tokens: int
    reused_tokens: tuple[int, int, int, int]
    seconds: tuple[float, float, float, float]
    answer_tokens: int | None = None
    answer_s: float = 0.0
    fell_back: bool = False


@dataclass(slots=True)
class Tally:
    """All requests of a log."""

    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    leading_tokens: array[int] = field(default_factory=lambda: array("q"))
    moved_tokens: array[int] = field(default_factory=lambda: array("q"))
    seconds: dict[Mode, array[float]] = field(default_factory=lambda: {mode: array("d") for mode in MODES})
    reused_tokens: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    answers: int = 0
    answer_tokens: int = 0
    answered_prompt_tokens: int = 0
    answer_s: float = 0.0
    answered_s: dict[Mode, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))
    fell_back: int = 0

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def add(self, row: Row) -> None:
        """Count one."""
        self.prompt_tokens.append(row.prompt_tokens)
        self.leading_tokens.append(row.leading_tokens)
        self.moved_tokens.append(row.moved_tokens)
        for mode, seconds, reused in zip(MODES, row.seconds, row.reused_tokens, strict=True):
            self.seconds[mode].append(seconds)
            self.reused_tokens[mode] += reused
            if row.answer_tokens is not None:
                self.answered_s[mode] += seconds
        self.fell_back += row.fell_back
        if row.answer_tokens is not None:
            self.answers += 1
            self.answer_tokens += row.answer_tokens
            self.answered_prompt_tokens += row.prompt_tokens
            self.answer_s += row.answer_s

    @property
    def total_tokens(self) -> int:
        """Of all prompts."""
        return sum(self.prompt_tokens)

    def share(self, what: Sequence[int]) -> float:
        """Tokens as a share of all prompts' tokens."""
        return sum(what) / max(self.total_tokens, 1)

    def reused_share(self, mode: Mode) -> float:
        """Share of all prompts' tokens that a mode would reuse."""
        return self.reused_tokens[mode] / max(self.total_tokens, 1)

    def mean_s(self, mode: Mode) -> float:
        """Mean predicted seconds to the first token."""
        return sum(self.seconds[mode]) / max(len(self), 1)

    def saved(self, mode: Mode, than: Mode = "plain") -> float:
        """Share of another mode's seconds to the first token that a mode saves."""
        before = sum(self.seconds[than])
        return 1 - sum(self.seconds[mode]) / before if before else 0.0

    def saved_of_all(self, mode: Mode) -> float | None:
        """Share of the seconds of prompts and answers that a mode saves; None if the log has no answers."""
        if not self.answers:
            return None
        before = self.answered_s["plain"] + self.answer_s
        return (self.answered_s["plain"] - self.answered_s[mode]) / before if before else 0.0

    def quantile_s(self, mode: Mode, q: float) -> float:
        """Predicted seconds to the first token that a share ``q`` of the requests does not exceed."""
        return float(np.quantile(np.asarray(self.seconds[mode]), q)) if len(self) else 0.0

    def course(self, parts: int) -> tuple[Numbers, Numbers, Numbers]:
        """Shares of leading, moved and new tokens in the course of the log, each ``(parts,)`` or shorter."""
        total, leading, moved = (
            np.array([part.sum() for part in np.array_split(np.asarray(column), min(parts, len(self)))], np.float64)
            for column in (self.prompt_tokens, self.leading_tokens, self.moved_tokens)
        )
        return leading / total, moved / total, 1 - (leading + moved) / total
