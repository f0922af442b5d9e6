"""From a finished prefill to text: `model.generate` on our cache, stop strings, deltas, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .stats import FinishReason


class Detokenizer:
    """Turns ids into text piece by piece; the pieces joined are the answer.

    A byte-level token may hold half a character, and SentencePiece drops the space in front of a lone token, so each
    piece is the difference of two decodings that share their start.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # where both decodings begin
        self._read = 0  # ids whose text was given out

    def push(self, token: int) -> str:
        """Text that became certain with this token."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """Text still held back, at the end of the answer."""
        text = self._pending()
        self._start = self._read = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]


class StopFilter:
    """Cuts an answer at the first stop string and never lets a piece of one through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of everything seen that can be given out now."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._give(min(found))
        return self._give(len(self._held) - self._partial())

    def flush(self) -> str:
        """What was held back in case it began a stop string; nothing once stopped."""
        return "" if self.stopped else self._give(len(self._held))

    def _give(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        return out

    def _partial(self) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class Answer:
    """Follows a generation token by token, as a Hugging Face stopping criterion.

    Args:
        decode: ids to text.
        prompt_tokens: ids in front of the answer.
        eos: ids that end an answer.
        stops: strings that end an answer.
        cancel: set by whoever gives up.
        on_first: called once, when the first token is known.
        on_delta: gets each new piece with the ids that made it.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        prompt_tokens: int,
        eos: frozenset[int],
        stops: Sequence[str],
        cancel: threading.Event,
        on_first: Callable[[], None],
        on_delta: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self.ids: list[int] = []
        self._texts: list[str] = []
        self._unsent: list[int] = []
        self._tokens, self._stops = Detokenizer(decode), StopFilter(stops)
        self._prompt_tokens, self._eos, self._cancel = prompt_tokens, eos, cancel
        self._on_first, self._on_delta = on_first, on_delta

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by `generate` after each token; true ends the answer."""
        for token in input_ids[0, self._prompt_tokens + len(self.ids) :].tolist():
            if not self.ids:
                self._on_first()
            self.ids.append(token)
            self._unsent.append(token)
            if token not in self._eos:
                self._send(self._stops.push(self._tokens.push(token)))
        return torch.tensor([self._stops.stopped or self._cancel.is_set()], device=input_ids.device)

    def finish(self) -> tuple[str, FinishReason]:
        """The whole text and why it ended; gives out what was held back."""
        if not self._stops.stopped:
            self._send(self._stops.push(self._tokens.flush()) + self._stops.flush())
        reason: FinishReason = "length"
        if self._stops.stopped or (self.ids and self.ids[-1] in self._eos):
            reason = "stop"
        elif self._cancel.is_set():
            reason = "cancelled"
        return "".join(self._texts), reason

    def _send(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._on_delta(text, tuple(self._unsent))
            self._unsent = []
