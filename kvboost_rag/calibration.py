"""What is measured once per model and machine: cost coefficients, and the repair recipe of `selector="auto"`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .calibration_text import ORDERS, PASSAGES, PROMPT, QUESTIONS
from .chunks import IntArray, Scope, header_of
from .config import LEAD_TOKENS, PACK_SEPARATOR, EngineConfig
from .costs import CostModel
from .hf import cache_over
from .index import ChunkIndex
from .kv import StoredRun
from .packing import PackEncoding
from .planner import make_plan
from .prefill import Executor
from .prompts import PromptEncoder
from .repair import FIRST_RATIO, Recipe
from .rope import Rope
from .runner import ModelRunner
from .store import Codec, codec_for

SHORT_ROWS, LONG_ROWS = 4, 64
ATTENTION_PENALTY = 1.5  # attention reaches a lower share of the arithmetic peak than the linear layers do
ANSWER_TOKENS = 12
LIMIT_S = 60.0  # a model for which the calibration would take longer at load gets the default recipe
CANDIDATES = tuple((selector, offset) for selector in ("query", "deviation") for offset in (0.5, 0.0))
DEFAULT = CANDIDATES[0]  # as near as deviation over the answer, and nearer at its first token (docs/accuracy.md)
_RATIO = 0.05  # of what was met once; of what was warmed in several orders, first tokens alone
_MAPPED_RATIO = 0.2  # of what was mapped from another model
MARGIN = 0.75  # two prompts are a small sample: the default stays unless another is clearly better
_VERSION = 4


def measure_costs(runner: ModelRunner, rope: Rope | None, codec: Codec) -> CostModel:
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
        move_s=0.0 if rope is None else _move_seconds(runner, rope, codec),
    )


def recipe_of(config: EngineConfig) -> Recipe:
    """The repair that a configuration asks for, before any calibration."""
    selector, offset = DEFAULT
    recipe = Recipe(
        strategy=config.repair,
        selector=selector if config.selector == "auto" else config.selector,
        ratio=_RATIO,
        mean_ratio=FIRST_RATIO,
        mapped_ratio=_MAPPED_RATIO,
        least_tokens=config.repair_least_tokens,
        whole_asked=config.repair_whole_passages,
        spot_tokens=config.repair_spot_tokens,
        floor_tokens=config.floor_tokens,
        window_tokens=config.window_tokens,
        offset=offset,
    )
    return recipe if config.repair_ratio is None else recipe.with_ratio(config.repair_ratio)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Outcome of trying every candidate on this model.

    Attributes:
        recipe: the best.
        scores: mean KL to full recompute (nats) times the share of the prompt that ran, by candidate; lower is better.
    """

    recipe: Recipe
    scores: Mapping[str, float]


class Calibrator:
    """Tries repair recipes on built-in passages: warmed, reordered, asked about, compared with a full prefill."""

    def __init__(self, executor: Executor, encoder: PromptEncoder, config: EngineConfig) -> None:
        self._executor, self._encoder, self._config = executor, encoder, config
        self._runner = executor.runner

    def choose(self, base: Recipe, fingerprint: str, *, token_s: float | None) -> Calibration | None:
        """The best recipe for this model: remembered from an earlier load, or measured now.

        Args:
            base: gives strategy, ratio and floor.
            fingerprint: of the model.
            token_s: seconds per token, to predict how long measuring takes; None measures whatever it takes.

        Returns:
            None if there is nothing to choose, or measuring would take too long or does not fit the window.
        """
        if base.strategy != "cacheblend" or not 0 < base.ratio < 1:
            return None
        path = self._path(fingerprint, base)
        known = read_scores(path, set(map(_name, CANDIDATES)))
        if known is not None:
            return Calibration(_with(base, _best(known)), known)
        prompts = [self._prompt(number) for number in range(len(ORDERS))]
        total = sum(len(p) for p in prompts) * (2 + len(CANDIDATES) * 0.4)
        too_slow = token_s is not None and total * token_s > LIMIT_S
        if too_slow or max(len(p) for p in prompts) + ANSWER_TOKENS > self._runner.spec.window_tokens:
            return None
        # Selectors differ where they choose something, which they do not of the means that these passages are kept as,
        # nor of what words choose.
        plain = replace(base, mean_ratio=None, first_ratio=0.0, whole_asked=0, spot_tokens=0)
        scores = self._measure(plain, prompts)
        write_scores(path, scores)
        return Calibration(_with(base, _best(scores)), scores)

    def _prompt(self, number: int) -> IntArray:
        context = "\n\n".join(PASSAGES[i] for i in ORDERS[number])
        return self._encoder.encode(PROMPT.format(context=context, question=QUESTIONS[number]))

    def _measure(self, base: Recipe, prompts: list[IntArray]) -> dict[str, float]:
        scores = dict.fromkeys(map(_name, CANDIDATES), 0.0)
        index, stored = self._warm()
        for ids in prompts:
            hits = index.match_runs(_SCOPE, ids)
            headers = {hit.key: header for hit in hits if (header := index.get(hit.key)) is not None}
            plan = make_plan(len(ids), (), hits, headers)
            full = self._executor.run(ids, make_plan(len(ids), ()), {}, base, room=ANSWER_TOKENS)
            answer = self._runner.greedy(full.kv, full.cache, full.logits, ANSWER_TOKENS)
            reference = self._runner.log_probs(full.kv, full.cache, full.logits, answer)
            for candidate in CANDIDATES:
                done = self._executor.run(ids, plan, stored, _with(base, _name(candidate)), room=ANSWER_TOKENS)
                other = self._runner.log_probs(done.kv, done.cache, done.logits, answer)
                kl = float((reference.exp() * (reference - other)).sum(-1).mean())
                scores[_name(candidate)] += kl * done.charged / len(ids) / len(prompts)
        return scores

    def _warm(self) -> tuple[ChunkIndex, dict[str, StoredRun]]:
        index, stored = ChunkIndex(), {}
        codec = codec_for(self._config.kv_bits)  # what it loses adds to what repair leaves
        separator = self._encoder.encode_text(PACK_SEPARATOR)
        documents = [self._encoder.encode_text(passage) for passage in PASSAGES]
        lead, orders = documents[-1][-LEAD_TOKENS:], self._config.pack_orders  # as `warming` does it
        encoding = PackEncoding(self._executor, lead, documents, separator=separator, orders=orders)
        for done in encoding.steps():
            if done is not None:
                start, end = encoding.starts[done], encoding.starts[done] + len(documents[done])
                header = header_of(_SCOPE, encoding.ids, start, end, "warm", exact=encoding.exact)
                index.add(header)
                stored[header.key] = codec.encode(encoding.kv, start, end, self._executor.rope)
        return index, stored

    def _path(self, fingerprint: str, base: Recipe) -> Path | None:
        folder = self._config.calibration_dir
        if folder is None:
            return None
        return Path(folder).expanduser() / f"{fingerprint}-{base.ratio:g}-{base.least_tokens}-{base.floor_tokens}.json"


_SCOPE = Scope("calibration", "calibration")


def _best(scores: Mapping[str, float]) -> str:
    best = min(scores, key=scores.__getitem__)
    default = _name(DEFAULT)
    return best if scores[best] < MARGIN * scores[default] else default


def _name(candidate: tuple[str, float]) -> str:
    return f"{candidate[0]} {candidate[1]:g}"


def _with(base: Recipe, name: str) -> Recipe:
    selector, offset = name.split(" ")
    return replace(base, selector=selector, offset=float(offset))


def read_scores(path: Path | None, names: Set[str]) -> dict[str, float] | None:
    """Scores of an earlier load; None if there are none, or none that can be trusted."""
    try:
        found = json.loads(path.read_text()) if path is not None else {}
        if found.get("version") != _VERSION or set(found["scores"]) != names:
            return None
        return {name: float(score) for name, score in found["scores"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_scores(path: Path | None, scores: Mapping[str, float]) -> None:
    """Remember scores; a folder that cannot be written only means measuring again next time."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"version": _VERSION, "scores": dict(scores)}, file)
        os.replace(file.name, path)
    except OSError:
        return


def _pass_seconds(runner: ModelRunner, rows: int) -> float:
    ids = torch.zeros(rows, dtype=torch.int64, device=runner.spec.device)
    positions = torch.arange(rows, device=runner.spec.device)

    def once() -> None:
        kv = runner.new_kv(rows, rows)
        runner.run(kv, cache_over(kv), ids, positions)

    return _best_of(once, runner.spec.device)


def _move_seconds(runner: ModelRunner, rope: Rope, codec: Codec) -> float:
    kv = runner.new_kv(LONG_ROWS, LONG_ROWS)
    kv.keys.zero_()
    kv.values.zero_()
    run, target = codec.encode(kv, 0, LONG_ROWS, rope), runner.new_kv(LONG_ROWS, LONG_ROWS)

    def once() -> None:
        run.place(target, 0, offset=0, length=LONG_ROWS, delta=7, rope=rope)

    return _best_of(once, runner.spec.device) / LONG_ROWS


def _best_of(once: Callable[[], None], device: torch.device, times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        started = _clock(device)
        once()
        if device.type == "cuda":  # pragma: no cover - not tried on the development machines
            torch.cuda.synchronize(device)
        best = min(best, _clock(device) - started)
    return best


def _clock(device: torch.device) -> float:
    """Seconds. On a CPU they are the process's own: a busy machine at load must not decide for the engine's life."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else time.perf_counter()
