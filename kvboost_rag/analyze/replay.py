"""A log run through the engine's own index, planner, keeping rules and cost model; only the KV is missing.

It plans as `serving` does, and keeps what that would. A test holds the two together on a real model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..chunking import BreakFinder
from ..chunks import Hit, IntArray, Scope
from ..config import EngineConfig, Reuse
from ..costs import CostModel
from ..keeping import Keeper
from ..kv import RequestKV, StoredRun
from ..library import Library
from ..planner import Plan, fresh_of, make_plan
from ..planning import Planned, Planning
from ..question import Tokens
from ..repair import Recipe, whole_runs
from ..rope import Rope
from ..store import KVShape
from ..store.policies import policy_of
from ..worth import Appraiser

PREFIX_BLOCK = 16  # tokens: prefix caches of serving engines match whole blocks
_NO_KV = cast(Any, None)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a replay is made with.

    Attributes:
        config: of the engine that is asked about.
        costs: of its model on its machine.
        recipe: how moved text is repaired.
        token_bytes: KV of one token.
        window_tokens: context window; longer prompts are not served.
    """

    config: EngineConfig
    costs: CostModel
    recipe: Recipe
    token_bytes: int
    window_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a mode makes of one prompt.

    Attributes:
        plan: what would be reused and computed.
        seconds: predicted for it.
        hits: everything that is stored of the prompt, in order.
        fell_back: whether moved text was found and computing was cheaper.
    """

    plan: Plan
    seconds: float
    hits: tuple[Hit, ...]
    fell_back: bool = False


@dataclass(frozen=True, slots=True)
class SizedRun:
    """Stands for the KV of a run."""

    tokens: int
    nbytes: int
    codec: str = "sizes"

    def tensors(self) -> dict[str, Any]:
        """None."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """None."""
        return {}

    def place(self, into: RequestKV, at: int, *, offset: int, length: int, delta: int, rope: Rope | None) -> None:
        """There is nothing to place."""
        raise NotImplementedError("a replay computes nothing")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The codec of a replay.

    Attributes:
        token_bytes: KV of one token.
    """

    token_bytes: int
    name: str = "sizes"
    lossless: bool = True

    def encode(self, kv: RequestKV, start: int, end: int, rope: Rope | None) -> StoredRun:
        """The size of a run."""
        return SizedRun(end - start, (end - start) * self.token_bytes)

    def load(self, tensors: Any, metadata: Any) -> StoredRun:
        """Nothing is ever written."""
        raise NotImplementedError("a replay writes nothing")

    def nbytes(self, shape: KVShape, tokens: int) -> int:
        """Bytes of so many tokens."""
        return tokens * self.token_bytes


class Replay:
    """An engine without a model, in one mode.

    Attributes:
        library: what is stored.
        kept_tokens: tokens of text that were stored, prompts as they were served not counted.

    Args:
        mode: "exact" or "approximate".
        rules: see there; the budget is that of ``rules.config``.
        breaks: finds sentence ends.
        tokens: what single tokens are.
    """

    def __init__(self, mode: Reuse, rules: Rules, breaks: BreakFinder, tokens: Tokens) -> None:
        self._mode, self._rules = mode, rules
        self.kept_tokens = 0
        config = rules.config
        appraiser = Appraiser(_NO_KV, None, config)
        appraiser.costs, appraiser.recipe = rules.costs, rules.recipe
        self.library = Library(
            config.ram_budget_bytes,
            int(config.served_share * config.ram_budget_bytes),
            policy=policy_of(config.eviction, config.ram_budget_bytes),
            worth=appraiser.worth,
        )
        weighed = rules.costs if config.fallback else None
        self._planning = Planning(self.library, tokens, replace(config, reuse=mode), costs=weighed)
        self._keeper = Keeper(
            self.library,
            breaks,
            config,
            codec=Sizes(rules.token_bytes),
            shape=_NO_KV,
            rope=None,
            window_tokens=rules.window_tokens,
        )

    def step(self, scope: Scope, ids: IntArray, answer: IntArray) -> Step:
        """Serve a prompt and keep what the engine would keep of it and its answer."""
        costs, recipe = self._rules.costs, self._rules.recipe
        planned = self._planning.plan(scope, ids, recipe, reuse=self._mode)
        plan = planned.plan
        seconds = costs.reuse(plan, recipe) if plan.tokens("approximate") else costs.compute(plan)
        with self.library.pin(plan.keys):  # a use, by which the store's policy decides what leaves
            pass
        self._keep(scope, ids, answer, planned)
        return Step(plan, seconds, planned.stored or (), fell_back=planned.fallback is not None)

    def _keep(self, scope: Scope, ids: IntArray, answer: IntArray, planned: Planned) -> None:
        n, whole = len(ids), np.concatenate([ids, answer[:-1]])  # nothing runs on the last token of an answer
        pure = planned.plan.pure_until == n
        if not planned.chained and self._mode == "approximate":
            # Where words do not tell, attention would.
            recipe, plan = self._rules.recipe, planned.plan
            whole_ones = plan.runs if recipe.everything else whole_runs(recipe, plan.runs, None, plan.asked)
            repaired = np.concatenate([np.empty(0, np.int64), *[np.arange(r.start, r.end) for r in whole_ones]])
            fresh = fresh_of(plan, repaired, planned.fresh)
            self._keeper.keep_served(scope, whole, _NO_KV, prompt_tokens=n, fresh=fresh)
        new = list(planned.new)
        if not new:
            return
        end = n
        if pure and new[-1][1] == n:
            end = len(whole)
            new[-1] = (new[-1][0], end)
        exact_until = end if pure else planned.plan.pure_until
        kept = self._keeper.keep_prompt(scope, whole[:end], _NO_KV, new=new, exact_until=exact_until)
        self.kept_tokens += sum(map(len, kept))


def prefix_seconds(costs: CostModel, prompt_tokens: int, leading: int) -> float:
    """Seconds to the first token with a plain prefix cache that holds so many leading tokens."""
    blocks = min(leading, prompt_tokens - 1) // PREFIX_BLOCK * PREFIX_BLOCK
    hits = (Hit(0, blocks, "prefix", 0),) if blocks else ()
    return costs.compute(make_plan(prompt_tokens, hits))


def covered(hits: tuple[Hit, ...], start: int) -> int:
    """Tokens behind ``start`` that hits hold."""
    return sum(max(0, hit.end - max(hit.start, start)) for hit in hits)
