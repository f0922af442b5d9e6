"""Codecs: bytes, what they cost in fidelity, and how fast they are, for every `kv_bits`.

Documents are warmed once with full KV. For each prompt the same plan is then run from the chunks as they are and from
the chunks put through each codec, with the same repair, so that only the codec differs. Arms are interleaved prompt by
prompt. Timings encode and place the chunks of the prompts, moved to their new positions; "plain" copies them.

    python benchmarks/codecs.py --prompts 8 --json results/codecs.json --markdown results/codecs.md

Columns: `bytes` per token as a share of float16; `kl_full` mean KL along the answer against full recompute (nats);
`loss` fidelity lost against plain, fidelity being 1 − kl / kl of the no-document control, and `±` its standard error
over prompts; `kl_plain` mean KL against plain and `share` that as a share of the control's kl; `agree` share of answer
tokens with plain's argmax; `gate` what the gate at load measures (the share, with every document token encoded where
it stands, no repair; limit 0.01); `encode` and `decode` thousand tokens per CPU second; `decode_share` the CPU seconds
of placing all chunks as a share of a full prefill's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import bar, count_tokens, default_model, divergence, ingest, load_engine, machine, markdown, write
from workload import Item, items, passages, sample

from kvboost_rag import Engine
from kvboost_rag.chunks import as_ids
from kvboost_rag.gate import CodecCheck, measure_codec
from kvboost_rag.kv import RequestKV, StoredRun
from kvboost_rag.planner import Plan, make_plan
from kvboost_rag.store import Codec, KVShape, codec_for

BITS: tuple[Any, ...] = (16, 8, "8/4", 4)
COLUMNS = (
    "model", "codec", "bytes", "kl_full", "loss", "±", "kl_plain", "share", "agree", "gate", "encode", "decode",
    "decode_share",
)  # fmt: skip
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=_on_disk(), help="hub ids or folders")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--collection", type=int, default=24, help="most passages to ingest and to ask about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        rows += Bench(load_engine(model, args.dtype, store_prompts=False), args).rows(Path(model).name)
        print(markdown(COLUMNS, rows), flush=True)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"`{' '.join(sys.argv)}` on {machine()}\n\n{markdown(COLUMNS, rows)}\n")
    write(args.json, vars(args), rows=rows)


def _on_disk() -> list[str]:
    folder = Path(default_model()).parent
    return [str(folder / name) for name in ("smollm2-135m-instruct", "qwen2.5-coder-0.5b") if (folder / name).is_dir()]


class Bench:
    """One model, every codec."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        # A codec is compared on equal chunks and plans, which no public call can promise: this looks inside.
        self.engine, self.args = engine, args
        self.library, self.executor = engine._library, engine._serving._executor
        self.runner, self.recipe = self.executor.runner, engine.recipe
        self.rope, self.spec = self.executor.rope, self.runner.spec
        self.codecs: dict[str, Codec] = {codec_for(bits).name: codec_for(bits) for bits in BITS}
        self.seconds: dict[str, dict[str, float]] = {name: defaultdict(float) for name in self.codecs}
        self.found: dict[str, list[Row]] = {name: [] for name in self.codecs}
        self.nothing: list[float] = []
        self.full_s = 0.0

    def rows(self, model: str) -> list[dict[str, Any]]:
        args = self.args
        pool = sample(passages(count_tokens(self.engine)), args.collection, args.seed)
        ingest(self.engine, pool, args.seed)
        for item in bar(items(pool, args.prompts, docs=args.docs, seed=args.seed), Path(model).name):
            self.measure(item)
        return [{"model": model, **self.summary(name)} for name in self.codecs]

    def measure(self, item: Item) -> None:
        """All codecs on one prompt."""
        ids = as_ids(self.engine.tokenize(item.messages()))
        alone = as_ids(self.engine.tokenize(item.messages(passages=())))
        match = self.library.match(self.engine._scope(None), ids, approximate=True)
        plan = make_plan(len(ids), match.exact, match.approximate, match.headers)
        started = time.process_time()
        full = self._run(ids, make_plan(len(ids), ()), {})
        self.full_s += time.process_time() - started
        answer = self.runner.greedy(full.kv, full.cache, full.logits, self.args.answer_tokens)

        def along(done: Any) -> torch.Tensor:
            return self.runner.log_probs(done.kv, done.cache, done.logits, answer)

        reference = along(full)
        self.nothing.append(_kl(reference, along(self._run(alone, make_plan(len(alone), ()), {}))))
        with self.library.pin(plan.keys) as chunks:
            assert chunks is not None
            plain = along(self._run(ids, plan, chunks))
            for name, codec in self.codecs.items():
                encoded = {key: self._encode(codec, run, match.headers[key].base) for key, run in chunks.items()}
                self._decode(name, encoded, plan)
                other = along(self._run(ids, plan, encoded))
                self.found[name].append(
                    {
                        "kl_full": _kl(reference, other),
                        "more": _kl(reference, other) - _kl(reference, plain),
                        "kl_plain": _kl(plain, other),
                        "agree": float((plain.argmax(-1) == other.argmax(-1)).float().mean()),
                    }
                )

    def _run(self, ids: Any, plan: Plan, chunks: Mapping[str, StoredRun]) -> Any:
        return self.executor.run(ids, plan, chunks, self.recipe, room=self.args.answer_tokens)

    def _encode(self, codec: Codec, run: StoredRun, base: int) -> StoredRun:
        kv = self.runner.new_kv(base + run.tokens, base + run.tokens)
        run.place(kv, base, offset=0, length=run.tokens, delta=0, rope=self.rope)
        own = self.seconds[codec.name]
        own["encode"] += _best(lambda: codec.encode(kv, base, base + run.tokens, self.rope))
        encoded = codec.encode(kv, base, base + run.tokens, self.rope)
        own["bytes"] += encoded.nbytes
        own["tokens"] += run.tokens
        return encoded

    def _decode(self, name: str, encoded: Mapping[str, StoredRun], plan: Plan) -> None:
        kv: RequestKV = self.runner.new_kv(plan.prompt_tokens, plan.prompt_tokens)
        reused = [s for s in plan.segments if s.key is not None]

        def place() -> None:
            for s in reused:
                assert s.key is not None
                encoded[s.key].place(kv, s.start, offset=s.offset, length=len(s), delta=s.delta, rope=self.rope)

        self.seconds[name]["decode"] += _best(place)
        self.seconds[name]["placed"] += sum(map(len, reused))

    def summary(self, name: str) -> dict[str, Any]:
        """Means over prompts."""
        rows, own, spec = self.found[name], self.seconds[name], self.spec
        nothing = float(np.mean(self.nothing))
        half = codec_for(16).nbytes(
            KVShape(spec.layers, spec.kv_heads, spec.head_dim, spec.value_dim, torch.float16), int(own["tokens"])
        )
        mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        more = [row["more"] for row in rows]
        return {
            "codec": name,
            "bytes": own["bytes"] / half,
            "kl_full": mean["kl_full"],
            "loss": mean["more"] / nothing,
            "±": float(np.std(more, ddof=1) / len(more) ** 0.5) / nothing if len(more) > 1 else float("nan"),
            "kl_plain": mean["kl_plain"],
            "share": mean["kl_plain"] / nothing,
            "agree": mean["agree"],
            "gate": self._gate(self.codecs[name]).loss,
            "encode": own["tokens"] / own["encode"] / 1000,
            "decode": own["placed"] / own["decode"] / 1000,
            "decode_share": own["decode"] / self.full_s,
            "nothing_kl": nothing,
        }

    def _gate(self, codec: Codec) -> CodecCheck:
        return measure_codec(self.executor, self.engine._encoder, codec)


def _kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    return float(divergence(reference, other).mean())


def _best(work: Callable[[], Any], times: int = 3) -> float:
    """CPU seconds of the quickest of some runs."""
    seconds = []
    for _ in range(times):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
