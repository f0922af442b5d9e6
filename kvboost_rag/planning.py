"""What of all that is stored of a prompt serves it: look up, read its question, plan, and weigh the cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .chunks import Hit, IntArray, Scope
from .config import EngineConfig, Reuse
from .costs import CostModel
from .library import Library, Match
from .planner import Fresh, Plan, gaps, make_plan, until, without_approximate
from .question import Tokens, beginning_of, read
from .repair import Recipe, named_runs
from .stats import Fallback
from .transfer.bridge import Bridge

NOTHING = Match((), None, (), {})
HINT = 1.5  # words of another passage that are enough not to go on: one too many costs time, one too few an answer
HINT_SHARE = 0.2  # or such a share of the question: "And Berlin?" has one
WORTH = 0.7  # an approximation must be predicted to take less than this share of an exact prefill


@dataclass(frozen=True, slots=True)
class Planned:
    """How a prompt is to be served.

    Attributes:
        plan: with its question read where anything is moved.
        fallback: why less is reused than was found.
        stored: what of the prompt is stored, in no order; None if it was not looked up.
        fresh: see `Match.fresh`.
    """

    plan: Plan
    fallback: Fallback | None
    stored: tuple[Hit, ...] | None
    fresh: Fresh | None = None

    @property
    def new(self) -> tuple[tuple[int, int], ...]:
        """Stretches of the prompt that nothing stored holds."""
        return () if self.stored is None else gaps(self.plan.prompt_tokens, self.stored)

    @property
    def chained(self) -> bool:
        """Whether its chunks serve its continuation: they tile the prompt, and none was moved. Or nothing is kept."""
        if self.stored is None:
            return True
        n = self.plan.prompt_tokens
        at = next((s.start for s in self.plan.segments if s.kind != "exact" and not s.lossy), n)
        for start, end in self.new:
            if start <= at:
                at = end
        return self.plan.pure_until == n and at >= n - 1


class Planning:
    """Plans prompts. Thread-safe.

    Args:
        library: what is stored.
        tokens: what single tokens are.
        config: of the engine.
        costs: what reuse and computing take; None if that is not weighed.
        lossy: whether chunks lose something when they are stored.
        bridge: to what another model has read.
        static_rope_tokens: length of prompt beyond which nothing can be reused; None is without limit.
    """

    def __init__(
        self,
        library: Library,
        tokens: Tokens,
        config: EngineConfig,
        *,
        costs: CostModel | None,
        lossy: bool = False,
        bridge: Bridge | None = None,
        static_rope_tokens: int | None = None,
    ) -> None:
        self._library, self._tokens, self._config, self.costs = library, tokens, config, costs
        self._lossy, self._bridge, self._static_rope_tokens = lossy, bridge, static_rope_tokens

    def plan(
        self, scope: Scope, ids: IntArray, recipe: Recipe, *, reuse: Reuse, narrowed: Fallback | None = None
    ) -> Planned:
        """Choose what serves a prompt.

        Args:
            scope: whose chunks it may use.
            ids: the prompt.
            recipe: how what is moved is repaired.
            reuse: how much may be reused.
            narrowed: why that is less than was asked for.
        """
        n = len(ids)
        if reuse == "off":
            return Planned(make_plan(n, ()), None, None)
        if self._static_rope_tokens is not None and n > self._static_rope_tokens:
            reason = f"the prompt has {n} tokens and the rotary frequencies change beyond {self._static_rope_tokens}"
            return Planned(make_plan(n, ()), Fallback("rotary", reason), None)
        # Text already stored is looked up even when this call may not use it, so that it is not stored again.
        match, mapped = self._match(scope, ids), NOTHING
        if reuse == "approximate":
            match = self._asks_elsewhere(scope, ids, match, recipe) or match
        if self._bridge is not None and reuse == "approximate":
            mapped = self._without_question(ids, self._bridge.match(scope, ids, match.hits, token_s=self._token_s))
        # What cannot be repaired has no place in a prompt that is to equal a full prefill.
        full = self._plan_of(ids, match, mapped, changed_only=self._lossy and recipe.everything)
        if reuse == "exact":
            lost = self._no_exact if self._lossy and match.exact else None
            return Planned(without_approximate(full), narrowed or lost, match.hits)
        full = read(ids, full, recipe, self._tokens)
        if full.runs and (too_dear := self._too_dear(full, recipe)) is not None:
            return Planned(without_approximate(full), too_dear, match.hits)
        return Planned(full, None, (*match.hits, *mapped.approximate), match.fresh)

    def _match(self, scope: Scope, ids: IntArray, *, served: bool = True) -> Match:
        moves, token_s = self._config.reuse == "approximate", self._token_s
        found = self._library.match(scope, ids, approximate=moves, served=served, token_s=token_s)
        return self._without_question(ids, found)

    def _without_question(self, ids: IntArray, match: Match) -> Match:
        """A question that was asked before saw other documents then: it is new."""
        if not match.approximate:
            return match
        return replace(match, approximate=until(match.approximate, beginning_of(ids, self._tokens), match.headers))

    def _plan_of(self, ids: IntArray, match: Match, mapped: Match, *, changed_only: bool = False) -> Plan:
        exact, settled = ((), None) if changed_only else (match.exact, match.served)
        return make_plan(
            len(ids),
            exact,
            match.approximate,
            {**match.headers, **mapped.headers},
            settled,
            transferred=mapped.approximate,
            lossy=self._lossy,
        )

    def _asks_elsewhere(self, scope: Scope, ids: IntArray, match: Match, recipe: Recipe) -> Match | None:
        """What is stored besides the prompt as it was served, if the next question is about another short passage.

        The one that the question before was about was recomputed whole, which draws attention to it. Where that is not
        worth its time, what was served goes on.
        """
        if match.served is None or not recipe.whole_asked or recipe.strategy != "cacheblend":
            return None
        anew = self._match(scope, ids, served=False)
        plan = read(ids, self._plan_of(ids, anew, NOTHING), recipe, self._tokens)
        assert plan.asked is not None
        least = min(HINT, HINT_SHARE * plan.asked.said)
        named = named_runs(recipe, plan.runs, plan.asked, least=least) or []
        moved = [run for run in named if run.end <= match.served.end]
        if match.fresh is not None:
            moved = [run for run in moved if not match.fresh[run.start : run.end].all()]
        return anew if moved and self._too_dear(plan, recipe) is None else None

    @property
    def _token_s(self) -> float | None:
        return self.costs.token_s if self.costs else None

    @property
    def _no_exact(self) -> Fallback:
        return Fallback("codec", f"nothing stored with kv_bits={self._config.kv_bits!r} is exact")

    def _too_dear(self, plan: Plan, recipe: Recipe) -> Fallback | None:
        if self.costs is None or not self._config.fallback:
            return None
        reuse = self.costs.reuse(plan, recipe) + self._library.loading_s(plan.keys)
        if self._bridge is not None:
            reuse += self._bridge.seconds(plan)
        compute = self.costs.compute(plan) + self._library.loading_s(without_approximate(plan).keys)
        if reuse < WORTH * compute:
            return None
        return Fallback(
            "cost", f"reuse is not worth an approximation: {reuse:.3g} s predicted, computing takes {compute:.3g} s"
        )
