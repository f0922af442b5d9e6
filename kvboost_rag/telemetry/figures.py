"""What metrics and traces read from a request that has ended."""

from __future__ import annotations

from typing import Literal, get_args

from ..observing import RequestRecord

Stage = Literal["tokenize", "queue", "lookup", "load", "prefill", "decode", "store"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # in the order in which they come

Hit = Literal["transferred", "approximate", "exact", "none"]
HITS: tuple[Hit, ...] = get_args(Hit)


def stages_of(record: RequestRecord) -> dict[Stage, float]:
    """Seconds of each stage. They are disjoint; what is between them, such as choosing the first token, is left out."""
    timing = record.timing
    decode_s = timing.total_s - timing.ttft_s - timing.store_s if answered(record) else 0.0
    return {
        "tokenize": timing.tokenize_s,
        "queue": max(timing.queue_s, 0.0),
        "lookup": timing.lookup_s,
        "load": timing.load_s,
        "prefill": timing.prefill_s,
        "decode": max(decode_s, 0.0),
        "store": timing.store_s,
    }


def served(record: RequestRecord) -> bool:
    """Whether its prompt was read; one that was refused, failed, or was cancelled before has no figures of reuse."""
    return record.usage.computed_tokens > 0


def answered(record: RequestRecord) -> bool:
    """Whether there was a first token."""
    return record.usage.completion_tokens > 0


def has_ttft(record: RequestRecord) -> bool:
    """Whether a time to the first token is known: of an answer, or of a prefill, which has its logits."""
    return answered(record) or record.outcome == "prefilled"


def hit_of(record: RequestRecord) -> Hit:
    """The word for what a prompt found: the first of "transferred", "approximate" and "exact" that it had any of."""
    if record.usage.transferred_tokens:
        return "transferred"
    if record.usage.approximate_tokens:
        return "approximate"
    return "exact" if record.usage.exact_tokens else "none"
