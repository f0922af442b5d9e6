"""`kvboost-rag store`: look at a folder of stored KV, check it and mend it. Loads no model."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .errors import ConfigError, KVBoostError
from .store import Row, StoreView, collect, rebuild, verify

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def store(arguments: Sequence[str]) -> int:
    """Run `kvboost-rag store`.

    Returns:
        0; 1 if `verify` or `rebuild` found damage; 2 if the folder cannot be used.
    """
    options = _parser().parse_args(arguments)
    try:
        done: int = options.run(options)
    except (KVBoostError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvboost-rag store", description="Look at, check and mend a folder of stored KV.")
    what = parser.add_subparsers(metavar="what", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = what.add_parser(name, help=about, description=about)
        command.add_argument("folder", type=Path, help="the store, as in disk_path=… or --store")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        return command

    add("ls", _ls, "list the entries").add_argument("--namespace", help="only those of this tenant")
    add("stats", _stats, "count entries, tokens and bytes of each tenant and model")
    add("verify", _verify, "read every entry and compare its checksum and its ids; changes nothing")
    gc = add("gc", _gc, "remove what nobody can use: leftovers of dead writers, entries whose time is over")
    gc.add_argument("--drop-bad", action="store_true", help="verify first, and remove damaged entries as well")
    add("rebuild", _rebuild, "make the catalogue anew from the files; nobody may use the store meanwhile")
    return parser


def _ls(options: argparse.Namespace) -> int:
    with StoreView(options.folder) as view:
        entries = [_entry(row) for row in view.rows(options.namespace)]
    if options.json:
        print(json.dumps(entries, indent=1))
        return 0
    columns = ("name", "namespace", "model", "tokens", "size", "codec", "origin", "stored", "expires", "uses")
    rows = [[_cell(name, entry) for name in columns] for entry in entries]
    _table(columns, rows)
    return 0


def _stats(options: argparse.Namespace) -> int:
    with StoreView(options.folder) as view:
        counts, total_bytes, rows = view.counts(), view.total_bytes(), view.rows()
    groups: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        scope = row.header.scope
        group = groups.setdefault((scope.namespace, scope.fingerprint, row.codec), Counter())
        group.update(chunks=1, tokens=len(row.header), nbytes=row.nbytes, uses=row.uses)
    listed = [
        {"namespace": space, "fingerprint": mark, "codec": codec, **group}
        for (space, mark, codec), group in groups.items()
    ]
    if options.json:
        print(json.dumps({**counts, "total_bytes": total_bytes, "scopes": listed}, indent=1))
        return 0
    print(
        f"{counts['stored']} chunks in {text_of(total_bytes)}; {counts['writing']} being written, "
        f"{counts['doomed']} deleted and still read by somebody, {counts['newer']} of a newer version"
    )
    columns = ("namespace", "model", "codec", "chunks", "tokens", "size", "uses")
    _table(columns, [[_cell(name, group) for name in columns] for group in listed])
    return 0


def _verify(options: argparse.Namespace) -> int:
    with _bar("verifying") as progress:
        report = verify(options.folder, progress=progress)
    found = {"intact": report.intact, "newer": report.newer, "missing": report.missing, "bad": report.bad}
    found["unreadable"] = report.unreadable
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{report.intact} intact, {len(report.bad)} damaged, {len(report.missing)} missing, {report.newer} newer")
        for name, reason in report.bad.items():
            print(f"  {name}: {reason}")
        for name in report.missing:
            print(f"  {name}: its file is gone")
        for name, reason in report.unreadable.items():
            print(f"  {name}: it cannot be read, and was left alone: {reason}")
        if report.bad or report.missing:
            print(f"remove them with: kvboost-rag store gc --drop-bad {options.folder}")
    return 1 if report.bad or report.missing or report.unreadable else 0


def _gc(options: argparse.Namespace) -> int:
    drop = None
    if options.drop_bad:
        with _bar("verifying") as progress:
            drop = verify(options.folder, progress=progress)
    done = collect(options.folder, drop=drop)
    if options.json:
        print(json.dumps(done, indent=1))
    else:
        print(
            f"removed {done['unfinished']} unfinished, {done['expired']} expired, {done['wiped']} deleted, "
            f"{done['bad']} damaged or missing entries and {done['orphans']} files without an entry"
        )
    return 0


def _rebuild(options: argparse.Namespace) -> int:
    with _bar("reading") as progress:
        report = rebuild(options.folder, progress=progress)
    found = {"intact": report.intact, "newer": report.newer, "removed": report.removed, "bad": report.bad}
    found["unreadable"] = report.unreadable
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{report.intact} entries found again; {len(report.bad)} damaged and {report.removed - len(report.bad)} "
            f"unfinished ones removed, {report.newer} of a newer version left alone"
        )
        for name, reason in report.unreadable.items():
            print(f"  {name}: it cannot be read, and was left alone: {reason}; rebuild again when it can")
    return 1 if report.bad or report.unreadable else 0


class _bar:
    """A progress bar on stderr, where there is a terminal."""

    def __init__(self, what: str) -> None:
        self._bar = tqdm(desc=what, unit="entry", disable=None, file=sys.stderr)

    def __enter__(self) -> Callable[[int, int], None]:
        return self._show

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def _show(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)


def _entry(row: Row) -> dict[str, Any]:
    header = row.header
    return {
        "name": row.name,
        "key": header.key,
        "namespace": header.scope.namespace,
        "fingerprint": header.scope.fingerprint,
        "tokens": len(header),
        "base": header.base,
        "exact": header.exact,
        "nbytes": row.nbytes,
        "codec": row.codec,
        "origin": header.origin,
        "created": row.created,
        "expires": row.expires,
        "uses": row.uses,
        "format": row.format,
    }


def _cell(name: str, entry: dict[str, Any]) -> str:
    if name == "size":
        return text_of(entry["nbytes"])
    if name == "model":
        return str(entry["fingerprint"])[:8]
    if name == "stored":
        return _when(entry["created"])
    if name == "expires":
        return "never" if entry["expires"] is None else _when(entry["expires"])
    return str(entry[name])


def _when(seconds: float) -> str:
    day = datetime.fromtimestamp(seconds)
    return day.strftime("%H:%M:%S" if abs(time.time() - seconds) < 43200 else "%Y-%m-%d")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def text_of(nbytes: int) -> str:
    """A number of bytes for people."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def bytes_of(text: str) -> int:
    """A number of bytes as people write it: 2G, 500M, 4096.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is no number of bytes; write it like 2G, 500M or 4096")
    return int(float(found[1]) * _UNITS[found[2].upper()])
