"""Calibrated cost model: seconds of a plan against seconds of computing it all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .planner import Plan
from .repair import Recipe, Run, budgets, expected, floors


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one model on one machine.

    Attributes:
        pass_s: fixed cost of a forward pass, whatever its length.
        token_s: cost of one token through all layers, attention aside.
        pair_s: cost of one query token looking at one key, all layers.
        move_s: fetching, moving and placing one reused token.
        plan_s: fixed cost of assembling a reused prompt.
    """

    pass_s: float
    token_s: float
    pair_s: float
    move_s: float
    plan_s: float = 0.0

    def pass_cost(self, tokens: int, seen: float, share: float = 1.0) -> float:
        """Seconds of a pass of ``tokens`` rows that see ``seen`` keys on average, over a share of the layers."""
        return self.pass_s + share * tokens * (self.token_s + self.pair_s * seen)

    def saved(self, tokens: int, base: int, recipe: Recipe | None) -> float:
        """Seconds that reusing a stretch saves: computing it, less moving it, less what repair recomputes of it.

        Args:
            tokens: length of the stretch.
            base: tokens in front of it.
            recipe: how it is repaired; None if it is not.
        """
        rows = 0
        if recipe is not None and recipe.strategy != "none":
            rows = sum(floors(recipe, (Run(0, tokens),)))
            if recipe.strategy == "selective":
                rows += recipe.window_tokens
            elif recipe.strategy == "cacheblend":
                rows += sum(budgets(recipe, (Run(0, tokens),)))
        computed = tokens - min(rows, tokens)
        return computed * (self.token_s + self.pair_s * (base + tokens / 2)) - self.move_s * tokens

    def compute(self, plan: Plan) -> float:
        """Seconds of the plan without changed segments: exact hits loaded, the rest computed in one pass."""
        n, e = plan.prompt_tokens, plan.exact_end
        return self.move_s * e + self.pass_cost(n - e, (n + e) / 2)

    def reuse(self, plan: Plan, recipe: Recipe) -> float:
        """Seconds of the plan as it stands, what mapping the KV of another model takes left out.

        Where it was not read what the question is about, or words alone do not tell, the most that may be recomputed
        for its sake counts.
        """
        n, fresh = plan.prompt_tokens, plan.tokens("compute")
        moved = plan.tokens("approximate") + plan.tokens("transferred")
        seen = 0.6 * n
        seconds = self.plan_s + self.move_s * (moved + plan.exact_end)
        probe = recipe.probe(plan.runs, plan.asked)
        if probe == "deviation":
            seconds += self.pass_cost(moved + fresh, n / 2, share=0.1)
        elif probe == "query" and recipe.rerun:
            seconds += self.pass_cost(min(fresh, 128), seen, share=recipe.probe_to)
        elif probe == "query":
            seconds += self.pass_s  # of the tokens that catch up
        rows = min(fresh + expected(recipe, plan.runs, plan.asked), n - plan.exact_end)
        return seconds + self.pass_cost(rows, seen)
