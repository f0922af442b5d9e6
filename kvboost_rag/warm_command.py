"""`kvboost-rag warm`: compute and store the KV of a folder of documents. Stopped anywhere, it goes on from there."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from .config import EngineConfig
from .engine import Engine
from .errors import ConfigError, KVBoostError
from .stats import WarmReport
from .store_command import bytes_of, text_of

PATTERNS = ("*.txt", "*.md", "*.rst")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
BITS = {"16": 16, "8": 8, "4": 4, "8/4": "8/4"}


def warm(arguments: Sequence[str]) -> int:
    """Run `kvboost-rag warm`.

    Returns:
        0 if every document is stored; 1 if some are not, which are named; 2 if nothing could be done; 130 if stopped.
    """
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _run(options), "stopped; what is stored stays, and the same command goes on from here")


def exit_status(run: Callable[[], int], stopped: str = "stopped") -> int:
    """What a command ends with: that of ``run``, 2 with one line that says what is wrong, or 130 if it is stopped."""
    try:
        return run()
    except (KVBoostError, OSError, ValueError) as error:  # transformers raises the last two
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvboost-rag warm", description="Compute and store the KV of documents.")
    parser.add_argument("folder", type=Path, help="text files, each one document; or one file")
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--store", type=Path, required=True, help="folder of stored KV, as in disk_path=…")
    parser.add_argument("--namespace", default="default", help="tenant that may use them")
    parser.add_argument(
        "--glob", action="append", help=f"names of documents, may be repeated (default: {', '.join(PATTERNS)})"
    )
    parser.add_argument("--context", default="", help="text that prompts have in front of their first document")
    parser.add_argument("--budget", default="16G", help="bytes that the store may take, like 500M or 16G")
    parser.add_argument("--kv-bits", choices=list(BITS), default="16", help="see EngineConfig.kv_bits")
    parser.add_argument("--reuse", choices=["approximate", "exact"], default="approximate")
    parser.add_argument("--ttl-s", type=float, help="seconds after which they are used no more")
    parser.add_argument("--dtype", default="auto", help="torch dtype of the model")
    parser.add_argument("--batch", type=int, default=16, help="documents that are encoded together and stored at once")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.batch < 1:
        raise ConfigError(f"--batch is {options.batch}; it must be 1 or more")
    check_dtype(options.dtype)
    paths = documents_in(options.folder, options.glob)
    config = EngineConfig(
        reuse=options.reuse,
        selector="query",  # nothing is repaired here, so there is nothing to calibrate
        disk_path=options.store,
        disk_budget_bytes=bytes_of(options.budget),
        kv_bits=BITS[options.kv_bits],  # type: ignore[arg-type]
        ttl_s=options.ttl_s,
        namespace=options.namespace,
    )
    started, totals, failed = time.perf_counter(), Counter[str](), list[str]()
    with (
        Engine.from_pretrained(options.model, dtype=options.dtype, config=config) as engine,
        tqdm(total=len(paths), desc="warming", unit="doc", disable=None, file=sys.stderr) as bar,
    ):
        for batch in _batches(paths, options.batch, failed):
            report = engine.warm([text for _, text in batch], context=options.context)
            totals.update(
                {name: getattr(report, name) for name in WarmReport.__dataclass_fields__ if name != "seconds"}
            )
            if report.rejected:
                failed.append(f"{report.rejected} of {batch[0][0]} … {batch[-1][0]} do not fit the budget")
            bar.update(len(batch))
        stats = engine.stats().disk
    assert stats is not None
    lost = totals["chunks"] - totals["on_disk"]
    if lost or totals["evicted"]:
        failed.append(
            f"{max(lost, totals['evicted'])} chunks are not stored for good"
            + (f": {stats.last_error}" if stats.last_error else "; raise --budget, or warm fewer documents")
        )
    _report(options, totals, failed, stats.stored_bytes, time.perf_counter() - started)
    return 1 if failed else 0


def _report(
    options: argparse.Namespace, totals: Counter[str], failed: Sequence[str], stored_bytes: int, seconds: float
) -> None:
    if options.json:
        print(json.dumps({**totals, "failed": list(failed), "store_bytes": stored_bytes, "seconds": seconds}, indent=1))
        return
    print(
        f"{totals['documents']} documents: {totals['computed']} computed, {totals['already_warm']} stored before, "
        f"{totals['too_short']} too short; {totals['tokens']} tokens in {totals['on_disk']} chunks written, "
        f"{seconds:.1f} s; the store takes {text_of(stored_bytes)}"
    )
    for line in failed:
        print(f"not stored: {line}", file=sys.stderr)


def check_dtype(name: str) -> None:
    """Refuse what `--dtype` does not take.

    Raises:
        ConfigError: names what it takes.
    """
    if name not in _DTYPES:
        raise ConfigError(f"--dtype is {name!r}; choose one of {', '.join(_DTYPES)}")


def documents_in(folder: Path, globs: Sequence[str] | None) -> list[Path]:
    """Text files of a folder by its `--glob`, or the one file.

    Raises:
        ConfigError: there are none.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder and no file")
    patterns = globs or PATTERNS
    for pattern in patterns:
        if not pattern.strip("./") or Path(pattern).is_absolute():
            raise ConfigError(f"--glob is {pattern!r}; give a pattern of names inside {folder}, such as *.txt")
    paths = sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()})
    if not paths:
        raise ConfigError(f"{folder} holds no file like {', '.join(patterns)}; name others with --glob")
    return paths


def texts_in(folder: Path, globs: Sequence[str] | None) -> list[str]:
    """The text of `documents_in`; bytes that are no UTF-8 are replaced.

    Raises:
        ConfigError: there are none.
    """
    return [path.read_text(encoding="utf-8", errors="replace") for path in documents_in(folder, globs)]


def _batches(paths: Sequence[Path], size: int, failed: list[str]) -> Iterator[list[tuple[Path, str]]]:
    """Documents that can be read, some at a time; what cannot be read is noted."""
    for begin in range(0, len(paths), size):
        batch = []
        for path in paths[begin : begin + size]:
            try:
                batch.append((path, path.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                failed.append(f"{path}: {error}")
        if batch:
            yield batch
