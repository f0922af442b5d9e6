"""A LangChain RAG chain over FAISS against `ChatHuggingFace` on the same weights, and warming against a plain forward.

Documents are pieces of about 1,000 characters. Each question's four documents come from FAISS and are put in another
order than they were ingested or asked before. CPU seconds of one thread, arms of a question one after the other:

- ours: from the call of the chain to the first streamed piece of `ChatKVBoost`;
- full: `ChatHuggingFace` over the same model object, one new token (its own stream shows its first piece later, when a
  word is complete).

    python benchmarks/langchain_chain.py --questions 20 --json results/langchain_chain.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import cpu_seconds, default_model, load_engine, machine, markdown, percentile, reused_in, write
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import pipeline
from workload import PREAMBLES, QUESTIONS, passages

from kvboost_rag import Engine
from langchain_kvboost import ChatKVBoost, warm_documents
from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings

PROMPT = ChatPromptTemplate.from_messages([("system", PREAMBLES[0]), ("human", "{context}\n\nQuestion: {question}")])
BATCH = 8  # documents of one plain batched forward
COLUMNS = ("figure", "aim", "measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--embeddings", default=str(Path(default_model()).with_name("all-minilm-l6-v2")))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--documents", type=int, default=200, help="pieces in the store")
    parser.add_argument("--k", type=int, default=4, help="documents per question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    engine = load_engine(args.model, args.dtype, fallback=True)
    documents = pieces(engine, args.documents, rng)
    store = FAISS.from_documents(documents, MeanPoolingEmbeddings(args.embeddings))
    rows: list[dict[str, Any]] = [*warming(engine, documents)]
    asked = [ask(engine, store, documents, args.k, number, rng) for number in range(-1, args.questions)][1:]
    rows += summary(asked, args.k)
    print(markdown(COLUMNS, rows))
    print(f"\n`{' '.join(sys.argv)}` on {machine()}")
    write(args.json, vars(args), summary=rows, questions=asked)


def pieces(engine: Engine, count: int, rng: random.Random) -> list[Document]:
    """Documents of about 1,000 characters, in random order."""
    pool = passages(lambda text: len(engine.tokenizer(text).input_ids), low=220, high=2000)
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
    whole = [Document(passage.text, metadata={"title": passage.name}) for passage in pool]
    found = [piece for piece in splitter.split_documents(whole) if len(piece.page_content) > 800]
    rng.shuffle(found)
    return found[:count]


def warming(engine: Engine, documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Tokens per CPU second of warming against a plain batched forward over the same documents, interleaved."""
    engine.warm(documents[0].page_content * 2, namespace="first call")  # allocations of the first pass
    ours = plain = tokens = 0.0
    for start in range(0, len(documents), 3 * BATCH):
        part = documents[start : start + 3 * BATCH]
        seconds, report = cpu_seconds(lambda part=part: warm_documents(engine, part))
        ours += seconds
        tokens += report.tokens
        for batch in (part[at : at + BATCH] for at in range(0, len(part), BATCH)):
            plain += cpu_seconds(lambda batch=batch: forward(engine, batch))[0]
    again = warm_documents(engine, documents)
    return [
        {"figure": "warming / plain batched forward, tokens per CPU second", "aim": 0.9, "measured": plain / ours},
        {"figure": "tokens per CPU second, warming", "aim": "–", "measured": tokens / ours},
        {"figure": "documents computed in a second pass", "aim": 0, "measured": again.computed},
    ]


@torch.inference_mode()
def forward(engine: Engine, documents: Sequence[Document]) -> None:
    """A plain forward over a padded batch, keeping its cache."""
    tokenizer = engine.tokenizer
    ids = [tokenizer(document.page_content, add_special_tokens=False).input_ids for document in documents]
    width = max(map(len, ids))
    batch = torch.zeros((len(ids), width), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, tokens in enumerate(ids):
        batch[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    engine.model(input_ids=batch, attention_mask=mask, use_cache=True, logits_to_keep=1)


def ask(
    engine: Engine, store: FAISS, documents: Sequence[Document], k: int, number: int, rng: random.Random
) -> dict[str, float]:
    """One question through both chat models."""
    title = rng.choice(documents).metadata["title"]
    question = QUESTIONS[number % len(QUESTIONS)].format(name=title)
    found = store.similarity_search(question, k=k)
    rng.shuffle(found)
    given = {"context": "\n\n".join(document.page_content for document in found), "question": question}
    ours = PROMPT | ChatKVBoost(engine=engine, max_tokens=1)
    generator = pipeline(
        "text-generation", model=engine.model, tokenizer=engine.tokenizer, max_new_tokens=1, do_sample=False
    )
    full = PROMPT | ChatHuggingFace(llm=HuggingFacePipeline(pipeline=generator))
    arms: dict[str, Any] = {"ours": lambda: next(iter(ours.stream(given))), "full": lambda: full.invoke(given)}
    prefill = engine.prefill(
        [
            {"role": "user" if m.type == "human" else m.type, "content": m.content}
            for m in PROMPT.format_messages(**given)
        ],
        store=False,
    )
    covered, total = document_tokens(engine, prefill, [document.page_content for document in found])
    usage = prefill.usage
    row: dict[str, float] = {}
    for arm in rng.sample(sorted(arms), 2):
        row[arm], _ = cpu_seconds(arms[arm])
    return {
        **row, "speedup": row["full"] / row["ours"], "document_tokens": total, "reused": covered,
        "prompt_tokens": usage.prompt_tokens, "computed_tokens": usage.computed_tokens,
        "fallback": float(prefill.fallback_reason is not None),
    }  # fmt: skip


def document_tokens(engine: Engine, prefill: Any, texts: Sequence[str]) -> tuple[int, int]:
    """How many tokens of the documents were reused, and how many there are."""
    text, count = reused_in(engine, prefill)
    counts = [count(at := text.index(document), at + len(document)) for document in texts]
    return sum(covered for covered, _ in counts), sum(total for _, total in counts)


def summary(asked: Sequence[dict[str, float]], k: int) -> list[dict[str, Any]]:
    """The issue's figures."""
    speedups = [row["speedup"] for row in asked]
    shares = [row["reused"] / row["document_tokens"] for row in asked]
    return [
        {
            "figure": f"TTFT, ChatHuggingFace / ours, median, {k} documents",
            "aim": 5.0,
            "measured": statistics.median(speedups),
        },
        {"figure": "the same, p5", "aim": "–", "measured": percentile(speedups, 0.05)},
        {
            "figure": "TTFT of ChatHuggingFace, median CPU s",
            "aim": "–",
            "measured": statistics.median(r["full"] for r in asked),
        },
        {"figure": "TTFT of ours, median CPU s", "aim": "–", "measured": statistics.median(r["ours"] for r in asked)},
        {"figure": "document tokens reused, mean", "aim": 0.95, "measured": statistics.mean(shares)},
        {"figure": "document tokens reused, least", "aim": "–", "measured": min(shares)},
        {"figure": "prompt tokens, mean", "aim": "–", "measured": statistics.mean(r["prompt_tokens"] for r in asked)},
        {"figure": "tokens run, mean", "aim": "–", "measured": statistics.mean(r["computed_tokens"] for r in asked)},
        {"figure": "questions computed instead (fallback)", "aim": "–", "measured": sum(r["fallback"] for r in asked)},
    ]


if __name__ == "__main__":
    main()
