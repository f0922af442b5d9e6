"""Debian package records: a committed fixture, so that every machine asks the same questions.

    python benchmarks/goldset/debian.py    # makes the fixture anew from this machine's dpkg status

Kept: first paragraph of the description, 20 to 55 words; one package per six leading letters; no name that gives its
version or maintainer away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FIXTURE = Path(__file__).parent / "fixtures" / "debian_records.json"
STATUS = Path("/var/lib/dpkg/status")
WORDS = (20, 55)
STEM = 6  # letters in which names differ
NOTICE = (
    "Package records of Debian 12 (name, summary, first paragraph of the description, version, maintainer, installed "
    "size) from the dpkg status file. Copyright of each text: the package's maintainers and upstream authors, under "
    "the licence in the package's debian/copyright; see https://sources.debian.org."
)


@dataclass(frozen=True)
class Record:
    """One package."""

    name: str
    summary: str
    description: str
    version: str
    maintainer: str
    size_kb: int


def load() -> list[Record]:
    """The fixture, in its order."""
    return [Record(**fields) for fields in json.loads(FIXTURE.read_text(encoding="utf-8"))["records"]]


def choose(status: str) -> list[Record]:
    """What is fit for questions, one package per stem, sorted by name."""
    chosen: dict[str, Record] = {}
    for record in _parse(status):
        words = len(record.description.split())
        if WORDS[0] <= words <= WORDS[1] and not _tells(record):
            chosen.setdefault(record.name[:STEM], record)
    return sorted(chosen.values(), key=lambda record: record.name)


def _tells(record: Record) -> bool:
    """Whether the name alone hints at a value: libfoo3 at version 3, adduser at the Adduser Developers."""
    numbers = set(re.findall(r"\d+", record.name))
    if len(record.name) < STEM or numbers & set(re.findall(r"\d+", record.version)):
        return True
    who = record.maintainer.lower()
    parts = [part.removeprefix("lib") for part in re.split(r"[^a-z]+", record.name)]
    bare = record.name.removeprefix("lib")
    named = any(len(part) >= 3 and part in who for part in parts) or record.name[:4] in who
    return named or any(bare.startswith(word) for word in re.findall(r"[a-z]+", who))  # x11-utils: Debian X …


def _parse(status: str) -> Iterator[Record]:
    for block in status.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line[:1] in (" ", "\t"):
                fields[name] += "\n" + line[1:]
            elif ":" in line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields.get("Status") != "install ok installed" or "Installed-Size" not in fields:
            continue
        summary, _, rest = fields["Description"].partition("\n")
        yield Record(
            name=fields["Package"],
            summary=summary,
            description=" ".join(rest.split("\n.\n")[0].split()),
            version=fields["Version"],
            maintainer=re.sub(r"\s*<.*", "", fields["Maintainer"]),
            size_kb=int(fields["Installed-Size"]),
        )


def main() -> None:
    records = choose(STATUS.read_text(encoding="utf-8"))
    lines = ",\n".join(json.dumps(asdict(record), ensure_ascii=False) for record in records)
    FIXTURE.write_text(f'{{"notice": {json.dumps(NOTICE)},\n"records": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(records)} records in {FIXTURE.name}")


if __name__ == "__main__":
    main()
