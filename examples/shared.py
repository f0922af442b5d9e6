"""What the examples share: which model, which documents, where pictures go. Nothing in here is part of kvboost-rag.

KVBOOST_MODEL  Hugging Face id or folder of the model   (SmolLM2-135M-Instruct; the copy that `make demo` fetched)
KVBOOST_DOCS   folder of your own .txt and .md files    (Python's documentation of itself)
--out FOLDER   where a script writes its picture        (the current folder)
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PASSAGE_CHARACTERS = 1000
SUBJECTS = (
    "assert booleans break class comparisons context-managers continue del dict else exceptions floating for function "
    "global if import in lambda lists naming nonlocal objects pass raise return slicings strings subscriptions truth "
    "try typesmapping typesseq while with yield"
).split()
KINDS = (
    ("exact", "exact: as a full prefill would give", "#1d4ed8"),
    ("moved", "approximate: moved", "#34d399"),
    ("repaired", "approximate: moved and repaired", "#047857"),
    ("new", "new: computed", "#9ca3af"),
)


def model() -> str:
    """The model that was named, else the copy that `make` has fetched, else its id on the hub."""
    cache = os.environ.get("KVBOOST_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvboost-rag"
    fetched = Path(cache).expanduser() / "models" / "smollm2-135m-instruct"
    return os.environ.get("KVBOOST_MODEL") or (str(fetched) if (fetched / "config.json").is_file() else MODEL_ID)


def passages(count: int) -> dict[str, str]:
    """So many passages of about 200 tokens, by subject: of your folder, or of Python's documentation of itself."""
    folder = os.environ.get("KVBOOST_DOCS")
    if not folder:
        found = {subject: _beginning(topics.get(subject, "")) for subject in SUBJECTS}
    else:
        files = [path for path in sorted(Path(folder).rglob("*")) if path.suffix in (".txt", ".md")]
        found = {path.stem: _beginning(path.read_text(encoding="utf-8", errors="replace")) for path in files}
    chosen = [(subject, text) for subject, text in found.items() if len(text) > 300][:count]
    if len(chosen) < count:
        sys.exit(f"{len(chosen)} documents of 300 characters and more, {count} are needed; add some to {folder}")
    return dict(chosen)


def _beginning(text: str) -> str:
    """Whole paragraphs from the start of a text, without grammar."""
    kept = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if len(kept) + len(paragraph) <= PASSAGE_CHARACTERS and "::=" not in paragraph:
            kept += paragraph.rstrip() + "\n\n"
    return kept.strip()


def word_vector(text: str, size: int = 1024) -> list[float]:
    """An embedding that needs no model: which words a text has. Take a real one for real work."""
    vector = [0.0] * size
    for word in set(re.findall(r"[a-z]{4,}", text.lower())):
        vector[zlib.crc32(word.encode()) % size] = 1.0
    length = math.sqrt(sum(vector)) or 1.0
    return [value / length for value in vector]


def kvboost_rag(*arguments: object) -> str:
    """Run the command line `kvboost-rag` of this environment, in a process of its own; what it prints."""
    command = Path(sysconfig.get_path("scripts")) / "kvboost-rag"
    return subprocess.run([command, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout


def draw_kinds(axes: Any, labels: Sequence[str], usages: Sequence[Mapping[str, int]]) -> None:
    """Bars of prompt tokens by kind of hit, one for each request, from the fields of `kvboost_rag.Usage`."""
    bottom = [0] * len(usages)
    for kind, label, colour in KINDS:
        heights = [_of_kind(kind, usage) for usage in usages]
        axes.bar(range(len(usages)), heights, 0.7, bottom=bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(usages)), labels)
    axes.set_ylabel("prompt tokens")
    axes.set_ylim(0, 1.32 * max(bottom))
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")


def _of_kind(kind: str, usage: Mapping[str, int]) -> int:
    exact, approximate, repaired = (usage[f"{name}_tokens"] for name in ("exact", "approximate", "repaired"))
    new = usage["prompt_tokens"] - exact - approximate
    return {"exact": exact, "moved": approximate - repaired, "repaired": repaired, "new": new}[kind]


def save(figure: Any, name: str) -> None:
    """Write the picture of a script; a notebook shows it by itself."""
    if "ipykernel" in sys.modules:
        return
    parser = argparse.ArgumentParser(description=f"Runs the example and writes {name}.")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture (default: the current one)")
    path = parser.parse_args().out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"picture: {path}")
