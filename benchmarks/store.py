"""The store on disk: how fast it loads, how soon it opens, and how soon a fresh process answers from it.

    python benchmarks/store.py bandwidth
    python benchmarks/store.py restart --chunks 5000
    python benchmarks/store.py ttft --prompts 12

`bandwidth` and `restart` need no model. Files come out of the page cache, as they do on a machine that just wrote or
read them. `ttft` warms a collection in one process and answers in another, with no RAM for chunks, so that every
prompt loads all its documents; times are CPU seconds of one thread, against plain Hugging Face in the same process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import count_tokens, cpu_seconds, default_model, ingest, load_engine, machine, markdown, write
from workload import PREAMBLES, items, passages, sample

from kvboost_rag import Engine, SamplingParams
from kvboost_rag.chunks import ChunkHeader, Scope, as_ids
from kvboost_rag.kv import KVRun, RequestKV
from kvboost_rag.library import Library
from kvboost_rag.store import Chunk, DiskStore

SCOPE = Scope("benchmark", "default")
ONE = SamplingParams(max_tokens=1)
LAYERS, HEADS, DIM = 30, 3, 64  # of SmolLM2-135M


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["bandwidth", "restart", "ttft"])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunks", type=int, default=0, help="48 for bandwidth, 5000 for restart")
    parser.add_argument("--tokens", type=int, default=220, help="of a chunk")
    parser.add_argument("--collection", type=int, default=60, help="passages that ttft warms")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to make the store; by default a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fresh", type=Path, help=argparse.SUPPRESS)  # this is the process that answers
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fresh:
        print(json.dumps(FRESH[args.part](args, args.fresh)))
        return
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        rows = PARTS[args.part](args, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(machine()))
    print(markdown(list(rows[0]), rows))
    write(args.json, vars(args), rows=rows)


def fresh(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same part in a process that knows nothing yet."""
    done = subprocess.run([sys.executable, *sys.argv, "--fresh", str(folder)], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def bandwidth(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    store = DiskStore(folder / "store", 1 << 40, sync=False)
    count = args.chunks or 48
    runs = []
    for number in range(count):
        keys = torch.randn(LAYERS, HEADS, args.tokens, DIM)
        runs.append(Chunk(header_of(number, args.tokens, 0), KVRun(keys, keys + 1)))
    started = time.perf_counter()
    for chunk in runs:
        store.put(chunk)
    write_s = time.perf_counter() - started
    store.close()
    kv = RequestKV(
        LAYERS,
        HEADS,
        DIM,
        DIM,
        length=args.tokens,
        capacity=args.tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )

    def place(chunk: Chunk[Any]) -> None:
        chunk.kv.place(kv, 0, offset=0, length=args.tokens, delta=0, rope=None)

    def from_ram() -> None:
        for chunk in runs:
            place(chunk)

    first, later, ram = [], [], []
    for _ in range(5):
        again = DiskStore(folder / "store", 1 << 40, sync=False)
        again.refresh(SCOPE)
        for seconds in (first, later):  # with the checksum, and without
            started = time.perf_counter()
            for chunk in runs:
                found = again.get(chunk.header.key)
                assert found is not None
                place(found)
            seconds.append(time.perf_counter() - started)
        again.close()
        started = time.perf_counter()
        from_ram()
        ram.append(time.perf_counter() - started)
    total = sum(chunk.kv.nbytes for chunk in runs)
    copy = min(ram)
    return [
        {
            "what": what,
            "GB/s": total / seconds / 1e9,
            "of memcpy": copy / seconds,
            "ms per chunk": seconds / count * 1e3,
        }
        for what, seconds in (
            ("memcpy of the same bytes", copy),
            ("load and place", min(later)),
            ("first load in a process, with checksum, and place", min(first)),
            ("write", write_s),
        )
    ]


# ---- restart ---------------------------------------------------------------------------------------------------------


def restart(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    store = DiskStore(folder, 1 << 40, sync=False)
    for number in range(args.chunks or 5000):
        keys = torch.full((1, 1, args.tokens, 4), float(number))
        store.put(Chunk(header_of(number, args.tokens, number % 6), KVRun(keys, keys.clone())))
    store.close()
    tries = [fresh(args, folder) for _ in range(3)]
    return [{name: statistics.median(one[name] for one in tries) for name in tries[0]}]


def restarted(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    count = args.chunks or 5000
    wanted = header_of(count // 2, args.tokens, (count // 2) % 6)
    prompt = np.concatenate([np.arange(30, dtype=np.int32), wanted.tokens, np.arange(20, dtype=np.int32)])
    started, cpu = time.perf_counter(), time.process_time()
    library = Library(1 << 30, disk=DiskStore(folder, 1 << 40, sync=False), write_behind_bytes=1 << 20)
    opened = time.perf_counter()
    match = library.match(SCOPE, prompt, approximate=True)
    looked = time.perf_counter()
    with library.pin([hit.key for hit in match.hits]) as runs:
        assert runs is not None
        run = next(iter(runs.values()))
        assert float(run.tensors()["keys"][0, 0, 0, 0]) == count // 2
    done, cpu = time.perf_counter(), time.process_time() - cpu
    again = time.perf_counter()
    library.match(SCOPE, prompt, approximate=True)
    again = time.perf_counter() - again
    stats = library.disk_stats()
    assert stats is not None
    library.close()
    return {
        "chunks": stats.chunks,
        "open, s": opened - started,
        "fill the index, s": looked - opened,
        "load, s": done - looked,
        "first hit after, s": done - started,
        "CPU, s": cpu,
        "files read": stats.loads,
        "next lookup, ms": again * 1e3,
    }


def header_of(number: int, tokens: int, place: int) -> ChunkHeader:
    """A document behind so many others in its pack."""
    ids = np.random.default_rng(number).integers(0, 49_000, tokens)
    before = [np.random.default_rng(number - back).integers(0, 49_000, tokens) for back in range(place, 0, -1)]
    history = as_ids(np.concatenate([np.empty(0, np.int32), *before]))
    return ChunkHeader.of(SCOPE, as_ids(ids), base=len(history), history=history, origin="warm")


# ---- time to first token ---------------------------------------------------------------------------------------------


def ttft(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    with load_engine(args.model, args.dtype, disk_path=folder, store_prompts=False) as engine:
        ingest(engine, pool_of(args, engine), args.seed)
    result = fresh(args, folder)
    return [result]


def pool_of(args: argparse.Namespace, engine: Engine) -> Any:
    return sample(passages(count_tokens(engine)), args.collection, args.seed)


def answered(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine = load_engine(args.model, args.dtype, disk_path=folder, store_prompts=False, ram_budget_bytes=0)
    made = items(pool_of(args, engine), args.prompts + 1, docs=args.docs, seed=args.seed, preamble=PREAMBLES[0])
    rows = []
    for number, item in enumerate(made):
        ids = engine.tokenize(item.messages())
        prompt = torch.tensor([ids])

        def full(prompt: torch.Tensor = prompt) -> Any:
            with torch.inference_mode():
                return engine.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1)

        ours_s, answer = cpu_seconds(lambda ids=ids: engine.generate(ids, sampling=ONE))  # type: ignore[misc]
        full_s, _ = cpu_seconds(full)
        if number:  # the first of each warms up code that both share
            rows.append((full_s, ours_s, answer.timing.load_s, len(ids), answer.usage.approximate_tokens))
    disk = engine.stats().disk
    assert disk is not None
    engine.close()
    full_, ours, load, tokens, moved = (statistics.mean(column) for column in zip(*rows, strict=True))
    return {
        "prompts": len(rows),
        "prompt tokens": tokens,
        "from disk": moved,
        "full, CPU s": full_,
        "ours, CPU s": ours,
        "sooner": full_ / ours,
        "worst": min(row[0] / row[1] for row in rows),
        "load, s": load,
        "files loaded": disk.loads,
    }


PARTS = {"bandwidth": bandwidth, "restart": restart, "ttft": ttft}
FRESH = {"restart": restarted, "ttft": answered}

if __name__ == "__main__":
    main()
