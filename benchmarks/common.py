"""What both benchmarks share: engine, CPU time, divergences, tables."""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from workload import Passage

from kvboost_rag import Engine, EngineConfig
from kvboost_rag.progress import progress

T = TypeVar("T")


def default_model() -> str:
    """The demo model in the user's cache folder."""
    cache = os.environ.get("KVBOOST_CACHE") or Path.home() / ".cache" / "kvboost-rag"
    return str(Path(cache) / "models" / "smollm2-135m-instruct")


def load_engine(model: str, dtype: str, **config: Any) -> Engine:
    """An engine on one torch thread, with room for everything a benchmark stores."""
    torch.set_num_threads(1)
    options = {"ram_budget_bytes": 12 << 30, "fallback": False, **config}
    return Engine.from_pretrained(model, dtype=getattr(torch, dtype), config=EngineConfig(**options))


def count_tokens(engine: Engine) -> Callable[[str], int]:
    """Counts a text's tokens."""
    return lambda text: len(engine.tokenizer(text, add_special_tokens=False).input_ids)


def ingest(engine: Engine, pool: Sequence[Passage], seed: int | None) -> None:
    """Warm a whole collection once, as a user who ingests a store does; in random order unless ``seed`` is None.

    The documents of one prompt then hardly ever were neighbours when they were encoded.
    """
    texts = [passage.text for passage in pool]
    if seed is not None:
        random.Random(f"ingest {seed}").shuffle(texts)
    report = engine.warm(texts, namespace="default", show_progress=True)
    if report.rejected:
        raise SystemExit(f"{report.rejected} passages do not fit the store's budget")


def bar(made: Sequence[T], what: str, unit: str = "prompt") -> Iterator[T]:
    """Go through something behind a progress bar, which only a terminal or a notebook shows."""
    with progress(what, len(made), unit=unit, show=True) as shown:
        for one in made:
            yield one
            shown.update()


def cpu_seconds(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process spent in ``work``, and its result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def reused_in(engine: Engine, prefill: Any) -> tuple[str, Callable[[int, int], tuple[int, int]]]:
    """The prompt's text, and a count of the tokens that lie in a stretch of it: those that were reused, and all."""
    pieces = [engine.tokenizer.decode([token]) for token in prefill.token_ids]
    starts = list(itertools.accumulate(map(len, pieces), initial=0))
    reused = [False] * len(pieces)
    for segment in prefill.plan.segments:
        if segment.kind != "compute":
            reused[segment.start : segment.end] = [True] * len(segment)

    def count(begin: int, end: int) -> tuple[int, int]:
        inside = [i for i in range(len(pieces)) if begin <= starts[i] and starts[i + 1] <= end]
        return sum(reused[i] for i in inside), len(inside)

    return "".join(pieces), count


@torch.inference_mode()
def log_probs_along(engine: Engine, prefill: Any, answer: Sequence[int]) -> torch.Tensor:
    """Next-token log-probabilities at each token of ``answer``, ``(len(answer), vocab)``; consumes the cache."""
    rows = [prefill.logits[None]]
    if len(answer) > 1:
        ids = torch.tensor([list(answer[:-1])], device=prefill.logits.device)
        start = len(prefill.token_ids)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        out = engine.model(input_ids=ids, position_ids=positions, cache=prefill.cache, use_cache=True)
        rows.append(out.logits[0].float())
    return torch.log_softmax(torch.cat(rows), dim=-1)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ other) in nats per row."""
    return (reference.exp() * (reference - other)).sum(-1)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores, 1 torch thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def markdown(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of some columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |")
    return "\n".join(lines)


def write(path: Path | None, settings: dict[str, Any], **content: Any) -> None:
    """Write a JSON report."""
    if path is not None:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "settings": plain, **content}, indent=1))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
