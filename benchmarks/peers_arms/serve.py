"""What every arm's process does: read requests as JSON lines, answer them, and time the first token.

Only the standard library is used: arms run in environments of their own. A request is `{"op": "warm", "texts": […]}`,
`{"op": "ask", "prompt": {"messages": […], "text": "…", "ids": […]}}` or `{"op": "quit"}`; every reply is one line.
Standard output belongs to the protocol; whatever a library prints there is sent to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class First:
    """The first token of an answer.

    Attributes:
        token: its id.
        prompt_tokens: tokens of the prompt as the peer counts them.
        reused_tokens: prompt tokens that the peer says it took from its cache.
        reported_s: wall seconds to the first token as the peer itself reports them.
    """

    token: int
    prompt_tokens: int
    reused_tokens: int
    reported_s: float | None = None


class Clock:
    """CPU seconds of this process (all threads) and wall seconds from the call to the first token."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self.seconds: dict[str, float] | None = None

    def first_token(self) -> None:
        """The first token is there; later calls change nothing."""
        if self.seconds is None:
            cpu, wall = time.process_time(), time.perf_counter()
            self.seconds = {"cpu_s": cpu - self._cpu, "wall_s": wall - self._wall}


class Arm(Protocol):
    """One peer, loaded."""

    def describe(self) -> dict[str, Any]:
        """Versions and settings, for the report."""

    def warm(self, texts: Sequence[str]) -> dict[str, Any]:
        """Learn documents ahead, by the peer's own means; says what it did."""

    def ask(self, prompt: dict[str, Any], clock: Clock) -> First:
        """Greedy first token; calls ``clock.first_token()`` when it is emitted, if that is before returning."""


def serve(arm: Arm, replies: Any) -> None:
    """Answer requests until `quit` or the end of standard input."""
    _reply(replies, {"ready": arm.describe()})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            return
        try:
            _reply(replies, _answer(arm, request))
        except Exception as error:  # the driver reports it and goes on with the other arms
            traceback.print_exc()
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def private_stdout() -> Any:
    """The pipe to the driver; file descriptor 1 becomes standard error, also for what C libraries print."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _answer(arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "warm":
        return arm.warm(request["texts"])
    if request["op"] != "ask":
        raise ValueError(f"unknown request {request['op']!r}; known are warm, ask and quit")
    clock = Clock()
    first = arm.ask(request["prompt"], clock)
    clock.first_token()
    return {**asdict(first), **(clock.seconds or {})}


def _reply(replies: Any, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()
