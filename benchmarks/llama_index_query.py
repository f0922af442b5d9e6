"""LlamaIndex's query and chat engines over reordered nodes: reuse, first token, fidelity, event loop.

Nodes are pieces of about 1,000 characters, ingested once with `warm_nodes`. Every question gets four of them in an
order that no prompt had before.

- layouts: share of the nodes' tokens that were reused, per synthesizer and chat engine, in the first query or turn and
  when the same nodes come again in another order with another question;
- TTFT on `compact`: CPU seconds to the first streamed piece of `KVBoost` against one new token of `HuggingFaceLLM`
  over the same model object, arms of a question one after the other;
- fidelity on `compact`: 1 - mean KL along the full answer / mean KL without nodes;
- stall: the longest time the event loop did not turn while answers were generated, wall clock.

    python benchmarks/llama_index_query.py --questions 20 --json results/llama_index_query.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import (
    cpu_seconds,
    default_model,
    divergence,
    load_engine,
    log_probs_along,
    machine,
    markdown,
    percentile,
    reused_in,
    write,
)
from llama_index.core import get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT_TMPL
from llama_index.core.schema import Document, NodeWithScore, QueryBundle
from llama_index.llms.huggingface import HuggingFaceLLM
from workload import QUESTIONS, passages

from kvboost_rag import Engine, SamplingParams
from llama_index.llms.kvboost import KVBoost, configure_settings, warm_nodes

LAYOUTS = (
    "compact",
    "tree_summarize",
    "refine",
    "accumulate",
    "simple_summarize",
    "simple_summarize, joined",
    "context",
    "condense_plus_context",
)
# `simple_summarize` formats a list into its prompt: Python's repr, with quotes and escaped line ends.
JOINED = PromptTemplate(
    DEFAULT_TEXT_QA_PROMPT_TMPL, function_mappings={"context_str": lambda context_str, **_: "\n".join(context_str)}
)
CHATS = {"context": ContextChatEngine, "condense_plus_context": CondensePlusContextChatEngine}
ENDS = 40  # characters by which a node is found in a prompt that may have rewritten its middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=20, help="of TTFT and fidelity")
    parser.add_argument("--layout-questions", type=int, default=4, help="per layout")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--nodes", type=int, default=96, help="ingested")
    parser.add_argument("--k", type=int, default=4, help="nodes per question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    engine = load_engine(args.model, args.dtype, fallback=True)
    llm = configure_settings(KVBoost(engine=engine, max_tokens=32))
    nodes = pieces(engine, args.nodes, rng)
    warm_nodes(engine, nodes, show_progress=True)
    tables: dict[str, list[dict[str, Any]]] = {"layouts": [], "figures": []}
    asked: list[dict[str, float]] = []
    for layout in args.layouts:
        tables["layouts"].append(reuse_of_layout(llm, layout, nodes, args.k, args.layout_questions, rng))
        print(tables["layouts"][-1], file=sys.stderr)
    if args.questions:
        asked = [ask(llm, nodes, args.k, number, rng) for number in range(-1, args.questions)][1:]
        stalls = asyncio.run(stalled(llm, [question(nodes, args.k, n, rng) for n in range(3)]))
        tables["figures"] = summary(asked, stalls, args.k)
    for rows in tables.values():
        if rows:
            print(markdown(tuple(rows[0]), rows), end="\n\n")
    print(f"`{' '.join(sys.argv)}` on {machine()}")
    write(args.json, vars(args), **tables, questions=asked)


def pieces(engine: Engine, count: int, rng: random.Random) -> list[Any]:
    """Nodes of about 1,000 characters, in random order."""
    pool = passages(lambda text: len(engine.tokenizer(text).input_ids), low=220, high=2000)
    documents = [Document(text=passage.text, metadata={"title": passage.name}) for passage in pool]
    splitter = SentenceSplitter(chunk_size=260, chunk_overlap=0)
    found = [node for node in splitter.get_nodes_from_documents(documents) if len(node.text) > 700]
    rng.shuffle(found)
    return found[:count]


def question(nodes: Sequence[Any], k: int, number: int, rng: random.Random) -> tuple[str, list[NodeWithScore]]:
    """A question and its nodes, in a new order."""
    found = rng.sample(list(nodes), k)
    words = QUESTIONS[number % len(QUESTIONS)].format(name=found[-1].metadata["title"])
    return words, [NodeWithScore(node=node, score=1.0) for node in found]


class Fixed(BaseRetriever):
    """Gives the nodes that it was told to give."""

    def __init__(self) -> None:
        self.nodes: list[NodeWithScore] = []
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes


class Calls(BaseEventHandler):
    """Notes the messages of every call of a model, before it runs; none for a completion."""

    seen: list[Callable[[list[ChatMessage]], None]]

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, (LLMChatStartEvent, LLMCompletionStartEvent)):
            for note in self.seen:
                note(event.messages if isinstance(event, LLMChatStartEvent) else [])


@contextmanager
def watching(note: Callable[[list[ChatMessage]], None]) -> Iterator[None]:
    dispatcher = get_dispatcher()
    handler = Calls(seen=[note])
    dispatcher.add_event_handler(handler)
    try:
        yield
    finally:
        dispatcher.event_handlers.remove(handler)


def reuse_of_layout(
    llm: KVBoost, layout: str, nodes: Sequence[Any], k: int, count: int, rng: random.Random
) -> dict[str, Any]:
    """How many of the nodes' tokens are reused, at first and when they come again in another order."""
    first, second = Tally(llm), Tally(llm)
    for number in range(count):
        words, found = question(nodes, k, number, rng)
        run = runner(llm, layout)
        with watching(first.of(found)):
            run(words, found)
        words = QUESTIONS[(number + 1) % len(QUESTIONS)].format(name=found[0].metadata["title"])
        with watching(second.of(found)):
            run(words, rng.sample(found, k))
    return {
        "layout": layout,
        "calls": second.calls / count,
        "nodes verbatim": second.verbatim / max(second.nodes, 1),
        "reused at first": first.reused / max(first.tokens, 1),
        "reused, reordered": second.reused / max(second.tokens, 1),
    }


class Tally:
    """Sums over the calls of one layout."""

    def __init__(self, llm: KVBoost) -> None:
        self.llm = llm
        self.calls = self.nodes = self.verbatim = self.tokens = self.reused = 0

    def of(self, found: list[NodeWithScore]) -> Callable[[list[ChatMessage]], None]:
        """Counts a call whose prompt may hold these nodes."""

        def note(messages: list[ChatMessage]) -> None:
            self.calls += 1
            for reused, tokens, same in counted(self.llm, messages, found) if messages else ():
                self.nodes += 1
                self.reused, self.tokens, self.verbatim = (
                    self.reused + reused,
                    self.tokens + tokens,
                    self.verbatim + same,
                )

        return note


def runner(llm: KVBoost, layout: str) -> Callable[[str, list[NodeWithScore]], Any]:
    """Asks through one synthesizer or chat engine."""
    if layout not in CHATS:
        mode, _, joined = layout.partition(", ")
        synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, text_qa_template=JOINED if joined else None)
        return lambda words, found: synthesizer.synthesize(words, nodes=found)
    retriever = Fixed()
    chat = CHATS[layout].from_defaults(retriever=retriever, llm=llm)

    def turn(words: str, found: list[NodeWithScore]) -> Any:
        retriever.nodes = found
        return chat.chat(words)

    return turn


def counted(llm: KVBoost, messages: list[ChatMessage], found: list[NodeWithScore]) -> list[tuple[int, int, bool]]:
    """Reused tokens, tokens, and whether the text is unchanged, of every node in a prompt."""
    engine = llm.get_engine()
    prefill = engine.prefill([{"role": m.role.value, "content": m.content or ""} for m in messages], store=False)
    text, count = reused_in(engine, prefill)
    counts = []
    for node in found:
        content = node.get_content("llm").strip()
        for form in (content, repr(content)[1:-1]):
            begin, end = text.find(form[:ENDS]), text.find(form[-ENDS:])
            if begin >= 0 and end >= 0:
                counts.append((*count(begin, end + ENDS), content in text))
                break
    return counts


def ask(llm: KVBoost, nodes: Sequence[Any], k: int, number: int, rng: random.Random) -> dict[str, float]:
    """One question through both LLMs, and how far the answer moved."""
    engine = llm.get_engine()
    words, found = question(nodes, k, number, rng)
    full = HuggingFaceLLM(
        model=engine.model, tokenizer=engine.tokenizer, max_new_tokens=1, is_chat_model=True,
        context_window=engine.window_tokens, generate_kwargs={"do_sample": False},
    )  # fmt: skip
    ours = get_response_synthesizer(llm=llm, response_mode="compact", streaming=True)
    theirs = get_response_synthesizer(llm=full, response_mode="compact")
    prompts: list[list[ChatMessage]] = []
    arms: dict[str, Callable[[], Any]] = {
        "ours": lambda: next(ours.synthesize(words, nodes=found).response_gen),
        "full": lambda: theirs.synthesize(words, nodes=found),
    }
    row: dict[str, float] = {}
    with watching(prompts.append):
        for arm in rng.sample(sorted(arms), 2):
            row[arm], _ = cpu_seconds(arms[arm])
    messages = [{"role": m.role.value, "content": m.content or ""} for m in prompts[0]]
    row |= fidelity(engine, messages, [node.get_content("llm").strip() for node in found])
    return {**row, "speedup": row["full"] / row["ours"]}


@torch.inference_mode()
def fidelity(engine: Engine, messages: list[dict[str, str]], texts: Sequence[str]) -> dict[str, float]:
    """Mean KL of ours and of a prompt without the nodes along full recompute's answer."""
    answer = engine.generate(messages, reuse="off", store=False, sampling=SamplingParams(max_tokens=20)).token_ids
    bare = [{**m, "content": _without(m["content"], texts)} for m in messages]
    rows = {
        "full": log_probs_along(engine, engine.prefill(messages, reuse="off", store=False), answer),
        "ours": log_probs_along(engine, engine.prefill(messages, store=False), answer),
        "bare": log_probs_along(engine, engine.prefill(bare, reuse="off", store=False), answer),
    }
    return {
        "kl_ours": divergence(rows["full"], rows["ours"]).mean().item(),
        "kl_bare": divergence(rows["full"], rows["bare"]).mean().item(),
        "first_token": float(rows["full"][0].argmax() == rows["ours"][0].argmax()),
    }


def _without(content: str, texts: Sequence[str]) -> str:
    for text in texts:
        content = content.replace(text, "")
    return content


async def stalled(llm: KVBoost, asked: Sequence[tuple[str, list[NodeWithScore]]]) -> list[float]:
    """Longest time without a turn of the loop, per answer, seconds."""
    synthesizer = get_response_synthesizer(llm=llm, response_mode="compact")
    longest = []
    for words, found in asked:
        gaps: list[float] = []
        beating = asyncio.create_task(_beat(gaps))
        await asyncio.sleep(0)
        await synthesizer.asynthesize(words, nodes=found)
        beating.cancel()
        longest.append(max(gaps))
    return longest


async def _beat(gaps: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now


def summary(asked: Sequence[dict[str, float]], stalls: Sequence[float], k: int) -> list[dict[str, Any]]:
    """The figures."""
    speedups = [row["speedup"] for row in asked]
    kl = statistics.mean(row["kl_ours"] for row in asked) / statistics.mean(row["kl_bare"] for row in asked)
    return [
        {
            "figure": f"TTFT on compact, HuggingFaceLLM / ours, median, {k} nodes reordered",
            "aim": 5.0,
            "measured": statistics.median(speedups),
        },
        {"figure": "the same, p5", "aim": "–", "measured": percentile(speedups, 0.05)},
        {"figure": "HuggingFaceLLM, median CPU s", "aim": "–", "measured": statistics.median(r["full"] for r in asked)},
        {"figure": "ours, median CPU s", "aim": "–", "measured": statistics.median(r["ours"] for r in asked)},
        {"figure": "fidelity", "aim": 0.96, "measured": 1 - kl},
        {"figure": "first token equal", "aim": "–", "measured": statistics.mean(r["first_token"] for r in asked)},
        {"figure": "longest stall of the event loop, ms", "aim": 50, "measured": 1e3 * max(stalls)},
    ]


if __name__ == "__main__":
    main()
