"""What a map is worth, measured on text that it has not seen, against controls; and whether it may be used.

A piece of text is the context, the next piece the question, the piece behind it what the target should expect. R² of a
map does not tell what it keeps; what the target makes of it does (arXiv 2608.03893).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..chunks import IntArray, as_ids
from ..kv import KVRun, StoredRun
from ..planner import Plan, Segment
from ..progress import progress
from ..repair import Recipe, Run
from .bridge import MappedRun
from .mapping import TransferMap
from .models import Reader

LEAD, ASKING, ANSWER = 16, 64, 32  # tokens in front of the context, behind it, and of the continuation
BUDGETS = (0.05, 0.10, 0.20)
NATIVE, MAPPED, WRONG, NOTHING = "native", "mapped", "wrong document", "no context"


def repaired(budget: float) -> str:
    """Name of the arm that recomputes a share of what was mapped."""
    return f"{MAPPED} + {budget:.0%} repair"


@dataclass(frozen=True, slots=True)
class Row:
    """An arm's figures, means over held-out sequences.

    Attributes:
        nll: of the true continuation, nats per token.
        kl: from the target's own distributions, nats per token.
        agreement: share of positions with the same likeliest token.
        fidelity: 1 − KL / KL without context.
        charged: share of the prompt's tokens that ran.
        cosines: of what each layer's attention gives at the question, with the target's own; None without.
    """

    nll: float
    kl: float
    agreement: float
    fidelity: float
    charged: float
    cosines: list[float] | None


def measure(
    mapping: TransferMap, source: Reader, target: Reader, sequences: Sequence[IntArray], *, show_progress: bool = False
) -> dict[str, Row]:
    """Figures of a map and of its controls.

    Args:
        mapping: from `fit`.
        source: its source.
        target: its target.
        sequences: held-out text, two or more of at least 256 tokens.
        show_progress: draw a progress bar, in a terminal or notebook.
    """
    found: dict[str, list[_Seen]] = {}
    with progress("checking", len(sequences), unit="sequence", show=show_progress) as bar:
        before = _native_context(target, sequences[-1])
        for ids in sequences:
            context = _native_context(target, ids)
            run = _Prompt(target, ids)
            mapped = MappedRun(_native_context(source, ids), mapping)
            alone = Recipe(strategy="none")
            arms: dict[str, Callable[[], _Seen]] = {
                NATIVE: run.whole,
                MAPPED: partial(run.over, mapped, alone),
                **{repaired(budget): partial(run.over, mapped, Recipe(ratio=budget)) for budget in BUDGETS},
                WRONG: partial(run.over, before, alone),
                NOTHING: run.without,
            }
            for name, arm in arms.items():
                found.setdefault(name, []).append(arm())
            before = context
            bar.update()
    return {name: _row(seen, found[NATIVE], found[NOTHING]) for name, seen in found.items()}


def verdict(rows: Mapping[str, Row]) -> str | None:
    """Why a map must not be used; None if it may.

    It must bring the target nearer to what it would say by itself than no context and a wrong document do, and make it
    expect the true text more than no context does, where its own KV does so.
    """
    mapped = rows[MAPPED]
    figures = ", ".join(f"{name} {row.kl:.3g}" for name, row in rows.items() if name in (MAPPED, WRONG, NOTHING))
    for control in (NOTHING, WRONG):
        if not mapped.kl < rows[control].kl:
            return f"it is no better than {control}: KL from the target's own answers, nats per token: {figures}"
    if rows[NATIVE].nll < rows[NOTHING].nll and not mapped.nll < rows[NOTHING].nll:
        return (
            f"it is no better than {NOTHING}: the true text has {mapped.nll:.3g} nats per token with it, "
            f"{rows[NOTHING].nll:.3g} without context"
        )
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What the target made of one prompt: log-probabilities ``(ANSWER, vocab)``, and its attention's outputs."""

    log_probs: torch.Tensor
    truth: list[int]
    charged: float
    attention: list[torch.Tensor]


class _Prompt:
    """A held-out sequence as a prompt: lead, context, question; and the text behind it."""

    def __init__(self, target: Reader, ids: IntArray) -> None:
        self._target = target
        self._n = len(ids) - ANSWER
        self._ids, self._truth = as_ids(ids[: self._n]), ids[self._n :].tolist()
        self._end = self._n - ASKING

    def whole(self) -> _Seen:
        return self._run(self._ids, Plan(self._n, (Segment("compute", 0, self._n),)), {}, Recipe())

    def over(self, context: StoredRun, recipe: Recipe) -> _Seen:
        plan = Plan(
            self._n,
            (
                Segment("compute", 0, LEAD),
                Segment("transferred", LEAD, self._end, "context"),
                Segment("compute", self._end, self._n),
            ),
            (Run(LEAD, self._end, mapped=True),),
        )
        return self._run(self._ids, plan, {"context": context}, recipe)

    def without(self) -> _Seen:
        ids = as_ids(np.concatenate([self._ids[:LEAD], self._ids[self._end :]]))
        return self._run(ids, Plan(len(ids), (Segment("compute", 0, len(ids)),)), {}, Recipe())

    def _run(self, ids: IntArray, plan: Plan, chunks: Mapping[str, StoredRun], recipe: Recipe) -> _Seen:
        executor = self._target.executor
        done = executor.run(ids, plan, chunks, recipe, room=ANSWER)
        with _attention_outputs(executor.runner.decoder) as outputs:
            rows = executor.runner.log_probs(done.kv, done.cache, done.logits, self._truth)
        return _Seen(rows, self._truth, done.charged / self._n, outputs)


def _native_context(reader: Reader, ids: IntArray) -> KVRun:
    """KV of the context as this model computes it behind the lead."""
    end = len(ids) - ANSWER - ASKING
    grown = reader.executor.grow(end)
    grown.extend(as_ids(ids[:end]))
    return grown.kv.take(LEAD, end)


@contextmanager
def _attention_outputs(decoder: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what the attention of each layer gives in the passes of the block, float32 ``(rows, hidden)``."""
    outputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        outputs.append(first.detach()[0].float())

    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    handles = [module.register_forward_hook(keep) for module in modules if module is not None]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _row(seen: Sequence[_Seen], native: Sequence[_Seen], nothing: Sequence[_Seen]) -> Row:
    kl = _mean(_kl(own, one) for one, own in zip(seen, native, strict=True))
    base = _mean(_kl(own, one) for one, own in zip(nothing, native, strict=True))
    return Row(
        nll=_mean(-float(s.log_probs[range(len(s.truth)), s.truth].mean()) for s in seen),
        kl=kl,
        agreement=_mean(_agreement(own, one) for one, own in zip(seen, native, strict=True)),
        fidelity=1 - kl / max(base, 1e-9),
        charged=_mean(s.charged for s in seen),
        cosines=_cosines(seen, native),
    )


def _kl(native: _Seen, other: _Seen) -> float:
    return float((native.log_probs.exp() * (native.log_probs - other.log_probs)).sum(-1).mean())


def _agreement(native: _Seen, other: _Seen) -> float:
    return float((native.log_probs.argmax(-1) == other.log_probs.argmax(-1)).float().mean())


def _cosines(seen: Sequence[_Seen], native: Sequence[_Seen]) -> list[float] | None:
    pairs = [
        [float(torch.cosine_similarity(a, b).mean()) for a, b in zip(one.attention, own.attention, strict=True)]
        for one, own in zip(seen, native, strict=True)
    ]
    return [round(_mean(layer), 4) for layer in zip(*pairs, strict=True)] if pairs[0] else None


def _mean(numbers: Any) -> float:
    found = list(numbers)
    return math.fsum(found) / len(found)
