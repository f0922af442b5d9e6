"""`kvboost-rag trace`: analyze a log of prompts, replay a trace under every eviction policy, or make one up."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .analyze import command as analyze
from .errors import KVBoostError, TraceError
from .plots import plot
from .simulate import BOUND, CANDIDATES, Outcome, as_row, footprint_bytes, simulate
from .synthetic import WORKLOADS, Shape
from .tracing import Event, read_trace, write_trace

_SHAPE = Shape()
BUDGETS = ("5%", "10%", "20%", "40%")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NOTE = (
    "saved: seconds of prefill by the costs in the trace; belady: evicts what is asked for again latest, which is "
    "optimal only for chunks of one size and worth; bound: no policy can save more."
)


def trace(arguments: Sequence[str]) -> int:
    """Run `kvboost-rag trace`; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.what == "analyze":
            return analyze.run(options)
        if options.what == "make":
            return _make(options)
        return _simulate(options)
    except KVBoostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvboost-rag trace", description="Know before you switch it on.")
    what = parser.add_subparsers(dest="what", metavar="what", required=True)
    analyze.add_parser(what)
    run = what.add_parser("simulate", help="replay a trace through the store under every policy")
    run.add_argument("file", type=Path, help="a trace, as EngineConfig(trace_path=…) or `trace make` writes it")
    run.add_argument(
        "--budget",
        action="append",
        help="bytes (2G, 500M) or a share of all chunks (10%%); may be repeated (default: 5%%, 10%%, 20%%, 40%%)",
    )
    run.add_argument("--policy", action="append", choices=[*CANDIDATES, BOUND], help="only these; may be repeated")
    run.add_argument("--plot", type=Path, metavar="PNG", help="draw the outcomes (needs the extra `plots`)")
    run.add_argument("--json", action="store_true", help="print JSON instead of a table")
    make = what.add_parser("make", help="make up a trace of a known shape")
    make.add_argument("workload", choices=list(WORKLOADS))
    make.add_argument("file", type=Path, help="where to write it")
    make.add_argument("--requests", type=int, default=_SHAPE.requests)
    make.add_argument("--documents", type=int, default=_SHAPE.documents)
    make.add_argument("--per-request", type=int, default=_SHAPE.per_request, help="documents in each prompt")
    make.add_argument("--zipf", type=float, default=_SHAPE.zipf, help="exponent of the documents' popularity")
    make.add_argument("--seed", type=int, default=_SHAPE.seed)
    return parser


def _make(options: argparse.Namespace) -> int:
    shape = Shape(
        requests=options.requests,
        documents=options.documents,
        per_request=options.per_request,
        zipf=options.zipf,
        seed=options.seed,
    )
    events = list(WORKLOADS[options.workload](shape))
    try:
        write_trace(options.file, events, {"workload": options.workload, "seed": options.seed})
    except OSError as error:
        raise TraceError(f"{options.file} cannot be written: {error}; name a file in a folder") from error
    print(f"{options.file}: {len(events)} requests over {footprint_bytes(events):,} bytes of chunks")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    events = read_trace(options.file)
    footprint = footprint_bytes(events)
    if not footprint:
        raise TraceError(f"{options.file} holds no chunks, so there is nothing to replay")
    budgets = sorted({_budget(text, footprint) for text in options.budget or BUDGETS})
    outcomes = simulate(events, budgets, options.policy or (*CANDIDATES, BOUND))
    if options.plot:
        plot(outcomes, options.plot, title=_about(events, footprint), footprint_bytes=footprint)
    if options.json:
        print(
            json.dumps({"footprint_bytes": footprint, "outcomes": [as_row(outcome) for outcome in outcomes]}, indent=1)
        )
    else:
        print(f"{_about(events, footprint)}\n\n{table(outcomes, footprint)}\n\n{_NOTE}")
    return 0


def _about(events: Sequence[Event], footprint: int) -> str:
    requests = sum(event.op == "request" for event in events)
    tokens = sum(event.prompt_tokens for event in events)
    return f"{requests:,} requests, {tokens:,} prompt tokens, {footprint / (1 << 20):,.0f} MiB of chunks"


def table(outcomes: Sequence[Outcome], footprint: int) -> str:
    """Outcomes as Markdown, each budget's compared with its LRU."""
    lines = ["| budget | policy | hit rate | saved, s | against LRU |", "|---|---|---|---|---|"]
    lru = {outcome.budget_bytes: outcome.saved_s for outcome in outcomes if outcome.policy == "lru"}
    for outcome in outcomes:
        budget = f"{outcome.budget_bytes / (1 << 20):,.0f} MiB ({outcome.budget_bytes / footprint:.0%})"
        base = lru.get(outcome.budget_bytes, 0.0)
        against = f"{outcome.saved_s / base - 1:+.1%}" if base else ""
        lines.append(f"| {budget} | {outcome.policy} | {outcome.hit_rate:.1%} | {outcome.saved_s:,.1f} | {against} |")
    return "\n".join(lines)


def _budget(text: str, footprint: int) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise TraceError(f"--budget is {text!r}; give bytes such as 500M or 2G, or a share such as 10%")
    number, unit = float(found[1]), found[2].upper()
    return int(number * footprint / 100) if unit == "%" else int(number * _UNITS[unit])
