"""What is measured once per model and machine: cost coefficients, and the repair recipe of `selector="auto"`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .config import EngineConfig
from .costs import CostModel
from .hf import cache_over
from .repair import Recipe
from .rope import Rope
from .runner import ModelRunner

SHORT_ROWS, LONG_ROWS = 4, 64
ATTENTION_PENALTY = 1.5  # attention reaches a lower share of the arithmetic peak than the linear layers do


def measure_costs(runner: ModelRunner, rope: Rope | None) -> CostModel:
    """Time two small passes and one move. A second on a small model, a few on a large one."""
    spec = runner.spec
    short, long = _pass_seconds(runner, SHORT_ROWS), _pass_seconds(runner, LONG_ROWS)
    token_s = max((long - short) / (LONG_ROWS - SHORT_ROWS), 1e-9)
    per_pair = 4 * spec.kv_heads * spec.groups * (spec.head_dim + spec.value_dim) / 2 * spec.layers
    pair_s = token_s * per_pair / (2 * spec.active_parameters) * ATTENTION_PENALTY
    return CostModel(
        pass_s=max(short - SHORT_ROWS * token_s, 0.0),
        token_s=token_s,
        pair_s=pair_s,
        move_s=0.0 if rope is None else _move_seconds(runner, rope),
    )


def recipe_of(config: EngineConfig) -> Recipe:
    """The repair that a configuration asks for, before any calibration."""
    return Recipe(
        strategy=config.repair,
        selector="deviation" if config.selector == "auto" else config.selector,
        ratio=config.repair_ratio,
        floor_tokens=config.floor_tokens,
        window_tokens=config.window_tokens,
    )


def _pass_seconds(runner: ModelRunner, rows: int) -> float:
    ids = torch.zeros(rows, dtype=torch.int64, device=runner.spec.device)
    positions = torch.arange(rows, device=runner.spec.device)

    def once() -> None:
        kv = runner.new_kv(rows, rows)
        runner.run(kv, cache_over(kv), ids, positions)

    return _best_of(once, runner.spec.device)


def _move_seconds(runner: ModelRunner, rope: Rope) -> float:
    kv = runner.new_kv(LONG_ROWS, LONG_ROWS)
    kv.keys.zero_()
    kv.values.zero_()
    run, target = kv.take(0, LONG_ROWS), runner.new_kv(LONG_ROWS, LONG_ROWS)

    def once() -> None:
        target.place(run, 0, offset=0, length=LONG_ROWS, delta=7, rope=rope)

    return _best_of(once, runner.spec.device) / LONG_ROWS


def _best_of(once: Callable[[], None], device: torch.device, times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        once()
        if device.type == "cuda":  # pragma: no cover - not tried on the development machines
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
