"""Statistics of right and wrong answers. Standard textbook formulas, in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

Z95 = 1.959963984540054  # of a two-sided 95 % interval


def wilson(right: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share. Source: Wilson, JASA 22 (1927)."""
    if total == 0:
        return 0.0, 1.0
    share = right / total
    scale = 1 + z * z / total
    middle = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p of a paired difference: ``lost`` right only without, ``won`` right only with."""
    n, less = lost + won, min(lost, won)
    tail = sum(math.comb(n, k) for k in range(less + 1)) / 2**n
    return min(1.0, 2 * tail)


def chance_of(right: int, chances: Sequence[float]) -> float:
    """Probability that guessing gets at least ``right`` answers right; each question has its own chance."""
    exactly = [1.0]
    for chance in chances:
        with_it = [0.0, *(p * chance for p in exactly)]
        exactly = [a + b for a, b in zip([*(p * (1 - chance) for p in exactly), 0.0], with_it, strict=True)]
    return min(1.0, math.fsum(exactly[right:]))


def bootstrap(groups: Sequence[Sequence[float]], rounds: int = 4000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of all values; whole groups are drawn, for the values of one depend on each other."""
    rng = random.Random(seed)
    sums = [(sum(group), len(group)) for group in groups]
    means = []
    for _ in range(rounds):
        drawn = rng.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return means[round(0.025 * (rounds - 1))], means[round(0.975 * (rounds - 1))]
