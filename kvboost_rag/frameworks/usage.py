"""What a framework's own fields for usage have no place for."""

from __future__ import annotations

from typing import Any

from ..stats import Generation


def reuse_of(generation: Generation) -> dict[str, Any]:
    """How the tokens of an answer were reused, and the seconds to its first one; plain numbers and text."""
    usage = generation.usage
    return {
        "fallback_reason": generation.fallback_reason,
        "exact_tokens": usage.exact_tokens,
        "approximate_tokens": usage.approximate_tokens,
        "transferred_tokens": usage.transferred_tokens,
        "repaired_tokens": usage.repaired_tokens,
        "computed_tokens": usage.computed_tokens,
        "ttft_s": generation.timing.ttft_s,
    }


def cached_tokens(generation: Generation) -> tuple[int, int]:
    """Prompt tokens that were read from the store, and those that were added to it."""
    usage = generation.usage
    return usage.read_tokens, usage.written_tokens


def finish_reason(generation: Generation, *, calls: bool = False, hurried: bool = False) -> str:
    """Why it ended; "length" also if a constrained answer was brought to its end because the tokens ran out."""
    if generation.finish_reason != "stop":
        return generation.finish_reason
    return "length" if hurried else "tool_calls" if calls else "stop"
