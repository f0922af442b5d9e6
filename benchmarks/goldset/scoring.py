"""What a model answers: likelihood of options behind a prefill, and a greedy answer read for the first option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch

from .questions import Question


def option_ids(tokenize: Callable[[str], list[int]], question: Question) -> tuple[list[int], list[list[int]]]:
    """Tokens that all options begin with, and each option's own rest.

    The prefix may merge with an option's first letters, so what they share is looked for among tokens.
    """
    whole = [tokenize(f"{question.prefix}{option}{question.closing}") for option in question.options]
    columns = zip(tokenize(question.prefix), *whole, strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return whole[0][:shared], [ids[shared:] for ids in whole]


class Behind:
    """Passes over tokens behind a prefill; its cache is put back after each.

    Args:
        model: of the engine that made the prefill.
        prefill: of `Engine.prefill`; its cache must hold the prompt and nothing else.
    """

    def __init__(self, model: Any, prefill: Any) -> None:
        self._model, self._cache = model, prefill.cache
        self._last = prefill.logits  # of the last token in the cache, float32 (vocab,)

    @property
    def first(self) -> torch.Tensor:
        """Logits behind everything in the cache, float32 ``(vocab,)``."""
        return self._last

    def keep(self, ids: Sequence[int]) -> None:
        """Run tokens and leave them in the cache."""
        if ids:
            self._last = self._run(ids)[-1]

    def drop(self, count: int) -> None:
        """Take so many tokens out of the cache again; `first` is not valid afterwards, unless it is set anew."""
        if count:
            self._cache.crop(-count)

    def log_likelihood(self, ids: Sequence[int]) -> float:
        """Mean log-probability of tokens behind the cache, which stays as it is."""
        rows = self._last[None]
        if len(ids) > 1:
            rows = torch.cat([rows, self._run(ids[:-1])])
            self.drop(len(ids) - 1)
        found = torch.log_softmax(rows, -1).gather(1, torch.tensor(ids, device=rows.device)[:, None])
        return float(found.mean())

    @torch.inference_mode()
    def _run(self, ids: Sequence[int]) -> torch.Tensor:
        device, start = self._last.device, self._cache.get_seq_length()
        positions = torch.arange(start, start + len(ids), device=device)[None]
        out = self._model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
        )
        return out.logits[0].float()


def score(model: Any, prefill: Any, shared: Sequence[int], rests: Sequence[Sequence[int]]) -> list[float]:
    """Mean log-probability of each option's own tokens; leaves the prefill's cache as it was."""
    behind = Behind(model, prefill)
    behind.keep(shared)
    scores = [behind.log_likelihood(rest) for rest in rests]
    behind.drop(len(shared))
    return scores


def greedy(
    model: Any,
    prefill: Any,
    decode: Callable[[list[int]], str],
    options: Sequence[str],
    *,
    ends: frozenset[int],
    max_tokens: int,
) -> tuple[str, int | None]:
    """The first line of the most likely answer, up to the first option that it names; consumes the prefill's cache.

    Returns:
        The text so far, and the index of that option; None if it names none within ``max_tokens``.
    """
    behind = Behind(model, prefill)
    ids: list[int] = []
    while len(ids) < max_tokens:
        token = int(behind.first.argmax())
        if token in ends:
            break
        ids.append(token)
        text = decode(ids)
        named = first_named(text, options, finished=False)
        if named is not None:
            return text, named
        if "\n" in text.lstrip():
            break
        behind.keep([token])
    text = decode(ids)
    return text, first_named(text, options, finished=True)


def first_named(text: str, options: Sequence[str], *, finished: bool) -> int | None:
    """The option that a text names first, as a whole word; the longest where several begin at one place.

    An option at the very end counts only if the text is ``finished``: it may be the beginning of something longer.
    Numbers may be written with commas, and sizes without their unit.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    found = []
    for index, option in enumerate(options):
        bare = option.removesuffix(" KB")
        match = re.search(rf"(?<![\w.+~-])(?<!\d:){re.escape(bare)}(?![\w+~-])(?![.:]\w)", plain)
        if match and (finished or len(plain) > match.end() + 1):
            found.append((match.start(), -len(bare), index))
    return min(found)[2] if found else None
