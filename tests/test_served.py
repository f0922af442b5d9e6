"""Prompts of moved documents as they were served: their repetition and their continuation need no repair again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineConfig, Prefill, SamplingParams
from kvboost_rag.chunks import ChunkHeader
from kvboost_rag.costs import CostModel
from kvboost_rag.repair import Recipe
from tests.tiny import LIMIT, Forwards, difference, engine_of, off_by, prompt_of, text

DOCUMENTS = [text(seed, 25) for seed in (300, 301, 302, 303)]
MORE = text(310, 9)
FEW = SamplingParams(max_tokens=5)


def warm_engine(**config: Any) -> Engine:
    engine = engine_of(**config)
    engine.warm(DOCUMENTS)
    return engine


def served_of(engine: Engine, namespace: str | None = None) -> list[ChunkHeader]:
    return [header for header in engine._library.headers(engine._scope(namespace)) if header.origin == "served"]


@torch.inference_mode()
def continued(engine: Engine, prefill: Prefill, ids: list[int]) -> torch.Tensor:
    """Logits behind ``ids`` that plain Hugging Face computes over the cache of a prefill."""
    start = len(prefill.token_ids)
    positions = torch.arange(start, start + len(ids))[None]
    out = engine.model(input_ids=torch.tensor([ids]), position_ids=positions, cache=prefill.cache, use_cache=True)
    return out.logits[0, -1].float()


def test_the_same_prompt_again_computes_one_token_and_gives_the_same() -> None:
    engine = warm_engine()
    prompt = prompt_of(DOCUMENTS[::-1])
    first = engine.prefill(prompt)
    assert first.usage.repaired_tokens > 0
    with Forwards(engine.model) as forwards:
        again = engine.prefill(prompt)
    assert forwards.rows == [1]
    assert (again.usage.repaired_tokens, again.usage.computed_tokens) == (0, 1)
    assert again.usage.approximate_tokens >= first.usage.approximate_tokens  # it is no exact hit
    assert difference(again.logits, first.logits) < LIMIT


def test_the_next_turn_computes_only_what_is_new() -> None:
    engine = warm_engine()
    prompt = engine.tokenize(prompt_of(DOCUMENTS[::-1]))
    answer = list(engine.generate(prompt, sampling=FEW).token_ids)
    new = engine.tokenize(MORE)
    cache_of_first = engine.prefill(prompt, store=False)
    found = engine.prefill([*prompt, *answer, *new])
    # The last token of an answer has not run yet when the answer ends.
    assert found.usage.computed_tokens <= len(new) + 1
    assert found.usage.repaired_tokens == 0
    assert difference(found.logits, continued(engine, cache_of_first, [*answer, *new])) < LIMIT


def test_a_document_behind_the_common_beginning_is_still_found_and_repaired() -> None:
    engine = warm_engine()
    first, last = prompt_of(DOCUMENTS[2:0:-1]), prompt_of([*DOCUMENTS[2:0:-1], DOCUMENTS[3]])
    engine.prefill(first)
    found = engine.prefill(last)
    assert [segment.settled for segment in found.plan.segments if segment.kind == "approximate"].count(True) == 1
    assert len(found.plan.runs) == 1  # the document that came new
    assert 0 < found.usage.repaired_tokens < 60
    assert found.usage.approximate_tokens > 0.8 * found.usage.prompt_tokens


def test_a_conversation_is_kept_once() -> None:
    engine = warm_engine()
    prompt = engine.tokenize(prompt_of(DOCUMENTS[::-1]))
    for _ in range(4):
        answer = engine.generate(prompt, sampling=FEW).token_ids
        prompt = [*prompt, *answer, *engine.tokenize(MORE)]
    assert len(served_of(engine)) == 1


def test_exact_calls_never_see_it() -> None:
    engine = warm_engine()
    prompt = prompt_of(DOCUMENTS[::-1])
    engine.prefill(prompt)
    exact = engine.prefill(prompt, reuse="exact")
    assert exact.usage.approximate_tokens == 0
    assert off_by(engine, exact) < LIMIT


@pytest.mark.parametrize("config", [{"served_share": 0.0}, {"store_prompts": False}])
def test_it_can_be_switched_off(config: dict[str, Any]) -> None:
    engine = warm_engine(**config)
    engine.prefill(prompt_of(DOCUMENTS[::-1]))
    assert served_of(engine) == []


def test_a_call_that_stores_nothing_keeps_nothing() -> None:
    engine = warm_engine()
    engine.prefill(prompt_of(DOCUMENTS[::-1]), store=False)
    assert served_of(engine) == []


def test_a_prompt_without_moved_documents_is_not_kept_twice() -> None:
    engine = engine_of()
    engine.generate(prompt_of(DOCUMENTS), sampling=FEW)
    engine.generate(prompt_of(DOCUMENTS), sampling=FEW)
    assert served_of(engine) == []


def test_its_share_of_the_budget_is_never_exceeded_and_the_latest_stay() -> None:
    budget, share = 4 << 20, 0.25
    engine = warm_engine(ram_budget_bytes=budget, served_share=share)
    orders = [DOCUMENTS[i:] + DOCUMENTS[:i] for i in (1, 2, 3)]
    prompts = [prompt_of(order) + extra for order in orders for extra in ("", " Why?", " How?")]
    for prompt in prompts:
        engine.prefill(prompt)
        assert sum(len(header) for header in served_of(engine)) * 768 <= share * budget
    kept = [header.tokens.tolist() for header in served_of(engine)]
    assert 1 < len(kept) < len(prompts)
    assert engine.tokenize(prompts[-1]) in kept
    warm = engine.warm(DOCUMENTS)
    assert warm.already_warm == len(DOCUMENTS)  # documents were not pushed out


def test_a_prompt_that_is_used_stays_longer() -> None:
    engine = warm_engine()
    engine._library._served_bytes = 400 * 768  # room for two
    first, second, third = (prompt_of(DOCUMENTS[i:] + DOCUMENTS[:i]) for i in (1, 2, 3))
    for prompt in (first, second, first, third):
        engine.prefill(prompt)
    kept = [header.tokens.tolist() for header in served_of(engine)]
    assert engine.tokenize(first) in kept
    assert engine.tokenize(second) not in kept


def test_tenants_do_not_share_it() -> None:
    engine = warm_engine()
    engine.warm(DOCUMENTS, namespace="other")
    engine.prefill(prompt_of(DOCUMENTS[::-1]))
    assert engine.prefill(prompt_of(DOCUMENTS[::-1]), namespace="other").usage.repaired_tokens > 0


@pytest.mark.parametrize("how", ["forget", "clear", "recipe"])
def test_it_goes_with_what_it_was_made_of(how: str) -> None:
    engine = warm_engine()
    engine.prefill(prompt_of(DOCUMENTS[::-1]))
    assert len(served_of(engine)) == 1
    if how == "forget":
        engine.forget(DOCUMENTS[1])
    elif how == "clear":
        engine.clear()
    else:
        engine.recipe = engine.recipe
    assert served_of(engine) == []


def test_what_is_forgotten_while_it_is_served_is_not_kept() -> None:
    engine = warm_engine()
    stream = engine.stream(prompt_of(DOCUMENTS[::-1]), sampling=SamplingParams(max_tokens=8))
    next(stream)
    engine.forget(DOCUMENTS[1])
    list(stream)
    assert served_of(engine) == []


def test_a_cancelled_answer_can_be_continued() -> None:
    engine = warm_engine()
    prompt = engine.tokenize(prompt_of(DOCUMENTS[::-1]))
    stream = engine.stream(prompt, sampling=SamplingParams(max_tokens=64))
    next(stream)
    stream.close()
    reference = engine_of(served_share=0.0)
    reference.warm(DOCUMENTS)
    again = engine.prefill([*prompt, *engine.tokenize(MORE)])
    assert again.usage.repaired_tokens == 0
    plain = continued(reference, reference.prefill(prompt), engine.tokenize(MORE))
    assert difference(again.logits, plain) < LIMIT


def test_a_share_outside_of_its_domain_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"served_share is 1\.5"):
        EngineConfig(served_share=1.5)


def test_another_answer_to_the_same_prompt_takes_the_place_of_the_first() -> None:
    engine = warm_engine()
    prompt = prompt_of(DOCUMENTS[::-1])
    for seed in range(5):
        engine.generate(prompt, sampling=SamplingParams(max_tokens=6, temperature=1.0, seed=seed))
    engine.prefill(prompt)
    assert len(served_of(engine)) == 1


def test_a_conversation_pushes_no_document_out_where_its_last_turn_leaves_room() -> None:
    engine = engine_of(ram_budget_bytes=768 * 640, served_share=0.6)
    engine.warm(DOCUMENTS)
    prompt = engine.tokenize(prompt_of(DOCUMENTS[::-1]))
    for _ in range(5):
        answer = engine.generate(prompt, sampling=FEW).token_ids
        prompt = [*prompt, *answer, *engine.tokenize("Why?")]
    assert len(served_of(engine)) == 1
    assert engine.warm(DOCUMENTS).already_warm == len(DOCUMENTS)


def test_what_another_recipe_repaired_in_the_meantime_is_not_kept() -> None:
    engine = warm_engine()
    stream = engine.stream(prompt_of(DOCUMENTS[::-1]), sampling=SamplingParams(max_tokens=8))
    next(stream)
    engine.recipe = Recipe(ratio=1.0)
    list(stream)
    assert served_of(engine) == []


# ---- chats over short passages ---------------------------------------------------------------------------------------

NAMES = ("QWXZ", "JKVB", "YFHP", "UIOE")  # no word of the texts has these letters
NAMED = [f"{name}. {document}" for name, document in zip(NAMES, DOCUMENTS, strict=True)]


def named_chat(name: str) -> tuple[Engine, list[dict[str, str]]]:
    """An engine that was asked about one of four short documents, each of which has a name; and the chat so far."""
    engine = engine_of(repair_whole_passages=1)
    engine.warm(NAMED)
    chat = [{"role": "user", "content": prompt_of(NAMED[::-1], question=f"What is {name}?")}]
    engine.prefill(chat)
    return engine, chat


def and_then(chat: list[dict[str, str]], question: str, *, answer: str = "A river.") -> list[dict[str, str]]:
    return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def whole(engine: Engine, found: Prefill) -> list[str]:
    """Names of the documents none of whose KV is as it was moved."""
    ids = list(found.token_ids)
    kept = next(header for header in served_of(engine) if header.tokens.tolist() == ids)
    fresh = engine._library._served[kept.key].fresh
    texts = [(engine.tokenizer.decode(ids[r.start : r.end]), r) for r in found.plan.runs]
    return [name for text, run in texts for name in NAMES if name in text and fresh[run.start : run.end].all()]


def test_a_turn_about_another_short_passage_is_repaired_anew() -> None:
    engine, chat = named_chat(NAMES[1])
    found = engine.prefill(and_then(chat, f"What is {NAMES[2]}?"))
    assert len(found.plan.runs) >= 4
    assert whole(engine, found) == [NAMES[2]]
    assert len(served_of(engine)) == 1  # in place of the turn before


def test_a_turn_about_the_same_passage_goes_on_from_what_was_served() -> None:
    engine, chat = named_chat(NAMES[1])
    longer = and_then(chat, f"Why {NAMES[1]}?")
    found = engine.prefill(longer)
    assert not found.plan.runs
    assert found.usage.computed_tokens < 60
    again = engine.prefill(and_then(longer, f"How {NAMES[1]}?"))  # that is known of what goes on, too
    assert not again.plan.runs
    assert engine.prefill(and_then(longer, f"How {NAMES[3]}?")).plan.runs


@pytest.mark.parametrize("question", ["??", "!"])
def test_a_turn_that_names_no_passage_goes_on_from_what_was_served(question: str) -> None:
    engine, chat = named_chat(NAMES[1])
    assert not engine.prefill(and_then(chat, question, answer=".")).plan.runs


def test_the_same_prompt_again_is_taken_as_it_was_served_whatever_it_names() -> None:
    engine, chat = named_chat(NAMES[1])
    assert engine.prefill(chat).usage.computed_tokens == 1


def test_a_short_passage_that_comes_new_is_repaired_beside_what_was_served() -> None:
    engine, chat = named_chat(NAMES[1])
    engine.warm(["HJQK. " + text(330, 25)])
    found = engine.prefill(and_then(chat, "HJQK. " + text(330, 25) + "\n\nWhat is HJQK?"))
    assert len(found.plan.runs) == 1
    assert any(segment.settled for segment in found.plan.segments)


def test_exact_calls_and_other_repair_do_not_ask_what_is_named() -> None:
    engine, chat = named_chat(NAMES[1])
    longer = and_then(chat, f"What is {NAMES[2]}?")
    assert engine.prefill(longer, reuse="exact", store=False).usage.approximate_tokens == 0
    engine.recipe = Recipe(strategy="selective")
    engine.prefill(chat)
    assert not engine.prefill(longer).plan.runs


def test_long_passages_in_a_served_prompt_are_left_as_they_are() -> None:
    documents = [f"{name}. {text(seed, 130)}" for name, seed in zip(NAMES, (320, 321), strict=False)]
    engine = engine_of(repair_whole_passages=1)
    engine.warm(documents)
    chat = [{"role": "user", "content": prompt_of(documents[::-1])}]
    engine.prefill(chat)
    assert not engine.prefill(and_then(chat, f"What is {NAMES[0]}?")).plan.runs


def test_a_question_that_was_asked_about_other_documents_is_computed() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    question = "Which river stands behind the walnut garden, and which engine is in the valley of the copper window?"
    engine.prefill(prompt_of(DOCUMENTS[:2], question=question))
    found = engine.prefill(prompt_of(DOCUMENTS[2:], question=question))
    count = len(engine.tokenize(question))
    assert count > 24
    assert found.plan.segments[-1].kind == "compute"
    assert len(found.plan.segments[-1]) >= count


def test_a_question_that_was_asked_before_does_not_keep_its_prompt_from_being_stored() -> None:
    engine = engine_of()
    question = "Which river stands behind the walnut garden, and which engine is in the valley of the window?"

    def on(day: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Be kind. It is {day}."}, {"role": "user", "content": question}]

    engine.generate(on("May 4"), sampling=FEW)
    first = engine.generate(on("June 30"), sampling=FEW).usage
    again = engine.generate(on("June 30"), sampling=FEW).usage
    assert first.computed_tokens > len(engine.tokenize(question))
    assert (again.computed_tokens, again.approximate_tokens) == (1, 0)


def test_an_earlier_turn_that_is_asked_again_is_not_answered_with_what_a_later_one_repaired() -> None:
    engine, chat = named_chat(NAMES[1])
    first = engine.prefill(chat)
    engine.prefill(and_then(chat, f"What is {NAMES[2]}?"))
    again = engine.prefill(chat)
    assert difference(again.logits, first.logits) < LIMIT


def test_the_whole_last_turn_is_the_question_also_where_it_begins_as_another_did() -> None:
    engine, chat = named_chat(NAMES[1])
    other = [{"role": "user", "content": chat[0]["content"].replace(f"What is {NAMES[1]}", f"What is {NAMES[3]}")}]
    found = engine.prefill(other)
    assert whole(engine, found) == [NAMES[3]]


def test_an_answer_that_the_caller_began_hides_no_question() -> None:
    engine = engine_of(repair_whole_passages=1)
    engine.warm(NAMED)
    for name in NAMES:
        chat = [{"role": "user", "content": prompt_of(NAMED[::-1], question=f"What is {name}?")}]
        rendered = engine.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found = engine.prefill(rendered + 'He said "it is')
        assert whole(engine, found) == [name]
        engine._library.clear_served()


def test_repair_anew_that_is_too_dear_is_not_done() -> None:
    engine = engine_of(repair_whole_passages=1, fallback=True)
    engine._serving.planning.costs = CostModel(pass_s=0.0, token_s=1.0, pair_s=0.0, move_s=-0.3)
    engine.warm(NAMED)
    chat = [{"role": "user", "content": prompt_of(NAMED[::-1], question=f"What is {NAMES[1]}?")}]
    assert engine.prefill(chat).plan.runs
    longer = and_then(chat, f"What is {NAMES[2]}?")
    assert engine.prefill(longer, store=False).plan.runs
    engine._serving.planning.costs = CostModel(pass_s=0.0, token_s=1.0, pair_s=0.0, move_s=0.5)
    found = engine.prefill(longer)
    assert not found.plan.runs
    assert found.fallback_reason is None
    assert found.usage.computed_tokens < 60


def test_a_chat_whose_first_turn_was_computed_goes_on_from_it() -> None:
    engine = engine_of(repair_whole_passages=1, fallback=True)
    engine._serving.planning.costs = CostModel(pass_s=0.0, token_s=1.0, pair_s=0.0, move_s=1e-9)
    engine.warm(NAMED)
    chat = [{"role": "user", "content": prompt_of(NAMED[::-1], question=f"What is {NAMES[1]}?")}]
    first = engine.prefill(chat)
    assert first.fallback_reason is not None
    found = engine.prefill(and_then(chat, f"What is {NAMES[2]}?"))  # all of it is fresh
    assert found.usage.computed_tokens < 60
    assert off_by(engine, found) < LIMIT
    assert engine.prefill(chat, reuse="exact", store=False).usage.approximate_tokens == 0


@pytest.mark.parametrize(("question", "anew"), [("And velvet?", True), ("So copper?", False)])
def test_a_follow_up_of_one_name_is_about_what_it_names(question: str, anew: bool) -> None:
    engine = engine_of(repair_whole_passages=1)
    names = ("copper", "velvet", "walnut")
    bodies = [" ".join(word for word in text(400 + i, 30).split() if word.strip(".") not in names) for i in range(3)]
    documents = [f"The {name} stone. {body}" for name, body in zip(names, bodies, strict=True)]
    engine.warm(documents)
    chat = [{"role": "user", "content": prompt_of(documents, question="Where is the copper stone? Tell of copper.")}]
    assert engine.prefill(chat).plan.runs
    found = engine.prefill(and_then(chat, question, answer="."))
    assert bool(found.plan.runs) is anew
