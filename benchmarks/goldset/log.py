"""Results as JSON lines, one item a line. A set is written as a whole, so a run that stopped can go on behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class SettingsError(SystemExit):
    """A file holds results of other settings."""


def read(path: Path) -> list[dict[str, Any]]:
    """All items of a file; a last line that was cut off is left out.

    Raises:
        SettingsError: items were measured with different settings.
        ValueError: a line in the middle is no JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    items = [json.loads(line) for line in lines[:-1] if line]  # behind the last newline: nothing, or a torn line
    if items:
        same(path, items, items[0]["settings"])
    return items


def same(path: Path, items: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Refuse items that were measured with other settings.

    Raises:
        SettingsError: names what differs.
    """
    wanted = json.loads(json.dumps(settings))
    for item in items:
        if item["settings"] != wanted:
            names = sorted(
                name for name in wanted.keys() | item["settings"].keys()
                if wanted.get(name) != item["settings"].get(name)
            )  # fmt: skip
            differences = "; ".join(f"{n} {item['settings'].get(n)!r}, not {wanted.get(n)!r}" for n in names)
            raise SettingsError(f"{path} holds results of other settings: {differences}; choose another file")


def append(path: Path, items: Sequence[dict[str, Any]]) -> None:
    """Write a set's items for good, behind what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn(path)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
        file.flush()
        os.fsync(file.fileno())


def complete(items: Sequence[dict[str, Any]], per_set: int) -> tuple[list[dict[str, Any]], set[int]]:
    """Items of complete sets, and the numbers of those sets. What was measured again counts once, the last time."""
    sets: dict[int, dict[int, dict[str, Any]]] = {}
    for item in items:
        sets.setdefault(item["set"], {})[item["position"]] = item
    whole = {number: parts for number, parts in sets.items() if len(parts) == per_set}
    return [parts[at] for _, parts in sorted(whole.items()) for at in sorted(parts)], set(whole)


def _drop_torn(path: Path) -> None:
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
