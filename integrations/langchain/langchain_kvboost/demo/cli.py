"""The command `kvboost-rag demo`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import faiss  # noqa: F401 - langchain_community imports it only when it is used, after minutes
import torch
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document

from kvboost_rag import Engine, KVBoostError
from langchain_kvboost.chat_models import ChatKVBoost

from .assets import default_embeddings, default_model, python_documents_folder
from .compare import Comparison, Row, summarise
from .documents import load_passages, write_python_documents
from .embeddings import MeanPoolingEmbeddings
from .questions import ABOUT_PYTHON, questions_about, read_questions
from .report import print_row, print_table, write_json

DESCRIPTION = """\
Splits a folder of .txt and .md files, builds a FAISS index, warms every passage, asks questions through an ordinary
LangChain chain with the retrieved documents in ever differing orders, and compares with full recomputation."""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if it worked."""
    options = _parser().parse_args(arguments)
    try:
        run(options)
    except (KVBoostError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


def run(options: argparse.Namespace) -> list[Row]:
    """The demo from documents to table; the measured rows."""
    _set_threads(options.threads)
    model, embeddings = options.model or default_model(), options.embeddings or default_embeddings()
    folder = options.docs or write_python_documents(python_documents_folder())

    print(f"Loading {model}", flush=True)
    engine = Engine.from_pretrained(model, show_progress=True)
    passages = load_passages(folder, lambda text: len(engine.tokenizer(text, add_special_tokens=False)["input_ids"]))
    questions = _questions(options, passages)
    print(f"{len(passages)} passages in {folder}; building the FAISS index with {embeddings}", flush=True)
    index = FAISS.from_documents(passages, MeanPoolingEmbeddings(embeddings))

    print("Warming every passage; this happens once, when documents are ingested", flush=True)
    report = engine.warm([passage.page_content for passage in passages], show_progress=True)
    print(
        f"{report.chunks} chunks, {report.tokens} tokens, {report.stored_bytes / 2**20:.0f} MB of KV "
        f"in {report.seconds:.0f} s; {report.too_short} passages too short, {report.rejected} over the budget"
    )

    retriever = index.as_retriever(search_kwargs={"k": options.k})
    comparison = Comparison(retriever, ChatKVBoost(engine=engine, max_tokens=options.max_tokens))
    engine.generate("Ready?", reuse="off")  # the first run pays for lazy initialisation and must not be in a ratio
    rows: list[Row] = []
    for number, question in enumerate(questions, 1):
        rows.append(comparison.ask(question, reuse_first=number % 2 == 1))
        print_row(number, rows[-1])
    summary = summarise(rows)
    print_table(rows, summary)
    if options.json:
        write_json(options.json, rows, summary, _setting(options, model, embeddings, passages))
    engine.close()
    return rows


def _set_threads(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    elif torch.get_num_threads() > 1 and _load_average() >= (os.cpu_count() or 1):
        torch.set_num_threads(1)  # several wait whenever one has no core: up to ten times as long
        print("This machine is busy, so one torch thread is used; choose with --threads N")


def _load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none


def _questions(options: argparse.Namespace, passages: list[Document]) -> list[str]:
    if options.questions:
        return read_questions(options.questions)
    return questions_about(passages) if options.docs else list(ABOUT_PYTHON)


def _setting(options: argparse.Namespace, model: str, embeddings: str, passages: list[Document]) -> dict[str, Any]:
    return {
        "model": model,
        "embeddings": embeddings,
        "documents": str(options.docs) if options.docs else "Python's own documentation",
        "passages": len(passages),
        "k": options.k,
        "max_tokens": options.max_tokens,
        "torch_threads": torch.get_num_threads(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvboost-rag demo", description=DESCRIPTION)
    parser.add_argument("--model", help="Hugging Face id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--embeddings", help="embedding model, id or folder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--docs", type=Path, help="folder of .txt and .md files (default: Python's own documentation)")
    parser.add_argument("--questions", type=Path, help="file with one question per line")
    parser.add_argument("--max-tokens", type=_positive, default=48, help="longest answer, tokens (default: 48)")
    parser.add_argument("--k", type=_positive, default=6, help="documents per question (default: 6)")
    parser.add_argument("--threads", type=_positive, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
