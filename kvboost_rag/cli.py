"""The command line. Commands that need an integration are found by name, so the engine imports none of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

COMMANDS = "kvboost_rag.commands"  # group of entry points; each takes a list of arguments and returns an exit status


def main(arguments: list[str] | None = None) -> int:
    """Run `kvboost-rag`; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    found = {point.name: point for point in entry_points(group=COMMANDS)}
    parser = argparse.ArgumentParser("kvboost-rag", description="Reuse the KV of retrieved documents.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    check = commands.add_parser("check", help="load a model, verify it, and say how it can be served")
    check.add_argument("model", help="Hugging Face id or folder")
    for name in sorted(found):
        commands.add_parser(name, help=f"see kvboost-rag {name} --help", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command in found:
        return _run_found(found[options.command], rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _check(options.model)


def _run_found(point: EntryPoint, arguments: list[str]) -> int:
    try:
        command: Callable[[list[str]], int] = point.load()
    except ModuleNotFoundError as error:
        print(
            f"error: `kvboost-rag {point.name}` needs the package {error.name!r}; "
            f"install it with: pip install 'kvboost-rag[{point.name}]'",
            file=sys.stderr,
        )
        return 1
    return command(arguments)


def _check(model: str) -> int:
    raise NotImplementedError(model)
