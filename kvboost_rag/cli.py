"""The command line. Commands that need an integration are found by name, so the engine imports none of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from .bench_command import bench
from .config import EngineConfig, KVBits, Reuse
from .engine import Engine
from .errors import KVBoostError, MissingExtraError, UnsupportedModelError
from .store_command import store
from .trace_command import trace
from .transfer_command import transfer
from .warm_command import warm

COMMANDS = "kvboost_rag.commands"  # group of entry points; each takes a list of arguments and returns an exit status
OWN: dict[str, Callable[[list[str]], int]] = {
    "warm": warm,
    "bench": bench,
    "store": store,
    "trace": trace,
    "transfer": transfer,
}
CODECS: tuple[KVBits, ...] = (8, "8/4", 4)
MODES: tuple[Reuse, ...] = ("approximate", "exact", "off")


def main(arguments: list[str] | None = None) -> int:
    """Run `kvboost-rag`; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    found = {point.name: point for point in entry_points(group=COMMANDS)}
    parser = argparse.ArgumentParser("kvboost-rag", description="Reuse the KV of retrieved documents.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    check = commands.add_parser("check", help="load a model, verify it, and say how it can be served")
    check.add_argument("model", help="Hugging Face id or folder")
    commands.add_parser("warm", help="compute and store the KV of a folder of documents", add_help=False)
    commands.add_parser("bench", help="measure speed and fidelity on a model and documents of your own", add_help=False)
    commands.add_parser("store", help="look at, check and mend a folder of stored KV", add_help=False)
    commands.add_parser("trace", help="say what a log of prompts would gain; replay or make traces", add_help=False)
    commands.add_parser("transfer", help="map the KV of one model into that of another of its family", add_help=False)
    for name in sorted(found):
        commands.add_parser(name, help=f"see kvboost-rag {name} --help", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command in found:
        return _run_found(found[options.command], rest)
    if options.command in OWN:
        return OWN[options.command](rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _check(options.model)


def _run_found(point: EntryPoint, arguments: list[str]) -> int:
    try:
        command: Callable[[list[str]], int] = point.load()
    except ImportError as error:
        if not error.name:
            raise
        missing = MissingExtraError(f"`kvboost-rag {point.name}`", error, extra=point.name)
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return command(arguments)


def _check(model: str) -> int:
    """Load a model in the widest mode that serves it, and print what the self-check measured."""
    for reuse in MODES:
        try:
            engine = Engine.from_pretrained(model, config=EngineConfig(reuse=reuse), show_progress=True)
        except UnsupportedModelError as error:
            print(f"reuse={reuse!r}: no. {error}")
        except KVBoostError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        else:
            print(f"reuse={reuse!r}: yes. {_figures(engine)}", flush=True)
            engine.close()
            if getattr(engine.tokenizer, "chat_template", None) is None:
                print("no chat template: prompts must be strings, not messages")
            if reuse == "approximate":
                _check_codecs(engine)
            return 0
    print(f"{model} cannot be served", file=sys.stderr)
    return 1


def _check_codecs(engine: Engine) -> None:
    """Print which codecs the model can bear."""
    print("measuring what fewer bits per number would lose: some minutes the first time", flush=True)
    for bits in CODECS:
        try:
            config = EngineConfig(kv_bits=bits, selector="query", fallback=False)
            with Engine(engine.model, engine.tokenizer, config) as encoded:
                check = encoded.codec_check
        except UnsupportedModelError as error:
            print(f"kv_bits={bits!r}: no. {error}")
        else:
            assert check is not None
            print(
                f"kv_bits={bits!r}: yes. It takes {check.loss:.1e} of what documents change in an answer; the limit is "
                f"{check.limit:g}",
                flush=True,
            )


def _figures(engine: Engine) -> str:
    checked = engine.checked
    if checked is None:
        return "Nothing to check."
    layouts = ", ".join(sorted(set(checked.layouts))) or "none needed"
    return (
        f"{type(engine.model).__name__}; rotary layout: {layouts}; largest relative errors: keys moved "
        f"{checked.move_error:.1e}, values {checked.value_error:.1e}, logits {checked.logit_error:.1e}; "
        f"the limit is {checked.tolerance:g}"
    )
