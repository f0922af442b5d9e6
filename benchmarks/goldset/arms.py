"""The arms: one prompt through each of them, none helped by what another one stored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from common import cpu_seconds, divergence, ingest, load_engine
from workload import Passage

from kvboost_rag import Engine
from kvboost_rag.repair import Recipe

from .questions import Question, documents_of
from .scoring import greedy, option_ids, score

FULL, PREFIX, EXACT, SEEN, UNREPAIRED, NOTHING = "full", "prefix", "exact", "seen", "unrepaired", "no documents"
OURS = "ours"  # followed by its budget
ANEW = "ours anew"  # every turn of a chat repaired again, not what was served gone on from
KINDS = (FULL, PREFIX, EXACT, OURS, ANEW, SEEN, UNREPAIRED, NOTHING)
USUAL = tuple(kind for kind in KINDS if kind != ANEW)
BUDGETS = ("default", "0.3")
Learns = Literal["nothing", "collection", "prompts", "first document"]
INTRODUCTION = "Hello."  # what a preamble was served with before the questions begin


@dataclass(frozen=True)
class Arm:
    """A way to serve prompts.

    Attributes:
        name: in the report.
        engine, namespace: where its KV lies.
        reuse: mode of its calls.
        learns: what it has seen before it is asked: nothing; the collection; only its earlier prompts of the set; those
            and each prompt's first document behind its preamble.
        store: whether prompts are kept, so that later ones of the set profit.
        recipe: its repair; None leaves the engine's.
        documents: whether prompts have their documents.
    """

    name: str
    engine: Engine
    namespace: str
    reuse: Literal["off", "exact", "approximate"]
    learns: Learns = "nothing"
    store: bool = False
    recipe: Recipe | None = None
    documents: bool = True

    @property
    def exact(self) -> bool:
        """Whether its answers are those of full recompute by construction; they are not generated again."""
        return self.reuse == "exact"


class Lab:
    """All arms over one model.

    Full recompute and the control without documents store nothing and look nothing up. `prefix` and `exact` are an
    engine in exact mode: a prefix cache that knows each preamble and the earlier prompts of the set, and one for which
    each prompt's first document was warmed behind its preamble, too. `seen` repairs what earlier prompts of the set
    left, and nothing was warmed for it. `ours` and `unrepaired` have ingested the collection of a block of sets; where
    questions stand alone they keep no prompt, so that they can share one store; in a chat, whose turns build on each
    other, each has an engine of its own. `ours anew` is `ours` with `served_share=0`, for chats only.

    Args:
        model: id or folder.
        dtype: of the weights.
        kinds: arms to build, of `KINDS`.
        budgets: of `ours`, see `with_budget`; `unrepaired` needs none.
        chat: whether prompts continue each other.
        answer_tokens: most tokens of a greedy answer; 0 generates none.
        seed: of the order of arms and of ingesting.
        shuffled: whether passages are ingested in random order, so that those of one text hardly ever were neighbours;
            otherwise in the order in which a splitter gives them.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        *,
        kinds: Sequence[str] = USUAL,
        budgets: Sequence[str] = BUDGETS,
        chat: bool = False,
        answer_tokens: int = 40,
        seed: int = 0,
        shuffled: bool = True,
        engine: Engine | None = None,
    ) -> None:
        self.main = load_engine(model, dtype, store_prompts=False) if engine is None else engine
        self.answer_tokens, self.seed, self.shuffled = answer_tokens, seed, shuffled
        self.arms = self._build(set(kinds), budgets, chat)
        self._ends = _ends(self.main)

    def _build(self, kinds: set[str], budgets: Sequence[str], chat: bool) -> list[Arm]:
        base = self.main.recipe
        repairs = [(f"{OURS} {b}", with_budget(base, b)) for b in budgets if OURS in kinds]
        repairs += [(UNREPAIRED, replace(base, strategy="none"))] if UNREPAIRED in kinds else []
        arms = []
        for number, (name, recipe) in enumerate(repairs):
            engine = self.main if number == 0 or not chat else self._another(reuse="approximate")
            arms.append(Arm(name, engine, "default", "approximate", "collection", chat, recipe))
        if ANEW in kinds:
            if not chat:
                raise ValueError(f"{ANEW!r} is an arm of chats only: questions that stand alone continue no prompt")
            anew = self._another(reuse="approximate", served_share=0.0)
            arms.append(Arm(ANEW, anew, "default", "approximate", "collection", chat, base))
        if kinds & {PREFIX, EXACT}:
            exact = self._another(reuse="exact")
            made = {PREFIX: Arm(PREFIX, exact, PREFIX, "exact", "prompts", store=True),
                    EXACT: Arm(EXACT, exact, EXACT, "exact", "first document", store=chat)}  # fmt: skip
            arms += [arm for name, arm in made.items() if name in kinds]
        if SEEN in kinds:
            arms.append(Arm(SEEN, self._another(reuse="approximate"), SEEN, "approximate", "prompts", store=True))
        if FULL in kinds:
            arms.append(Arm(FULL, self.main, "default", "off"))
        if NOTHING in kinds:
            arms.append(Arm(NOTHING, self.main, "default", "off", documents=False))
        return arms

    def _another(self, reuse: Literal["exact", "approximate"], **settings: Any) -> Engine:
        config = replace(self.main.config, reuse=reuse, **settings)
        return Engine(self.main.model, self.main.tokenizer, config)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        ids: list[int] = self.main.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def begin_block(self, sets: Sequence[Sequence[Question]]) -> None:
        """Ingest the documents of some sets, as a user who ingests a collection does, and forget those before."""
        pool = [Passage("", text) for text in documents_of(sets)]
        preambles = sorted({question.preamble for one in sets for question in one})
        for engine in {id(arm.engine): arm.engine for arm in self.arms if arm.learns == "collection"}.values():
            engine.clear("default")
            ingest(engine, pool, self.seed if self.shuffled else None)
            _introduce(engine, "default", preambles)

    def begin_set(self, questions: Sequence[Question]) -> None:
        """Forget the prompts of the set before."""
        for arm in self.arms:
            if arm.learns in ("prompts", "first document"):
                arm.engine.clear(arm.namespace)
                _introduce(arm.engine, arm.namespace, sorted({question.preamble for question in questions}))

    def measure(self, question: Question, position: int, key: str) -> dict[str, dict[str, Any]]:
        """All arms on one prompt, in a random order.

        Args:
            question: the prompt.
            position: of the question in its set.
            key: seeds the order.
        """
        shared, rests = option_ids(self.tokenize, question)
        order = list(self.arms)
        random.Random(f"{self.seed} {key}").shuffle(order)
        logits: dict[str, torch.Tensor] = {}
        rows: dict[str, dict[str, Any]] = {}
        for arm in order:
            prepare(arm, question, position)
            rows[arm.name], logits[arm.name] = self._run(arm, question, position, shared, rests)
        for name, row in rows.items():
            if FULL in logits:
                reference, other = torch.log_softmax(logits[FULL], -1), torch.log_softmax(logits[name], -1)
                row["kl_first"] = float(divergence(reference[None], other[None]))
                row["agree"] = bool(reference.argmax() == other.argmax())
        return {arm.name: rows[arm.name] for arm in self.arms}

    def _run(
        self, arm: Arm, question: Question, position: int, shared: list[int], rests: list[list[int]]
    ) -> tuple[dict[str, Any], torch.Tensor]:
        engine, messages = arm.engine, question.messages(documents=arm.documents)
        seconds, prefill = cpu_seconds(
            lambda: engine.prefill(messages, reuse=arm.reuse, namespace=arm.namespace, store=arm.store)
        )
        timing, usage = prefill.timing, prefill.usage
        scores = score(engine.model, prefill, shared, rests)
        row = {
            "state": state_of(arm, position),
            # Keeping new text comes after the first token; it is wall time, so its share is taken off.
            "ttft_s": seconds * timing.ttft_s / timing.total_s,
            "prompt_tokens": usage.prompt_tokens,
            "exact_tokens": usage.exact_tokens,
            "approximate_tokens": usage.approximate_tokens,
            "computed_tokens": usage.computed_tokens,
            "hit": hit_of(usage.exact_tokens, usage.approximate_tokens),
            "scores": [round(value, 5) for value in scores],
            "right": max(range(len(scores)), key=scores.__getitem__) == question.gold,
        }
        if self.answer_tokens and not arm.exact:
            row["answer"], named = greedy(
                engine.model, prefill, self._decode, question.options, ends=self._ends, max_tokens=self.answer_tokens
            )
            row["said"] = named == question.gold
        return row, prefill.logits

    def _decode(self, ids: list[int]) -> str:
        text: str = self.main.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def with_budget(recipe: Recipe, budget: str) -> Recipe:
    """A recipe of another budget: "default" leaves it; "0.3" sets the ratio; "0.1:4" the least tokens of a short run,
    too, and "0.1:4:0" also the first tokens of each run that are always recomputed.

    Raises:
        ValueError: the budget is none of these.
    """
    if budget == "default":
        return recipe
    ratio, *counts = budget.split(":")
    try:
        changed = recipe.with_ratio(float(ratio))
        least, floor = [int(count) for count in counts] + [recipe.least_tokens, recipe.floor_tokens][len(counts) :]
        return replace(changed, least_tokens=least, floor_tokens=floor)
    except ValueError:
        raise ValueError(
            f'budget is {budget!r}; give "default", a ratio ("0.3"), "ratio:least tokens" or "ratio:least:first tokens"'
        ) from None


def prepare(arm: Arm, question: Question, position: int) -> None:
    """Bring an arm into the state in which it meets a prompt; not measured."""
    if arm.recipe is not None and arm.engine.recipe != arm.recipe:
        arm.engine.recipe = arm.recipe
    if arm.learns == "first document" and (question.documents and not question.history):
        if not arm.store:  # questions that stand alone: each has its own first document
            arm.engine.clear(arm.namespace)
            _introduce(arm.engine, arm.namespace, [question.preamble])
        rendered = arm.engine.tokenizer.apply_chat_template(
            question.messages(), tokenize=False, add_generation_prompt=True
        )
        first = question.documents[0]
        arm.engine.warm([first], context=rendered[: rendered.index(first)], namespace=arm.namespace)


def state_of(arm: Arm, position: int) -> str:
    """Whether the arm meets the documents for the first time: "cold", "warm", or "-" where that makes no difference."""
    if arm.learns == "nothing":
        return "-"
    return "cold" if arm.learns == "prompts" and position == 0 else "warm"


def hit_of(exact_tokens: int, approximate_tokens: int) -> str:
    """Kind of hit."""
    if exact_tokens and approximate_tokens:
        return "mixed"
    return "exact" if exact_tokens else "approximate" if approximate_tokens else "miss"


def _introduce(engine: Engine, namespace: str, preambles: Sequence[str]) -> None:
    """Serve each preamble once: a chain that has been asked before."""
    for preamble in preambles:
        messages = [{"role": "system", "content": preamble}, {"role": "user", "content": INTRODUCTION}]
        engine.prefill(messages, namespace=namespace, store=True, reuse="exact")


def _ends(engine: Engine) -> frozenset[int]:
    config, tokenizer = engine.model.generation_config, engine.tokenizer
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return frozenset(token for token in (*ends, tokenizer.eos_token_id) if token is not None)
