"""How often the words of a question tell which passage it is about, and how often rightly.

Questions of `gold.py`'s workloads with a short passage, and follow-ups behind its conversations, which name none:
right is then the passage that was asked about before. No model runs: only its tokenizer is loaded.

    python benchmarks/asked.py --json results/asked.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import bar, default_model, markdown, write
from goldset.bugs import Bugs
from goldset.questions import Question, Workload
from goldset.records import Conversations, Records, split_passages

from kvboost_rag.chunks import IntArray
from kvboost_rag.hf import load_tokenizer
from kvboost_rag.planner import Plan, Segment
from kvboost_rag.prompts import PromptEncoder
from kvboost_rag.question import read
from kvboost_rag.repair import Recipe, Run, most_whole, named_runs

FOLLOW_UPS = (
    "And its size?",
    "Why?",
    "Tell me more.",
    "Thanks! What about the other one?",
    "Can you summarise that in one sentence?",
    "Who wrote it?",
    "How does this work then?",
    "Are you sure about that?",
    "Please answer in German.",
    "What else should I know before I install it?",
    "Which of them is the largest?",
    "List all of them in a table.",
    "OK, and what does that mean for me?",
    "Could you explain it in simpler words?",
)
NO_MATTER = -1
COLUMNS = ("workload", "questions", "told", "rightly")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder; only its tokenizer is loaded")
    parser.add_argument("--items", type=int, default=200, help="questions of a workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer, _ = load_tokenizer(args.model)
    encoder = PromptEncoder(tokenizer)
    rows = []
    for name, workload in workloads(tokenizer, encoder, args.seed).items():
        pairs = list(prompts(workload, args.items, name == "follow-ups"))
        read_ones = [(gold_of(pair[0]), named(encoder, *pair)) for pair in bar(pairs, name)]
        told = [(gold, found) for gold, found in read_ones if found is not None]
        known = [(gold, found) for gold, found in told if found != NO_MATTER]
        rows.append(
            {
                "workload": name,
                "questions": len(read_ones) - (len(told) - len(known)),
                "told": len(known),
                "rightly": sum(gold == found for gold, found in known),
            }
        )
    print(markdown(COLUMNS, rows))
    print(f"\n`{' '.join(sys.argv)}`")
    write(args.json, vars(args), rows=rows)


def workloads(tokenizer: Any, encoder: PromptEncoder, seed: int) -> dict[str, Workload]:
    """All of them by name."""
    return {
        "records": Records(per_set=2, seed=seed),
        "split records": Records(per_set=2, seed=seed, passages=split_passages),
        "conversations": Conversations(per_set=4, seed=seed),
        "bugs": Bugs(
            lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
            lambda messages: len(encoder.encode(messages)),
            per_set=2,
            seed=seed,
        ),
        "follow-ups": Conversations(per_set=4, seed=seed),
    }


def prompts(workload: Workload, items: int, follow: bool) -> Iterator[tuple[Question, list[dict[str, str]]]]:
    """Questions and their messages; of follow-ups each behind the turn before it, answered rightly."""
    count = number = 0
    while count < items:
        for question in workload.questions(number):
            turns = [{"role": "assistant", "content": question.answer}, {"role": "user", "content": ""}]
            for text in FOLLOW_UPS if follow else ("",):
                messages = question.messages()
                yield question, [*messages, turns[0], {**turns[1], "content": text}] if follow else messages
            count += 1
        number += 1


def gold_of(question: Question) -> int:
    """The passage that a question is about: the one that begins with what it names, or holds the right option."""
    documents = question.all_documents
    said = [
        (len(name), i) for i, name in enumerate(text.split(":")[0] for text in documents) if name in question.question
    ]
    return max(said)[1] if said else next(i for i, t in enumerate(documents) if question.options[question.gold] in t)


def named(encoder: PromptEncoder, question: Question, messages: list[dict[str, str]]) -> int | None:
    """The passage that words tell; None if they do not, `NO_MATTER` where all passages are long."""
    ids = encoder.encode(messages)
    runs = list(places(ids, [encoder.encode_text(text) for text in question.all_documents]))
    segments = [Segment("compute", 0, runs[0].start)]
    for run, end in zip(runs, [*(run.start for run in runs[1:]), len(ids)], strict=True):
        segments += [Segment("approximate", run.start, run.end, "moved")]
        segments += [Segment("compute", run.end, end)] if end > run.end else []
    asked = read(ids, Plan(len(ids), tuple(segments), tuple(runs)), Recipe(), encoder.tokens).asked
    if not most_whole(Recipe(), runs):
        return NO_MATTER
    return None if asked is None or named_runs(Recipe(), runs, asked) is None else int(asked.repeats.argmax())


def places(ids: IntArray, documents: Sequence[IntArray]) -> Iterator[Run]:
    """Where documents stand in a prompt, in their order; what merges with its surroundings at their ends is theirs."""
    at = 0
    for document in documents:
        core = document[1:-1]
        windows = np.lib.stride_tricks.sliding_window_view(ids[at:], len(core))
        start = at + int(np.flatnonzero((windows == core).all(1))[0])
        yield Run(start - 1, start + len(core) + 1, mean=True)
        at = start + len(core)


if __name__ == "__main__":
    main()
