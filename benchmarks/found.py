"""How much of the documents in a prompt is found again: other order, other preamble, overlapping pieces. No model runs.

    python benchmarks/found.py --json results/found.json

Share of the documents' own tokens (each tokenised alone) that the index finds inside the rendered prompt. What is
missing are tokens at a document's edge that merge with what stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from common import default_model, markdown, write
from transformers import AutoTokenizer
from workload import PREAMBLES, Item, Passage, items, passages

from kvboost_rag.chunks import ChunkHeader, Scope, as_ids
from kvboost_rag.index import ChunkIndex
from kvboost_rag.prompts import PromptEncoder

SCOPE = Scope("benchmark", "default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder; only its tokenizer is loaded")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--docs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(args.model))
    pool = passages(lambda text: len(encoder.encode_text(text)))
    index = ChunkIndex()
    for passage in pool:
        ids = encoder.encode_text(passage.text)
        index.add(ChunkHeader.of(SCOPE, ids, base=0, history=as_ids([]), origin="warm"))
    rows = []
    made = items(pool, args.prompts, docs=args.docs, seed=args.seed)
    for name, change in (("other order and preamble", shifted), ("overlapping pieces", pieces)):
        shares = [share(encoder, index, change(item)) for item in made]
        rows.append({"scenario": name, "mean": statistics.fmean(shares), "least": min(shares)})
    print(markdown(("scenario", "mean", "least"), rows))
    write(args.json, vars(args), summary=rows)


def share(encoder: PromptEncoder, index: ChunkIndex, item: Item) -> float:
    """Tokens found in the item's prompt, as a share of its documents' tokens."""
    hits = index.match_runs(SCOPE, encoder.encode(item.messages()))
    found: int = sum(hit.length for hit in hits)
    return found / sum(len(encoder.encode_text(p.text)) for p in item.passages)


def shifted(item: Item) -> Item:
    return Item(PREAMBLES[-1], item.passages[::-1], item.question)


def pieces(item: Item) -> Item:
    """Each passage without its first third, as an overlapping splitter would cut it."""
    cut = tuple(Passage(p.name, p.text[len(p.text) // 3 :]) for p in item.passages)
    return Item(item.preamble, cut, item.question)


if __name__ == "__main__":
    main()
