"""Soak: thousands of mixed requests from several threads; budgets must hold, and nothing may leak, raise or be wrong.

    python benchmarks/soak.py --requests 2000
    python benchmarks/soak.py --requests 20000 --threads 8 --json soak.json

Warms documents, asks for them in other orders, streams and leaves halfway, gives up, forgets, clears; for several
tenants, over a RAM and a disk that are much too small. After every request the budgets are compared with what is
stored. Every exact prefill is compared with plain Hugging Face. The model is tiny and random, so that the store is
what grows; `--model` takes a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvboost_rag import Engine, EngineConfig, RequestTimeoutError, SamplingParams
from tests.tiny import difference, engine_of, new_model, plain_logits, text

TENANTS = ("alice", "bob", "carol", "dave")
DOCUMENTS = 40  # per tenant
WORDS = (20, 60)  # of a document
RAM_BYTES, DISK_BYTES, WAITING_BYTES = 16 << 20, 32 << 20, 4 << 20
LIMIT = 1e-3  # of logits, relative


@dataclass(slots=True)
class Report:
    """What a soak saw.

    Attributes:
        start_bytes: resident memory before anything was stored, model, reference model and a first request included.
        peak_bytes, half_bytes, end_bytes: the most, after half of the requests, and after the last.
        threads: names of those that lived before and after.
        files: how many were open before and after (None where the system does not tell).
        done: requests by kind.
        broken: what was wrong; nothing may be.
    """

    requests: int
    seconds: float = 0.0
    start_bytes: int = 0
    peak_bytes: int = 0
    half_bytes: int = 0
    end_bytes: int = 0
    threads: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    files: tuple[int | None, int | None] = (None, None)
    most_stored_bytes: int = 0
    most_disk_bytes: int = 0
    most_waiting_bytes: int = 0
    evictions: int = 0
    disk_evictions: int = 0
    loads: int = 0
    write_errors: int = 0
    last_error: str | None = None
    reused_share: float = 0.0
    worst_difference: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


class Soak:
    """Runs requests against an engine.

    Args:
        make: makes an engine with small budgets, which the soak closes.
        requests: how many.
        threads: that send them.
        seed: of everything that is drawn; request n is the same in every run.
    """

    def __init__(self, make: Callable[[], Engine], requests: int, *, threads: int = 4, seed: int = 0) -> None:
        self._before = living(), open_files()
        self.engine = engine = make()
        self.report = Report(requests)
        self._threads, self._seed = threads, seed
        self._reference, self._reference_lock = copy.deepcopy(engine.model), threading.Lock()
        self._lock, self._next = threading.Lock(), 0
        self._kinds: dict[Callable[[random.Random, str], None], int] = {
            self._ask: 40,
            self._warm: 12,
            self._stream_and_leave: 12,
            self._converse: 8,
            self._exact: 8,
            self._unseen: 6,
            self._stream: 4,
            self._give_up: 4,
            self._leave_task: 3,
            self._forget: 4,
            self._clear: 1,
        }

    def run(self) -> Report:
        """Run them all, wait for the disk, and close the engine."""
        engine, report = self.engine, self.report
        self._exact(random.Random(0), TENANTS[0])
        engine.clear(TENANTS[0])
        gc.collect()
        report.start_bytes = report.peak_bytes = resident_bytes()
        started = time.perf_counter()
        workers = [threading.Thread(target=self._work, name=f"soak {n}") for n in range(self._threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        report.seconds = time.perf_counter() - started
        gc.collect()
        report.end_bytes = resident_bytes()
        engine._library._store.flush()
        self._sample()
        stats = engine.stats()
        report.evictions, report.reused_share = stats.evictions, stats.exact_tokens + stats.approximate_tokens
        report.reused_share /= max(stats.prompt_tokens, 1)
        if stats.disk is not None:
            report.disk_evictions, report.loads = stats.disk.evictions, stats.disk.loads
            report.write_errors, report.last_error = stats.disk.write_errors, stats.disk.last_error
            if stats.disk.bad:
                report.broken.append(f"{stats.disk.bad} damaged entries")
        if stats.pinned_bytes:
            report.broken.append(f"{stats.pinned_bytes} bytes are pinned by nobody")
        for tenant in TENANTS:
            engine.clear(tenant)
        if left := engine.stats().chunks:
            report.broken.append(f"{left} chunks are left after everything was cleared")
        engine.close()
        gc.collect()
        if lying := file_bytes(Path(str(engine.config.disk_path)) / "chunks"):
            report.broken.append(f"{lying} bytes are left on disk after everything was cleared")
        end = time.monotonic() + 10
        while len(living()) > len(self._before[0]) and time.monotonic() < end:
            time.sleep(0.01)  # a stream that was dropped ends when its last step has
        report.threads, report.files = (self._before[0], living()), (self._before[1], open_files())
        return report

    def _work(self) -> None:
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
            if number >= self.report.requests:
                return
            draw = random.Random(f"{self._seed} {number}")
            kind = draw.choices(list(self._kinds), list(self._kinds.values()))[0]
            try:
                kind(draw, draw.choice(TENANTS))
            except Exception as error:
                self.report.broken.append(f"request {number}, {kind.__name__}: {error!r}")
            self._sample()
            with self._lock:
                self.report.done[kind.__name__.strip("_")] += 1
                if number == self.report.requests // 2:
                    self.report.half_bytes = resident_bytes()

    def _sample(self) -> None:
        stats, report, config = self.engine.stats(), self.report, self.engine.config
        resident = resident_bytes()
        with self._lock:
            report.peak_bytes = max(report.peak_bytes, resident)
            report.most_stored_bytes = max(report.most_stored_bytes, stats.stored_bytes)
            if stats.stored_bytes > config.ram_budget_bytes:
                report.broken.append(f"{stats.stored_bytes} bytes in RAM")
            if stats.disk is None:
                return
            report.most_disk_bytes = max(report.most_disk_bytes, stats.disk.stored_bytes)
            report.most_waiting_bytes = max(report.most_waiting_bytes, stats.disk.waiting_bytes)
            if stats.disk.stored_bytes > config.disk_budget_bytes:
                report.broken.append(f"{stats.disk.stored_bytes} bytes on disk by its own account")
            if stats.disk.waiting_bytes > config.write_behind_bytes:
                report.broken.append(f"{stats.disk.waiting_bytes} bytes wait to be written")
            # A walk may see a file that was just written and one that left for it, so one walk proves nothing.
            walks = (file_bytes(Path(str(config.disk_path)) / "chunks") for _ in range(5))
            if all(lying > config.disk_budget_bytes for lying in walks):
                report.broken.append("more bytes on disk than allowed")

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _document(self, draw: random.Random, tenant: str) -> str:
        number = min(int(draw.expovariate(0.1)), DOCUMENTS - 1)  # some are popular
        return text(1000 * TENANTS.index(tenant) + number, WORDS[0] + number % (WORDS[1] - WORDS[0]))

    def _documents(self, draw: random.Random, tenant: str) -> list[str]:
        return [self._document(draw, tenant) for _ in range(draw.randint(1, 4))]

    def _prompt(self, draw: random.Random, tenant: str) -> str:
        parts = ["Read this.", *self._documents(draw, tenant), f"Which {draw.choice(['river', 'stone', 'letter'])}?"]
        return "\n\n".join(parts)

    def _sampling(self, draw: random.Random, tokens: int = 4) -> SamplingParams:
        return SamplingParams(max_tokens=draw.randint(1, tokens), temperature=draw.choice([0.0, 0.8]))

    def _ask(self, draw: random.Random, tenant: str) -> None:
        self.engine.generate(self._prompt(draw, tenant), namespace=tenant, sampling=self._sampling(draw))

    def _warm(self, draw: random.Random, tenant: str) -> None:
        self.engine.warm(
            self._documents(draw, tenant), namespace=tenant, context=draw.choice(["", "", "Read this.\n\n"])
        )

    def _stream(self, draw: random.Random, tenant: str) -> None:
        *_, last = self.engine.stream(self._prompt(draw, tenant), namespace=tenant, sampling=self._sampling(draw))
        if last.generation is None:
            raise AssertionError("a stream ended without its generation")

    def _stream_and_leave(self, draw: random.Random, tenant: str) -> None:
        sampling = SamplingParams(max_tokens=40)
        deltas = self.engine.stream(self._prompt(draw, tenant), namespace=tenant, sampling=sampling)
        for _ in range(draw.randint(0, 3)):
            next(deltas, None)
        if draw.random() < 0.8:
            deltas.close()  # otherwise it is dropped

    def _converse(self, draw: random.Random, tenant: str) -> None:
        messages = [{"role": "user", "content": self._prompt(draw, tenant)}]
        for question in ("And which stone?", "And which letter?"):
            answer = self.engine.generate(messages, namespace=tenant, sampling=self._sampling(draw))
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]

    def _exact(self, draw: random.Random, tenant: str) -> None:
        found = self.engine.prefill(self._prompt(draw, tenant), namespace=tenant, reuse="exact")
        with self._reference_lock:
            off = difference(found.logits, plain_logits(self._reference, found.token_ids))
            self.report.worst_difference = max(self.report.worst_difference, off)
        if off > LIMIT:
            raise AssertionError(f"exact logits are off by {off}")

    def _unseen(self, draw: random.Random, tenant: str) -> None:
        self.engine.prefill(text(draw.randrange(1 << 40), 80), namespace=tenant, store=draw.choice([True, False, None]))

    def _give_up(self, draw: random.Random, tenant: str) -> None:
        timeout_s, prompt = draw.uniform(0.001, 0.05), self._prompt(draw, tenant)
        with contextlib.suppress(RequestTimeoutError):
            self.engine.generate(prompt, namespace=tenant, timeout_s=timeout_s, sampling=SamplingParams(max_tokens=30))

    def _leave_task(self, draw: random.Random, tenant: str) -> None:
        async def leave() -> None:
            answer = self.engine.agenerate(self._prompt(draw, tenant), namespace=tenant)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answer, draw.uniform(0.001, 0.05))

        asyncio.run(leave())

    def _forget(self, draw: random.Random, tenant: str) -> None:
        self.engine.forget(self._documents(draw, tenant), namespace=tenant)

    def _clear(self, draw: random.Random, tenant: str) -> None:
        self.engine.clear(tenant)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def living() -> list[str]:
    """Names of threads, but for the one that all progress bars of a process share."""
    return [thread.name for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]


def open_files() -> int | None:
    """How many files are open; None where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def file_bytes(folder: Path) -> int:
    """What files take on the disk, as far as they are still there."""
    total = 0
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def tiny_engine(folder: Path, **config: Any) -> Engine:
    """A tiny model with 4 KiB of KV per token, and budgets for a tenth of what is asked for."""
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 32}
    return engine_of(new_model("llama", max_position_embeddings=1024, **shape), **_settings(folder), **config)


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "disk_path": folder,
        "ram_budget_bytes": RAM_BYTES,
        "disk_budget_bytes": DISK_BYTES,
        "write_behind_bytes": WAITING_BYTES,
        "pack_tokens": 300,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--model", help="a real model instead of the tiny one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def make() -> Engine:
            if args.model:
                return Engine.from_pretrained(args.model, config=EngineConfig(fallback=False, **_settings(folder)))
            return tiny_engine(folder)

        report = Soak(make, args.requests, threads=args.threads, seed=args.seed).run()
    shown = json.dumps({f.name: getattr(report, f.name) for f in fields(report)}, indent=1)
    print(shown)
    if args.json:
        args.json.write_text(shown)
    if report.broken:
        raise SystemExit(f"{len(report.broken)} things went wrong")


if __name__ == "__main__":
    main()
