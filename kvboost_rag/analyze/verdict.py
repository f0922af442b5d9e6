"""Go or no-go, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tally import Mode, Tally

LEAST_REQUESTS = 20  # fewer say nothing of what repeats
LEAST_SAVED = 0.2  # of the seconds to the first token: less than that nobody notices
LEAST_SAVED_OF_ALL = 0.05  # of the seconds of prompts and answers together, where the log holds answers
LEAST_OVER_EXACT = 0.2  # that approximate reuse must save of exact mode's seconds to be worth not being exact

HELP = (
    f"Go: at least {LEAST_SAVED:.0%} of the time to the first token is saved, over {LEAST_REQUESTS} requests or more, "
    f"and, where the log holds answers, {LEAST_SAVED_OF_ALL:.0%} of the time of prompts and answers. The mode is "
    f"'approximate' if it saves {LEAST_OVER_EXACT:.0%} of the time that 'exact' leaves, and 'exact' otherwise."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to switch reuse on.

    Attributes:
        go: whether.
        mode: the mode that is worth it; None without one.
        reason: why, in figures.
    """

    go: bool
    mode: Literal["exact", "approximate"] | None
    reason: str


def judge(tally: Tally) -> Verdict:
    """What a log says of reuse."""
    if len(tally) < LEAST_REQUESTS:
        return _no(f"{len(tally)} requests are too few to tell what repeats; give a log of {LEAST_REQUESTS} or more")
    over = tally.saved("approximate", "exact")
    mode: Literal["exact", "approximate"] = "approximate" if over >= LEAST_OVER_EXACT else "exact"
    saved, of_all = tally.saved(mode), tally.saved_of_all(mode)
    found = _repeats(tally)
    if saved < LEAST_SAVED:
        best = max(tally.saved("exact"), tally.saved("approximate"))
        return _no(f"{found}, and no mode saves more than {best:.0%} of the time to the first token")
    if of_all is not None and of_all < LEAST_SAVED_OF_ALL:
        return _no(
            f"decoding dominates: answers have {tally.answer_tokens / tally.answers:,.0f} tokens, prompts "
            f"{tally.answered_prompt_tokens / tally.answers:,.0f}; the first token would come {_times(tally, mode)} "
            f"sooner, but only {of_all:.1%} of the whole time is saved, and reuse does not make decoding faster"
        )
    if mode == "approximate":
        return Verdict(
            True,
            mode,
            f"{found}; the first token comes {_times(tally, mode)} sooner on average, with exact reuse "
            f"{_times(tally, 'exact')}",
        )
    alike = tally.saved("exact", "prefix") < LEAST_OVER_EXACT
    return Verdict(
        True,
        mode,
        f"{found}; the first token comes {_times(tally, mode)} sooner on average with exact reuse, and approximation "
        f"would save only {max(over, 0):.0%} more" + ("; any prefix cache does as well" if alike else ""),
    )


def _repeats(tally: Tally) -> str:
    return (
        f"{tally.share(tally.leading_tokens):.0%} of the tokens repeat as leading prefix and "
        f"{tally.share(tally.moved_tokens):.0%} as moved text"
    )


def _times(tally: Tally, mode: Mode) -> str:
    return f"{tally.mean_s('plain') / tally.mean_s(mode):.1f}×"


def _no(reason: str) -> Verdict:
    return Verdict(False, None, reason)
