"""`kvboost-rag bench`: what reuse gives on a model and documents of one's own, and what it costs in fidelity.

Prompts of reordered passages go through every arm, prompt by prompt and in random order: everything computed, exact
reuse only (what a prefix cache can do), the configured reuse after warming, and no documents at all as the control.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .audit import divergence
from .config import EngineConfig
from .engine import Engine, Prompt
from .errors import ConfigError, ContextOverflowError
from .hf import cache_argument
from .progress import progress
from .stats import Prefill
from .warm_command import BITS, PATTERNS, check_dtype, exit_status, texts_in

FULL, PREFIX, OURS, NOTHING = "all computed", "prefix reuse", "kvboost-rag", "no documents"
PREAMBLES = (
    "You are a helpful assistant. Answer the question from the context only.",
    "Answer briefly, using only the passages that the user gives.",
)
QUESTION = "What does the passage say that begins with “{words}”? Answer in one or two sentences."
SHOWN_WORDS = 8
SENTENCES = re.compile(r"(?<=[.!?])(?=\s)|(?<=[。！？])")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt through one arm.

    Attributes:
        arm: `FULL`, `PREFIX`, `OURS` or `NOTHING`.
        ttft_s: wall seconds to the first logits.
        prompt_tokens, computed_tokens: of the prompt, each pass charged by its share of the layers.
        kl: mean KL of next-token distributions from those of full recompute, along its answer, nats.
        first: whether the likeliest first token is the same.
        agreed: share of the answer's tokens that are the likeliest here, too.
        fallback: why nothing was reused, if the engine said so.
    """

    arm: str
    ttft_s: float
    prompt_tokens: int
    computed_tokens: float
    kl: float
    first: bool
    agreed: float
    fallback: str | None


def bench(arguments: Sequence[str]) -> int:
    """Run `kvboost-rag bench`.

    Returns:
        0 if it was measured, whatever came out; 2 if it was not; 130 if stopped.
    """
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvboost-rag bench", description="Time to the first token and fidelity on your model and your documents."
    )
    parser.add_argument("folder", type=Path, help="text files, or one file; cut into passages")
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--glob", action="append", help=f"names of text files (default: {', '.join(PATTERNS)})")
    parser.add_argument("--prompts", type=int, default=8, help="prompts to measure (%(default)s)")
    parser.add_argument("--passages", type=int, default=6, help="passages of a prompt (%(default)s)")
    parser.add_argument("--passage-tokens", type=int, default=220, help="most tokens of a passage (%(default)s)")
    parser.add_argument("--collection", type=int, default=60, help="most passages to warm (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=24, help="along which answers are compared (%(default)s)")
    parser.add_argument("--repair-ratio", type=float, help="see EngineConfig.repair_ratio")
    parser.add_argument("--kv-bits", choices=list(BITS), default="16", help="see EngineConfig.kv_bits")
    parser.add_argument("--dtype", default="auto", help="torch dtype of the model")
    parser.add_argument("--seed", type=int, default=0, help="of passages, orders and turns (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, summary and every prompt's figures")
    return parser


def _run(options: argparse.Namespace) -> int:
    for name in ("prompts", "passages", "passage_tokens", "collection", "answer_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be 1 or more")
    check_dtype(options.dtype)
    if options.json and not options.json.parent.is_dir():  # said now, not when everything is measured
        raise ConfigError(f"--json is {options.json}, but there is no folder {options.json.parent}; make it first")
    texts = texts_in(options.folder, options.glob)
    config = EngineConfig(
        store_prompts=False,
        repair_ratio=options.repair_ratio,
        kv_bits=BITS[options.kv_bits],  # type: ignore[arg-type]
    )
    with Engine.from_pretrained(options.model, dtype=options.dtype, config=config, show_progress=True) as engine:
        pool = passages(engine, texts, options.passage_tokens, options.collection, random.Random(options.seed))
        if len(pool) < options.passages:
            raise ConfigError(
                f"{options.folder} gives {len(pool)} different passages, a prompt needs {options.passages}; give more "
                "text, or lower --passages or --passage-tokens"
            )
        warmed = engine.warm(pool, show_progress=True)
        try:
            rows = list(measure(engine, pool, options))
        except ContextOverflowError as error:
            raise ConfigError(f"{error}; here: lower --passages or --passage-tokens") from error
    summary = summarise(rows)
    print(
        f"{options.model}: {warmed.tokens} tokens in {len(pool)} passages warmed in {warmed.seconds:.1f} s; "
        f"{options.prompts} prompts of {options.passages} passages, "
        f"{statistics.mean(row.prompt_tokens for row in rows if row.arm == FULL):.0f} tokens each, "
        f"{torch.get_num_threads()} threads\n"
    )
    print(table(summary))
    if reasons := [row.fallback for row in rows if row.arm == OURS and row.fallback]:
        print(f"\nnot reused in {len(reasons)} of {options.prompts} prompts; of the first: {reasons[0]}")
    if options.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        found = {"settings": settings, "summary": summary, "prompts": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def passages(engine: Engine, texts: Sequence[str], most_tokens: int, count: int, rng: random.Random) -> list[str]:
    """Different passages of whole lines, or sentences of lines that are too long, drawn from texts.

    A passage has at most ``most_tokens`` tokens and at least a third of that; what fits into none is left out.
    """
    found: dict[str, None] = {}
    for text in texts:
        kept: list[str] = []
        tokens = 0
        for unit, size in (*_units(engine, text, most_tokens), ("", most_tokens)):
            if kept and tokens + size > most_tokens:
                if most_tokens <= 3 * tokens:
                    found["".join(kept).strip()] = None
                kept, tokens = [], 0
            if size <= most_tokens and (unit.strip() or kept):
                kept.append(unit)
                tokens += size
    pool = list(found)
    return pool if len(pool) <= count else rng.sample(pool, count)


def _units(engine: Engine, text: str, most_tokens: int) -> Iterator[tuple[str, int]]:
    """Lines, or the sentences of long ones, and how many tokens each has."""
    for line in text.splitlines(keepends=True):
        size = len(engine.tokenize(line))
        if size <= most_tokens:
            yield line, size
        else:
            yield from ((part, len(engine.tokenize(part))) for part in SENTENCES.split(line) if part)


def measure(engine: Engine, pool: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Every arm of every prompt."""
    rng = random.Random(f"prompts {options.seed}")
    with progress("measuring", options.prompts, unit="prompt", show=True) as bar:
        for number in range(options.prompts):
            chosen = rng.sample(list(pool), options.passages)
            asked = " ".join(rng.choice(chosen).split()[:SHOWN_WORDS])
            preamble = PREAMBLES[number % len(PREAMBLES)]
            prompt, bare = (prompt_of(engine, preamble, passages, asked) for passages in (chosen, ()))
            full = engine.prefill(prompt, reuse="off", store=False)
            answer, reference = greedy(engine, full, options.answer_tokens)
            yield _row(FULL, full, reference, reference)
            arms = [PREFIX, OURS, NOTHING]
            rng.shuffle(arms)
            for arm in arms:
                if arm == PREFIX:  # it keeps what it has read, as a prefix cache does
                    found = engine.prefill(prompt, reuse="exact", store=True, namespace="bench prefix")
                elif arm == OURS:
                    found = engine.prefill(prompt, store=False)
                else:
                    found = engine.prefill(bare, reuse="off", store=False)
                yield _row(arm, found, reference, along(engine, found, answer))
            bar.update()


def prompt_of(engine: Engine, preamble: str, passages: Sequence[str], asked: str) -> Prompt:
    """One prompt: chat messages, or a string for a model without a chat template."""
    context = "\n\n".join(passages)
    question = QUESTION.format(words=asked)
    user = f"Context:\n\n{context}\n\nQuestion: {question}" if passages else f"Question: {question}"
    if getattr(engine.tokenizer, "chat_template", None) is None:
        return f"{preamble}\n\n{user}\n\nAnswer:"
    return [{"role": "system", "content": preamble}, {"role": "user", "content": user}]


@torch.inference_mode()
def greedy(engine: Engine, prefill: Prefill, count: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest continuation of ``count`` tokens, and the log-probabilities ``(count, vocab)`` it was chosen by."""
    rows, ids = [prefill.logits.float()], [int(prefill.logits.argmax())]
    for _ in range(count - 1):
        rows.append(_step(engine, prefill, ids[-1:], len(prefill.token_ids) + len(ids) - 1)[0])
        ids.append(int(rows[-1].argmax()))
    return ids, torch.log_softmax(torch.stack(rows), -1)


@torch.inference_mode()
def along(engine: Engine, prefill: Prefill, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities ``(len(answer), vocab)`` at each token of an answer; the cache grows by it."""
    rows = [prefill.logits[None].float()]
    if len(answer) > 1:
        rows.append(_step(engine, prefill, list(answer[:-1]), len(prefill.token_ids)))
    return torch.log_softmax(torch.cat(rows), -1)


def _step(engine: Engine, prefill: Prefill, ids: list[int], start: int) -> torch.Tensor:
    device = prefill.logits.device
    positions = torch.arange(start, start + len(ids), device=device)[None]
    cache = {cache_argument(engine.model): prefill.cache}
    out = engine.model(input_ids=torch.tensor([ids], device=device), position_ids=positions, use_cache=True, **cache)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def _row(arm: str, prefill: Prefill, reference: torch.Tensor, found: torch.Tensor) -> Row:
    same = reference.argmax(-1) == found.argmax(-1)
    return Row(
        arm,
        prefill.timing.ttft_s,
        prefill.usage.prompt_tokens,
        prefill.usage.computed_tokens,
        statistics.mean(divergence(one, other) for one, other in zip(reference, found, strict=True)),
        bool(same[0]),
        float(same.float().mean()),
        prefill.fallback_reason,
    )


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over prompts, and each arm against full recompute and the control without documents."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.arm].append(row)
    full_s = statistics.mean(row.ttft_s for row in grouped[FULL])
    nothing_kl = statistics.mean(row.kl for row in grouped[NOTHING])
    made = []
    for arm in (FULL, PREFIX, OURS, NOTHING):
        group = grouped[arm]
        seconds = [row.ttft_s for row in group]
        kl = statistics.mean(row.kl for row in group)
        made.append(
            {
                "arm": arm,
                "ttft_s": statistics.mean(seconds),
                "p50_s": statistics.median(seconds),
                "sooner": full_s / statistics.mean(seconds),
                "computed": sum(row.computed_tokens for row in group) / sum(row.prompt_tokens for row in group),
                "kl": kl,
                "fidelity": 1 - kl / nothing_kl if nothing_kl > 0 else None,
                "same_first_token": statistics.mean(row.first for row in group),
                "same_likeliest_token": statistics.mean(row.agreed for row in group),
            }
        )
    return made


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    columns = (
        "", "first token, s", "median", "times sooner", "tokens run", "fidelity", "same first token",
        "same likeliest token",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in summary:
        cells = (
            row["arm"],
            f"{row['ttft_s']:.3f}",
            f"{row['p50_s']:.3f}",
            f"{row['sooner']:.1f}",
            f"{row['computed']:.0%}",
            "–" if row["fidelity"] is None else f"{row['fidelity']:.3f}",
            f"{row['same_first_token']:.0%}",
            f"{row['same_likeliest_token']:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
