"""Execution of a plan: place stored KV, probe, choose, run. One or two sparse passes over one cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .chunks import IntArray, as_ids
from .hf import cache_over
from .kv import RequestKV, StoredRun
from .passes import AttentionProbe
from .planner import Plan
from .question import Tokens, read
from .repair import (
    SELECTORS,
    Positions,
    Recipe,
    Scores,
    choose,
    known_positions,
)
from .rope import Rope
from .runner import ModelRunner

PROJECTION_SHARE = 0.25  # of a layer that runs only up to its queries, keys and values, or to the scores
MOST_JOINING = 512  # more new tokens do not wait in the middle of the depth: long passes run in pieces
LEADING_ROWS = 32  # a longer new preamble runs once, in a pass of its own, instead of in both passes


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """A prompt that is ready to decode.

    Attributes:
        kv: block that holds every prompt token.
        cache: Hugging Face view of it.
        logits: of the last prompt token, float32 ``(vocab,)``.
        charged: tokens that ran, each pass charged by its share of the layers.
        repaired: approximate positions that were recomputed.
        load_s, model_s: seconds spent placing chunks and inside forward passes.
        transfer_s: the part of `load_s` that placed KV of another model.
    """

    kv: RequestKV
    cache: Any
    logits: torch.Tensor
    charged: float
    repaired: Positions
    load_s: float
    model_s: float
    transfer_s: float = 0.0


class Executor:
    """Runs plans of one model.

    Args:
        runner: of the model.
        rope: its rotation; None where nothing is moved.
        cuts: whether a pass may stop at a layer and go on from there, see `SelfCheck.can_cut`.
        tokens: what single tokens are.
    """

    def __init__(
        self, runner: ModelRunner, rope: Rope | None, *, cuts: bool = False, tokens: Tokens | None = None
    ) -> None:
        self.runner, self.rope, self.cuts = runner, rope, cuts
        self.tokens = tokens or Tokens()

    def run(
        self,
        ids: IntArray,
        plan: Plan,
        chunks: Mapping[str, StoredRun],
        recipe: Recipe,
        *,
        room: int = 0,
        cancelled: Callable[[], bool] | None = None,
    ) -> Executed:
        """Serve a plan.

        Args:
            ids: the prompt, int32 ``(n,)``.
            plan: tiles it; its question is read now if it was not before.
            chunks: KV of every key in the plan.
            recipe: repair of the approximate segments.
            room: tokens of capacity to leave behind the prompt.
            cancelled: asked at every layer, also while decoding later on; true raises `Cancelled`.
        """
        asked = plan if plan.asked is not None else read(ids, plan, recipe, self.tokens)
        return _Request(self, ids, asked, recipe).run(chunks, room, cancelled)

    def grow(self, capacity: int) -> Growing:
        """An empty sequence with room for ``capacity`` tokens."""
        return Growing(self.runner, capacity)


class Growing:
    """A sequence computed piece by piece, each behind all pieces before it, as one full prefill would.

    Attributes:
        kv: keys and values of everything so far.
        ids: everything so far, int32 ``(n,)``.
    """

    def __init__(self, runner: ModelRunner, capacity: int) -> None:
        self._runner = runner
        self.kv = runner.new_kv(0, capacity)
        self.ids: IntArray = as_ids([])
        self._cache = cache_over(self.kv)

    def extend(self, ids: IntArray) -> int:
        """Compute ``ids`` behind the sequence; returns the position of the first of them."""
        start, device = len(self.ids), self._runner.spec.device
        self.ids = as_ids(np.concatenate([self.ids, ids]))
        self.kv.reserve(len(self.ids))
        self.kv.lengths = [len(self.ids)] * len(self.kv.lengths)
        positions = torch.arange(start, len(self.ids), device=device)
        self._runner.run(self.kv, self._cache, torch.from_numpy(ids.astype(np.int64)).to(device), positions)
        return start


class _Request:
    """The state of one execution, so that each step reads as one line."""

    def __init__(self, executor: Executor, ids: IntArray, plan: Plan, recipe: Recipe) -> None:
        self.runner, self.rope, self.plan, self.recipe = executor.runner, executor.rope, plan, recipe
        self.device = self.runner.spec.device
        self.ids = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        self.charged = 0.0
        self.model_s = 0.0
        self.new = plan.computed
        depth = self.runner.spec.layers
        self.band = range(
            min(math.floor(recipe.probe_from * depth), depth - 1), max(1, math.ceil(recipe.probe_to * depth))
        )
        assert plan.asked is not None
        self.asked = plan.asked
        self.probe = recipe.probe(plan.runs, self.asked)
        self.joins = (
            executor.cuts
            and self.probe == "query"
            and not recipe.rerun
            and not any(run.mapped for run in plan.runs)  # so far off that what saw it unrepaired must run again
            and self.band.stop < depth
            and len(self.new) <= MOST_JOINING
        )

    def run(self, chunks: Mapping[str, StoredRun], room: int, cancelled: Callable[[], bool] | None) -> Executed:
        started = time.perf_counter()
        n = self.plan.prompt_tokens
        self.kv = self.runner.new_kv(n, n + room)
        self.kv.cancelled = cancelled
        self.cache = cache_over(self.kv)
        transfer_s = 0.0
        for segment in self.plan.segments:
            if segment.key is not None:
                placing = time.perf_counter()
                chunks[segment.key].place(
                    self.kv,
                    segment.start,
                    offset=segment.offset,
                    length=len(segment),
                    delta=segment.delta,
                    rope=self.rope,
                )
                if segment.kind == "transferred":
                    _synchronise(self.device)
                    transfer_s += time.perf_counter() - placing
            elif self.plan.runs:
                # A probe may look over what no pass has filled yet, and a mask does not hide NaN.
                self.kv.clear(segment.start, segment.end)
        _synchronise(self.device)
        load_s = time.perf_counter() - started
        logits, repaired = self._joining() if self.joins else self._probing()
        return Executed(self.kv, self.cache, logits, self.charged, repaired, load_s, self.model_s, transfer_s)

    def _probing(self) -> tuple[torch.Tensor, Positions]:
        """A probe, if the recipe needs one, then one pass over everything that is to be computed."""
        new = self._leading_pass()
        scores = self._probe(new)
        repaired = choose(self.recipe, self.plan.runs, scores, self.asked)
        rows = np.union1d(new, repaired)
        if scores is not None:
            self._offset_from(rows, repaired)
        logits = self._pass(rows)
        self._charge(len(rows))
        self.kv.before_write = None
        assert logits is not None
        return logits, repaired

    def _joining(self) -> tuple[torch.Tensor, Positions]:
        """One pass over everything that is to be computed; what is chosen in its middle catches up there."""
        layer = self.band.stop
        known = known_positions(self.recipe, self.plan.runs, self.asked)
        first = np.union1d(self.new, known)
        probe = self._attention_of(self.asked.question, first, ends_pass=False)
        waiting = self._up_to(layer, first, probe)
        repaired = choose(self.recipe, self.plan.runs, _mass(probe), self.asked)
        chosen = np.setdiff1d(repaired, known)
        rows = np.union1d(first, repaired)
        if len(chosen):
            # The last token runs again behind them, as it will when the prompt comes again and is taken as served.
            behind = np.append(chosen, first[-1])
            self._offset_from(behind, chosen)
            caught_up = self._up_to(layer, behind)
            self.charged += layer / self.runner.spec.layers
            order = torch.from_numpy(np.argsort(np.concatenate([first[:-1], behind]), kind="stable")).to(self.device)
            waiting = torch.cat([waiting[:-1], caught_up])[order]
            self._offset_from(rows, chosen)
        started = time.perf_counter()
        logits = self.runner.run_from(layer, self.kv, self.cache, waiting, torch.from_numpy(rows).to(self.device))
        self._count(started)
        self._charge(len(rows))
        self.kv.before_write = None
        return logits, repaired

    def _up_to(self, layer: int, rows: Positions, probe: AttentionProbe | None = None) -> torch.Tensor:
        started = time.perf_counter()
        positions = torch.from_numpy(rows).to(self.device)
        states = self.runner.run_up_to(layer, self.kv, self.cache, self.ids[positions], positions, probe=probe)
        self._count(started)
        return states

    def _count(self, started: float) -> None:
        _synchronise(self.device)
        self.model_s += time.perf_counter() - started

    def _pass(self, rows: Positions, *, last_layer: int | None = None, **options: Any) -> torch.Tensor | None:
        started = time.perf_counter()
        positions = torch.from_numpy(rows).to(self.device)
        logits = self.runner.run(self.kv, self.cache, self.ids[positions], positions, last_layer=last_layer, **options)
        self._count(started)
        return logits

    def _charge(self, rows: int, last_layer: int | None = None) -> None:
        depth = self.runner.spec.layers
        self.charged += rows * (1.0 if last_layer is None else (last_layer + PROJECTION_SHARE) / depth)

    def _leading_pass(self) -> Positions:
        """Run a long new preamble on its own: it sees only exact KV, so once is enough. Returns what is left.

        A deviation probe ends so early that running the preamble twice costs less than a pass of its own.
        """
        if self.probe != "query":
            return self.new
        leading = self.new[self.new < self.plan.pure_until]
        if len(leading) <= LEADING_ROWS:
            return self.new
        self._pass(leading, hidden=self._unfilled(leading))
        self._charge(len(leading))
        self.filled = leading
        return self.new[self.new >= self.plan.pure_until]

    def _unfilled(self, rows: Positions) -> torch.Tensor:
        hidden = np.zeros(self.plan.prompt_tokens, bool)
        hidden[self.new] = True
        hidden[getattr(self, "filled", np.empty(0, np.int64))] = False
        hidden[rows] = False
        return torch.from_numpy(hidden).to(self.device)

    def _probe(self, new: Positions) -> Scores | None:
        if self.probe is None:
            return None
        if self.probe == "deviation":
            return self._deviation(new)
        return self._query(new)

    def _query(self, new: Positions) -> Scores:
        """Attention of the last new tokens over the moved cache, in a pass of their own."""
        leading = new[new < self.plan.pure_until]
        # The runs' first tokens beside them change nothing, measured.
        rows = np.concatenate([leading, self.asked.question])
        probe = self._attention_of(self.asked.question, rows)
        hidden = self._unfilled(rows)
        self._pass(rows, hidden=hidden if bool(hidden.any()) else None, probe=probe)
        self._charge(len(rows), self.band.stop - 1)
        return _mass(probe)

    def _attention_of(self, asking: Positions, rows: Positions, *, ends_pass: bool = True) -> AttentionProbe:
        """Collects what some rows of a pass attend to, in the band of layers that counts."""
        index = torch.from_numpy(np.searchsorted(rows, asking)).to(self.device)
        return AttentionProbe(index, frozenset(self.band), ends_pass=ends_pass)

    def _deviation(self, new: Positions) -> Scores:
        """Change of K and V in a first layer when every token runs in the new context."""
        rows = np.union1d(new, np.concatenate([np.arange(r.start, r.end) for r in self.plan.runs]))
        compared = min(self.recipe.deviation_layer, self.runner.spec.layers - 1)
        found = torch.zeros(self.plan.prompt_tokens, device=self.device)
        slots = torch.from_numpy(rows).to(self.device)

        of = SELECTORS[self.recipe.selector].compared

        def compare(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            if layer == compared:
                pairs = {"keys": (keys, self.kv.keys[layer]), "values": (values, self.kv.values[layer])}
                for fresh, stale in pairs.values() if of == "both" else (pairs[of],):
                    change = (fresh - stale[:, slots]).float().pow(2).sum((0, 2))
                    found[slots] += change / fresh.float().pow(2).sum((0, 2)).mean()

        self.kv.before_write = compare
        self._pass(rows, last_layer=compared)
        self._charge(len(rows), compared)
        self.kv.before_write = None
        return found.cpu().numpy()

    def _offset_from(self, rows: Positions, repaired: Positions) -> None:
        """Let the next pass, of ``rows``, shift what is not repaired by what the repaired tokens in it change."""
        if self.recipe.offset:
            known = known_positions(self.recipe, self.plan.runs, self.asked)
            self.kv.before_write = _MeanOffset(self, rows, np.setdiff1d(repaired, known))


def _mass(probe: AttentionProbe) -> Scores:
    """Attention to each position, summed over layers, float32 ``(prompt,)``."""
    return torch.stack([*probe.mass.values()]).sum(0).cpu().numpy()


class _MeanOffset:
    """Adds to each run's unrepaired tokens the mean change of its repaired ones, per layer, before that layer attends.

    Keys are compared before rotation, where the change does not depend on the position.
    """

    def __init__(self, request: _Request, rows: Positions, repaired: Positions) -> None:
        self.kv, self.rope = request.kv, request.rope
        self.everywhere = torch.arange(request.plan.prompt_tokens)
        self.tables: dict[int, tuple[torch.Tensor, ...]] = {}
        mine = [(run, repaired[(repaired >= run.start) & (repaired < run.end)]) for run in request.plan.runs]
        mine = [(run, chosen) for run, chosen in mine if len(chosen) >= 2]  # the mean of fewer is noise
        self.spans = [slice(run.start, run.end) for run, _ in mine]
        chosen = np.concatenate([np.empty(0, np.int64), *[positions for _, positions in mine]])
        self.slots = torch.from_numpy(chosen).to(request.device)
        self.index = torch.from_numpy(np.searchsorted(rows, chosen)).to(request.device)
        owner = np.repeat(np.arange(len(mine)), [len(positions) for _, positions in mine])
        # (runs, chosen): a product with it is the weighted mean of each run.
        mean = (owner[None] == np.arange(len(mine))[:, None]) / np.maximum(np.bincount(owner), 1)[:, None]
        self.mean = torch.from_numpy(mean * request.recipe.offset).to(request.device, torch.float32)

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.rope is not None
        if not self.spans:
            return
        cos, sin, chosen_cos, chosen_sin = self._tables(layer)
        stale_k, stale_v = self.kv.keys[layer], self.kv.values[layer]
        change = self.rope.turn(layer, keys[:, self.index] - stale_k[:, self.slots], chosen_cos, -chosen_sin)
        mean_k = (self.mean @ change.float()).to(keys.dtype)
        mean_v = (self.mean @ (values[:, self.index] - stale_v[:, self.slots]).float()).to(values.dtype)
        for run, span in enumerate(self.spans):
            same = mean_k[:, run : run + 1].expand(-1, span.stop - span.start, -1)
            stale_k[:, span] += self.rope.turn(layer, same, cos[span], sin[span])
            stale_v[:, span] += mean_v[:, run : run + 1]

    def _tables(self, layer: int) -> tuple[torch.Tensor, ...]:
        assert self.rope is not None
        group = id(self.rope.group_of[layer])
        if group not in self.tables:
            cos, sin = self.rope.tables(layer, self.everywhere)
            self.tables[group] = (cos, sin, cos[self.slots], sin[self.slots])
        return self.tables[group]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":  # pragma: no cover - not tried on the development machines
        torch.cuda.synchronize(device)
