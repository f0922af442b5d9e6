"""Random numbers of answers: each from a state of its own, though all draw from torch's global generator.

Hugging Face's `generate` knows no other generator. So while an answer chooses a token, its own state lies in the global
generator, and nobody else's answer may draw: answers with the same seed are the same, alone and among others.
"""

from __future__ import annotations

import threading

import torch

from .kv import Cancelled

_GENERATOR = threading.RLock()  # of all models: whoever holds it may draw
_PATIENCE_S = 0.05  # who waits for it looks so often whether it was cancelled


class Draws:
    """The random state of one answer. Used by one thread.

    Args:
        seed: of a state of its own; the global generator is left as it was then. None draws from the global generator
            as it is.
        device: that the scores lie on.
        cancel: set by whoever gives up.
    """

    def __init__(self, seed: int | None, device: torch.device, cancel: threading.Event) -> None:
        self._cancel, self._cuda = cancel, device if device.type == "cuda" else None
        self._drawing = False
        self._own: list[torch.Tensor] | None = None
        self._global: list[torch.Tensor] = []
        if seed is not None:
            devices = [torch.device("cpu"), *([device] if self._cuda is not None else [])]
            self._own = [torch.Generator(place).manual_seed(seed).get_state() for place in devices]

    def begin(self) -> None:
        """Draw from now on.

        Raises:
            Cancelled: whoever wanted the answer gave up.
        """
        while not _GENERATOR.acquire(timeout=_PATIENCE_S):
            if self._cancel.is_set():
                raise Cancelled
        self._drawing = True
        if self._own is not None:
            self._global = self._swap(self._own)

    def end(self) -> None:
        """Let others draw."""
        if not self._drawing:
            return
        if self._own is not None:
            self._own = self._swap(self._global)
        self._drawing = False
        _GENERATOR.release()

    def _swap(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        before = [torch.get_rng_state()]
        torch.set_rng_state(states[0])
        if self._cuda is not None:  # pragma: no cover - not tried on the development machines
            before.append(torch.cuda.get_rng_state(self._cuda))
            torch.cuda.set_rng_state(states[1], self._cuda)
        return before


class NoDraws:
    """Of an answer that is certain."""

    def begin(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


Drawing = Draws | NoDraws


def draws_of(seed: int | None, temperature: float, device: torch.device, cancel: threading.Event) -> Drawing:
    """What an answer draws; with a seed also where it is greedy, for logits processors may draw, too."""
    return Draws(seed, device, cancel) if seed is not None or temperature > 0 else NoDraws()
