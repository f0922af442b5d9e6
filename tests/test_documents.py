"""Documents: what warming computes and stores, how it is cut, what prompts add, and how to get rid of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvboost_rag
from kvboost_rag import ConfigError, Engine, EngineClosedError, EngineConfig, PromptError, SamplingParams
from kvboost_rag.chunks import ChunkHeader
from kvboost_rag.config import LEAD_TOKENS
from tests.tiny import LIMIT, Forwards, engine_of, off_by, prompt_of, text

DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102, 103)]
LONG = text(200, 120)
TOKEN_BYTES = 3 * 2 * (16 + 16) * 4  # layers, heads, K and V, float32


def _headers(engine: Engine, namespace: str | None = None) -> list[ChunkHeader]:
    return engine._library.headers(engine._scope(namespace))


def _ids(engine: Engine, words: str) -> list[int]:
    return engine.tokenize(words)


# ---- warm ------------------------------------------------------------------------------------------------------------


def test_warming_reports_what_it_did() -> None:
    engine = engine_of()
    first = engine.warm([*DOCUMENTS[:2], "Too short."])
    tokens = sum(len(_ids(engine, document)) for document in DOCUMENTS[:2])
    assert (first.documents, first.computed, first.already_warm, first.too_short, first.rejected) == (3, 2, 0, 1, 0)
    assert (first.chunks, first.tokens, first.stored_bytes) == (2, tokens, tokens * TOKEN_BYTES)
    assert first.seconds > 0
    second = engine.warm([*DOCUMENTS[:3], DOCUMENTS[2]])
    assert (second.computed, second.already_warm, second.chunks) == (1, 3, 1)
    assert engine.stats().chunks == 3
    assert engine.stats().stored_bytes >= first.stored_bytes + second.stored_bytes


def test_one_text_is_one_document() -> None:
    assert engine_of().warm(DOCUMENTS[0]).documents == 1
    assert engine_of().warm([]).documents == 0


def test_what_is_warm_is_not_computed_again() -> None:
    engine = engine_of()
    with Forwards(engine.model) as forwards:
        engine.warm(DOCUMENTS[0])
        engine.warm(DOCUMENTS[0])
    assert forwards.rows == [len(_ids(engine, DOCUMENTS[0]))]


def test_a_document_exactly_as_long_as_an_anchor_is_kept_and_found() -> None:
    engine = engine_of()
    words = next(w for n in range(1, 40) if len(_ids(engine, w := text(3, n))) == 16)
    assert engine.warm(words).computed == 1
    prompt = [*_ids(engine, "Something else first. "), *_ids(engine, words), 5]
    assert engine.prefill(prompt).usage.approximate_tokens == 16


@pytest.mark.parametrize("budget", [0, TOKEN_BYTES * 20])
def test_documents_larger_than_the_budget_are_rejected_and_still_answered(budget: int) -> None:
    engine = engine_of(ram_budget_bytes=budget)
    report = engine.warm(DOCUMENTS)
    assert (report.computed, report.rejected, report.stored_bytes) == (0, 4, 0)
    assert engine.stats().rejections >= 4
    found = engine.prefill(prompt_of(DOCUMENTS))
    assert found.usage.exact_tokens == found.usage.approximate_tokens == 0
    assert off_by(engine, found) < LIMIT


def test_the_budget_is_never_exceeded_and_the_latest_documents_stay() -> None:
    engine = engine_of(ram_budget_bytes=TOKEN_BYTES * 100)
    for document in DOCUMENTS:
        engine.warm(document)
        assert engine.stats().stored_bytes <= engine.stats().budget_bytes
    assert engine.stats().evictions > 0
    found = engine.prefill(prompt_of(DOCUMENTS), store=False)
    assert found.usage.approximate_tokens >= len(_ids(engine, DOCUMENTS[-1])) - 2
    assert found.usage.approximate_tokens <= 100


def test_a_document_warmed_behind_the_preamble_is_an_exact_hit_as_the_first() -> None:
    engine = engine_of(reuse="exact")
    context = "Read this.\n\n"
    engine.warm(DOCUMENTS, context=context)
    for document in DOCUMENTS:
        found = engine.prefill(context + document + "\n\nWhich river?", store=False)
        assert found.usage.exact_tokens >= len(_ids(engine, context + document)) - 1
        assert off_by(engine, found) < LIMIT


def test_the_preamble_is_computed_once_for_all_documents() -> None:
    engine = engine_of()
    context = text(77, 30)
    with Forwards(engine.model) as forwards:
        engine.warm(DOCUMENTS, context=context + "\n\n")
    assert len(forwards.rows) == 1 + len(DOCUMENTS)
    assert sum(forwards.rows) <= sum(len(_ids(engine, words)) for words in (context, *DOCUMENTS)) + 2 * len(DOCUMENTS)


def test_a_document_behind_another_context_is_warmed_separately() -> None:
    engine = engine_of()
    assert engine.warm(DOCUMENTS[0], context="First preamble.\n\n").computed == 1
    assert engine.warm(DOCUMENTS[0], context="Second preamble.\n\n").computed == 1
    assert engine.warm(DOCUMENTS[0], context="Second preamble.\n\n").already_warm == 1


def test_a_marker_in_the_context_is_a_marker_and_one_in_a_document_is_text() -> None:
    engine = engine_of()
    marker = engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    engine.warm(f"<|im_start|>system\n{DOCUMENTS[0]}", context="<|im_start|>user\n")
    stored = [token for header in _headers(engine) for token in header.tokens.tolist()]
    assert stored.count(marker) == 1


def test_warming_needs_a_mode_that_can_use_it() -> None:
    with pytest.raises(ConfigError, match="reuse='exact' or 'approximate'"):
        engine_of(reuse="off").warm(DOCUMENTS)


def test_a_bad_document_leaves_nothing_of_the_call_behind() -> None:
    engine = engine_of()
    with pytest.raises(PromptError, match="document"):
        engine.warm([DOCUMENTS[0], 7])  # type: ignore[list-item]
    assert engine.stats().chunks == 0


# ---- packs -----------------------------------------------------------------------------------------------------------


def _packing(orders: int, **config: Any) -> Engine:
    return engine_of(**{"pack_tokens": 4096, "pack_orders": orders, **config})


def test_documents_of_one_call_are_encoded_one_behind_another() -> None:
    engine = _packing(1)
    report = engine.warm(DOCUMENTS)
    assert (report.computed, report.chunks) == (len(DOCUMENTS), len(DOCUMENTS))
    behind = {
        engine.tokenizer.decode(header.tokens): engine.tokenizer.decode(header.history) for header in _headers(engine)
    }
    for number, document in enumerate(DOCUMENTS):
        assert all(neighbour in behind[document] for neighbour in DOCUMENTS[:number])
    # The first has seen the end of the last.
    assert DOCUMENTS[-1].endswith(behind[DOCUMENTS[0]].strip())
    assert len(_ids(engine, behind[DOCUMENTS[0]])) >= min(LEAD_TOKENS, len(_ids(engine, DOCUMENTS[-1])))


def test_a_further_pack_begins_behind_the_end_of_the_last_one() -> None:
    engine = _packing(1)
    engine.warm(DOCUMENTS[:3])
    engine.warm(DOCUMENTS[3:])
    behind = {engine.tokenizer.decode(h.tokens): engine.tokenizer.decode(h.history) for h in _headers(engine)}
    assert DOCUMENTS[2].endswith(behind[DOCUMENTS[3]].strip())
    engine.forget(DOCUMENTS[2])  # its end led the first pack, too
    assert _headers(engine) == []


def test_a_pack_costs_its_documents_and_a_short_lead() -> None:
    engine = _packing(1)
    lengths = [len(_ids(engine, document)) for document in DOCUMENTS]
    with Forwards(engine.model) as forwards:
        engine.warm(DOCUMENTS)
    separators = len(DOCUMENTS) * len(_ids(engine, "\n\n"))
    assert sum(forwards.rows) == sum(lengths) + min(LEAD_TOKENS, lengths[-1]) + separators


def test_chunks_of_a_pack_hold_what_a_full_prefill_of_the_pack_gives() -> None:
    engine = _packing(1)
    engine.warm(DOCUMENTS)
    last = max(_headers(engine), key=lambda header: header.base)
    sequence = [*last.history.tolist(), *last.tokens.tolist()]
    whole = engine.prefill(sequence, reuse="off", store=False)
    keys = whole.cache.layers[-1].keys[0][:, last.base :]
    with engine._library.pin([last.key]) as found:
        assert found is not None
        assert float((found[last.key].keys[-1] - keys).abs().max()) < LIMIT


def test_packs_are_cut_at_the_budget_and_a_known_document_is_not_computed_again() -> None:
    engine = _packing(1, pack_tokens=200)
    engine.warm(DOCUMENTS)
    assert max(len(header.history) for header in _headers(engine)) < 300
    assert engine.warm(DOCUMENTS[::-1]).already_warm == len(DOCUMENTS)
    assert engine.warm([DOCUMENTS[1], DOCUMENTS[1]]).already_warm == 2
    again = _packing(1).warm([DOCUMENTS[0], DOCUMENTS[0], DOCUMENTS[1]])
    assert (again.computed, again.already_warm) == (2, 1)


def test_one_document_a_context_and_exact_mode_know_no_packs() -> None:
    alone = _packing(1)
    alone.warm(DOCUMENTS[0])
    assert [header.base for header in _headers(alone)] == [0]
    named = _packing(1)
    named.warm(DOCUMENTS, context="Read this.\n\n")
    assert {named.tokenizer.decode(h.history) for h in _headers(named) if h.base} == {"Read this.\n\n"}
    exact = _packing(1, reuse="exact")
    exact.warm(DOCUMENTS)
    assert {header.base for header in _headers(exact)} == {0}


def test_documents_warmed_one_by_one_keep_each_other_company() -> None:
    engine = _packing(1)
    for document in DOCUMENTS[:3]:
        assert engine.warm(document).computed == 1
        assert engine.warm(document).already_warm == 1
    behind = [engine.tokenizer.decode(header.history) for header in _headers(engine)]
    assert behind[0] == ""
    assert DOCUMENTS[0] in behind[1]
    assert DOCUMENTS[1] in behind[2]
    assert engine.forget(DOCUMENTS[2]) == 1
    engine.warm(DOCUMENTS[3])
    assert engine.tokenizer.decode(_headers(engine)[-1].history) == ""  # nothing is encoded behind what was forgotten


def test_tenants_keep_no_company() -> None:
    engine = _packing(1)
    engine.warm(DOCUMENTS[0], namespace="a")
    engine.warm(DOCUMENTS[1], namespace="b")
    assert [header.base for header in _headers(engine, "b")] == [0]


def test_forgetting_a_document_takes_those_computed_behind_it_along() -> None:
    engine = _packing(1)
    engine.warm(DOCUMENTS)
    seen = [header for header in _headers(engine) if DOCUMENTS[2] in engine.tokenizer.decode(header.history)]
    assert engine.forget(DOCUMENTS[2]) == len(seen) + 1
    assert engine.warm(DOCUMENTS).computed == len(seen) + 1


@pytest.mark.parametrize("orders", [1, 3])
def test_what_is_forgotten_while_a_pack_grows_leaves_no_trace_in_the_rest(orders: int) -> None:
    engine = _packing(orders)
    keeper = engine._warmer._keeper
    store, calls = keeper.store, []

    def forget_after_the_second(headers: Any, kv: Any) -> Any:
        stored = store(headers, kv)
        calls.append(len(headers))
        if len(calls) == 2:
            engine.forget(DOCUMENTS[0])
        return stored

    keeper.store = forget_after_the_second
    report = engine.warm(DOCUMENTS)
    assert report.computed == len(DOCUMENTS)
    for header in _headers(engine):
        assert DOCUMENTS[0] not in engine.tokenizer.decode(header.seen)
    held = "".join(engine.tokenizer.decode(header.tokens) for header in _headers(engine))
    assert all(document in held for document in DOCUMENTS[1:])


# ---- chunking --------------------------------------------------------------------------------------------------------


def _cut(**config: Any) -> tuple[Engine, list[ChunkHeader]]:
    engine = engine_of(**config)
    engine.warm(LONG)
    return engine, sorted(_headers(engine), key=lambda header: header.base)


def test_document_chunking_keeps_a_document_whole() -> None:
    engine, (header,) = _cut(chunking="document")
    assert header.tokens.tolist() == _ids(engine, LONG)
    assert (header.base, header.origin) == (0, "warm")


def test_fixed_chunking_cuts_by_count_and_each_chunk_knows_what_stood_before() -> None:
    engine, headers = _cut(chunking="fixed", chunk_tokens=32)
    ids = _ids(engine, LONG)
    assert [len(header) for header in headers[:-1]] == [32] * (len(headers) - 1)
    for header in headers:
        assert header.history is not None
        assert [*header.history, *header.tokens] == ids[: header.base + len(header)]
    assert sum(map(len, headers)) == len(ids)


def test_semantic_chunking_cuts_at_sentence_and_paragraph_ends() -> None:
    engine, headers = _cut(chunking="semantic", chunk_tokens=32)
    assert len(headers) > 2
    for header in headers[:-1]:
        assert engine.tokenizer.decode(header.tokens).endswith((".", "\n\n"))


@pytest.mark.parametrize("chunking", ["fixed", "semantic", "document"])
def test_a_warmed_document_is_found_whole_whatever_the_cuts(chunking: str) -> None:
    engine, _ = _cut(chunking=chunking, chunk_tokens=32)
    found = engine.prefill(prompt_of([LONG]))
    assert found.usage.approximate_tokens >= len(_ids(engine, LONG)) - 2
    assert len(found.plan.runs) == 1  # cut, but encoded in one pass: no seam inside


@pytest.mark.parametrize("chunking", ["fixed", "semantic"])
def test_chunks_of_one_document_are_encoded_in_one_pass(chunking: str) -> None:
    engine = engine_of(chunking=chunking, chunk_tokens=32)
    with Forwards(engine.model) as forwards:
        engine.warm(LONG)
    assert forwards.rows == [len(_ids(engine, LONG))]


def test_an_overlap_is_encoded_in_front_of_each_further_chunk() -> None:
    engine, headers = _cut(chunking="fixed", chunk_tokens=32, overlap_tokens=8)
    ids = _ids(engine, LONG)
    by_place = _by_place(headers, ids)
    assert [header.base for header in by_place] == [0, *[8] * (len(headers) - 1)]
    for place, header in zip(itertools.count(0, 32), by_place, strict=False):
        assert header.history is not None
        assert header.history.tolist() == ids[max(0, place - 8) : place]


def test_sinks_are_the_documents_first_tokens_in_front_of_each_further_chunk() -> None:
    engine, headers = _cut(chunking="fixed", chunk_tokens=32, sink_tokens=4, overlap_tokens=8)
    ids = _ids(engine, LONG)
    by_place = _by_place(headers, ids)
    assert by_place[0].base == 0
    for place, header in zip(itertools.count(32, 32), by_place[1:], strict=False):
        assert header.history is not None
        assert header.history.tolist() == [*ids[:4], *ids[place - 8 : place]]


def test_separately_encoded_chunks_meet_in_seams() -> None:
    engine, headers = _cut(chunking="fixed", chunk_tokens=32, overlap_tokens=8)
    found = engine.prefill(prompt_of([LONG]))
    assert len(found.plan.runs) == len(headers)


def _by_place(headers: list[ChunkHeader], ids: list[int]) -> list[ChunkHeader]:
    """In order of the document."""
    windows = [ids[i : i + 16] for i in range(len(ids) - 15)]
    return sorted(headers, key=lambda header: windows.index(header.tokens[:16].tolist()))


def test_a_document_longer_than_the_window_is_warmed_in_pieces() -> None:
    engine = engine_of()
    words = text(300, 500)
    assert len(_ids(engine, "x")) == 1
    report = engine.warm(words)
    assert report.computed == 1
    assert report.tokens > 512
    assert max(map(len, _headers(engine))) <= 512


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_a_cold_prompt_is_stored_from_its_own_forward() -> None:
    for run in (Engine.prefill, _answer):
        engine = engine_of()
        with Forwards(engine.model) as forwards:
            run(engine, prompt_of(DOCUMENTS))
        assert forwards.rows == [len(_ids(engine, prompt_of(DOCUMENTS)))]
        assert engine.stats().chunks > 0
        assert engine.prefill(prompt_of(DOCUMENTS)).usage.computed_tokens == 1


def _answer(engine: Engine, prompt: str) -> Any:
    return engine.generate(prompt, sampling=SamplingParams(max_tokens=1))


def test_a_document_first_seen_inside_a_prompt_is_found_in_the_next() -> None:
    engine = engine_of()
    engine.prefill(prompt_of([LONG, text(5, 60)]))
    found = engine.prefill(prompt_of([text(6, 20), LONG]))
    assert found.usage.approximate_tokens >= 0.9 * len(_ids(engine, LONG))


def test_orders_of_the_same_documents_store_no_more_than_the_documents() -> None:
    engine = engine_of(served_share=0.0)
    documents = [text(400 + i, 22) for i in range(5)]
    engine.warm(documents)
    engine.prefill(prompt_of(documents))
    before, budget = engine.stats(), 0
    draw = random.Random(0)
    for _ in range(30):
        draw.shuffle(documents)
        found = engine.generate(prompt_of(documents), sampling=SamplingParams(max_tokens=4))
        assert found.usage.approximate_tokens + found.usage.exact_tokens > 0.75 * found.usage.prompt_tokens
        budget += found.usage.prompt_tokens
    added = engine.stats().stored_bytes - before.stored_bytes
    assert added < 0.02 * budget * TOKEN_BYTES


def test_prompts_are_not_kept_where_that_is_switched_off() -> None:
    engine = engine_of(store_prompts=False)
    engine.prefill(prompt_of(DOCUMENTS))
    assert engine.stats().chunks == 0
    assert engine.prefill(prompt_of(DOCUMENTS), store=True).usage.exact_tokens == 0
    assert engine.stats().chunks > 0


def test_one_call_can_leave_its_prompt_out() -> None:
    engine = engine_of()
    engine.prefill(prompt_of(DOCUMENTS), store=False)
    engine.generate(prompt_of(DOCUMENTS), store=False, sampling=SamplingParams(max_tokens=2))
    list(engine.stream(prompt_of(DOCUMENTS), store=False, sampling=SamplingParams(max_tokens=2)))
    assert engine.stats().chunks == 0


def test_kv_behind_moved_documents_is_never_taken_for_exact() -> None:
    engine = engine_of(repair="none")
    engine.warm(DOCUMENTS[:2])
    prompt = prompt_of([*DOCUMENTS[:2], LONG])
    assert engine.prefill(prompt).usage.approximate_tokens > 40
    for header in _headers(engine):
        assert header.origin == "warm" or not header.exact or header.base + len(header) <= 30
    exact = engine.prefill(prompt, reuse="exact")
    assert exact.usage.exact_tokens < 30
    assert off_by(engine, exact) < LIMIT


# ---- forget, clear, close --------------------------------------------------------------------------------------------


def _approximate(engine: Engine, *documents: str) -> int:
    return engine.prefill(
        prompt_of(list(documents), preamble="Yet another start."), store=False
    ).usage.approximate_tokens


def test_a_forgotten_document_is_gone_and_the_others_stay() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    assert engine.forget(DOCUMENTS[1]) == 1
    assert _approximate(engine, DOCUMENTS[1]) == 0
    for other in (DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[3]):
        assert _approximate(engine, other) >= len(_ids(engine, other)) - 2
    assert engine.forget(DOCUMENTS[1]) == 0
    assert engine.warm(DOCUMENTS[1]).computed == 1


@pytest.mark.parametrize(
    "meet",
    [
        lambda engine: engine.warm(LONG),
        lambda engine: engine.warm(LONG, context="Read this.\n\n"),
        lambda engine: engine.prefill(prompt_of([LONG])),
        lambda engine: engine.prefill(prompt_of([DOCUMENTS[0], LONG])),
        lambda engine: engine.generate([{"role": "user", "content": LONG}], sampling=SamplingParams(max_tokens=3)),
        lambda engine: (engine.warm(DOCUMENTS), engine.prefill(prompt_of([*DOCUMENTS, LONG]))),
    ],
    ids=["warmed", "behind a context", "in a prompt", "behind another document", "in a message", "behind moved ones"],
)
@pytest.mark.parametrize("chunking", ["fixed", "semantic", "document"])
def test_nothing_of_a_forgotten_document_is_found(meet: Callable[[Engine], Any], chunking: str) -> None:
    engine = engine_of(chunking=chunking, chunk_tokens=64)
    meet(engine)
    assert _approximate(engine, LONG) > 100
    engine.forget(LONG)
    assert _approximate(engine, LONG) == 0
    windows = _windows(_ids(engine, LONG))
    for header in _headers(engine):
        seen = [*([] if header.history is None else header.history.tolist()), *header.tokens.tolist()]
        assert not windows & _windows(seen)


def _windows(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + 16]) for i in range(len(ids) - 15)}


def test_forgetting_takes_a_short_document_as_a_whole() -> None:
    engine = engine_of()
    note = "copper copper copper."
    assert len(_ids(engine, note)) < 16
    engine.warm([*DOCUMENTS, f"{note} {text(56, 20)}"])
    assert engine.forget("copper copper velvet.") == 0
    assert engine.forget(note) == 1
    assert engine.stats().chunks == len(DOCUMENTS)


def test_forgetting_a_part_of_a_larger_document_takes_all_of_it() -> None:
    engine = engine_of()
    parts = [text(seed, 40) for seed in range(500, 510)]
    engine.warm(["\n\n".join(parts), DOCUMENTS[0]])
    assert engine.forget(parts[5]) == 1
    assert _approximate(engine, parts[5]) == 0
    assert _approximate(engine, DOCUMENTS[0]) > 0


def test_forgetting_spares_documents_that_share_a_heading() -> None:
    engine = engine_of()
    heading = text(55, 10) + "\n\n"
    first, second = (heading + text(seed, 40) for seed in (60, 61))
    engine.warm([first, second])
    assert engine.forget(first) == 1
    assert _approximate(engine, second) >= len(_ids(engine, second)) - 2


def test_clearing_a_namespace_leaves_the_others() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS, namespace="a")
    engine.warm(DOCUMENTS, namespace="b")
    assert engine.clear("a") == len(DOCUMENTS)
    assert engine.clear("a") == 0
    assert _headers(engine, "a") == []
    assert len(_headers(engine, "b")) == len(DOCUMENTS)
    assert engine.clear() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate("Why?"),
        lambda engine: engine.prefill("Why?"),
        lambda engine: engine.stream("Why?"),
        lambda engine: engine.warm(DOCUMENTS),
        lambda engine: engine.forget(DOCUMENTS),
        lambda engine: engine.clear(),
    ],
    ids=["generate", "prefill", "stream", "warm", "forget", "clear"],
)
def test_a_closed_engine_refuses_work(use: Callable[[Engine], Any]) -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    engine.close()
    engine.close()
    assert engine.stats().chunks == 0
    assert engine.stats().stored_bytes == 0
    with pytest.raises(EngineClosedError, match="closed"):
        use(engine)


def test_a_request_that_ends_after_close_leaves_nothing_behind() -> None:
    engine = engine_of()

    def close_it(ids: Any, scores: Any) -> Any:
        engine.close()
        return scores

    engine.generate(prompt_of(DOCUMENTS), sampling=SamplingParams(max_tokens=4, logits_processors=(close_it,)))
    assert engine.stats().stored_bytes == 0


def test_stats_show_the_state_of_the_store() -> None:
    engine = engine_of(ram_budget_bytes=10_000_000)
    assert (engine.stats().chunks, engine.stats().stored_bytes, engine.stats().budget_bytes) == (0, 0, 10_000_000)
    engine.warm(DOCUMENTS)
    stats = engine.stats()
    assert stats.chunks == len(DOCUMENTS)
    assert stats.stored_bytes >= sum(len(_ids(engine, document)) for document in DOCUMENTS) * TOKEN_BYTES
    assert stats.pinned_bytes == 0
    assert stats.requests == 0


def test_stored_keys_are_those_the_model_made() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS[0])
    (header,) = _headers(engine)
    cache = engine.prefill(_ids(engine, DOCUMENTS[0]), reuse="off").cache
    with engine._library.pin([header.key]) as found:
        assert found is not None
        for layer in range(3):
            assert np.allclose(found[header.key].keys[layer], cache.layers[layer].keys[0], atol=1e-5)
            assert np.allclose(found[header.key].values[layer], cache.layers[layer].values[0], atol=1e-5)


def test_every_field_of_the_configuration_is_used() -> None:
    # A field that nothing reads takes no effect, which the configuration promises never to happen.
    source = "".join(p.read_text() for p in Path(kvboost_rag.__file__).parent.glob("*.py") if p.name != "config.py")
    unused = [name for name in EngineConfig.__dataclass_fields__ if f"config.{name}" not in source]
    assert unused == []


def test_what_runs_while_its_document_is_forgotten_keeps_nothing() -> None:
    for drop in (lambda engine, words: engine.forget(words), lambda engine, words: engine.clear()):
        engine = engine_of()
        prompt = prompt_of(DOCUMENTS[:1])
        deltas = engine.stream(prompt, sampling=SamplingParams(max_tokens=8))
        next(deltas)
        drop(engine, DOCUMENTS[0])
        list(deltas)
        assert engine.stats().chunks == 0
        assert engine.prefill(prompt).usage.exact_tokens == 0


def test_a_document_forgotten_while_its_prompt_is_being_kept_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    keeper = engine._serving._keeper
    store, calls = keeper.store, []

    def forgotten_first(*args: Any) -> Any:
        calls.append(engine.forget(DOCUMENTS[0]))
        return store(*args)

    monkeypatch.setattr(keeper, "store", forgotten_first)
    prompt = prompt_of(DOCUMENTS[:1])
    engine.generate(prompt, sampling=SamplingParams(max_tokens=2))
    assert calls
    assert engine.stats().chunks == 0
    assert engine.prefill(prompt).usage.exact_tokens == 0


# ---- forgetting, further ---------------------------------------------------------------------------------------------


def test_forgetting_reaches_text_that_a_prompt_showed_behind_a_moved_document() -> None:
    engine = engine_of()
    engine.warm(DOCUMENTS)
    new = text(500, 40)
    engine.prefill(prompt_of([DOCUMENTS[3], DOCUMENTS[1], new]))
    assert any(new[:40] in engine.tokenizer.decode(header.tokens) for header in _headers(engine))
    engine.forget(DOCUMENTS[1])
    seen = [engine.tokenizer.decode(header.seen) for header in _headers(engine)]
    assert not any(DOCUMENTS[1][:40] in words for words in seen)


def test_forgetting_and_clearing_reach_what_another_state_of_the_model_stored() -> None:
    engine = engine_of()
    weight = engine.model.lm_head.weight
    for drop in (lambda: engine.forget(DOCUMENTS[1]), engine.clear):
        engine.warm(DOCUMENTS)
        weight.data.neg_()
        drop()
        weight.data.neg_()
        assert not any(DOCUMENTS[1][:40] in engine.tokenizer.decode(header.seen) for header in _headers(engine))


def test_a_lead_that_is_not_quite_the_end_of_what_is_forgotten_goes_too() -> None:
    engine = engine_of(pack_tokens=4096)
    long = [text(seed, 40) for seed in (600, 601, 602)]
    engine.warm([long[0], long[1] + "\n\n"])
    engine.warm([long[2], text(603, 40)])
    engine.forget(long[1])
    ends = [engine.tokenizer.decode(header.history) for header in _headers(engine)]
    assert not any(long[1][-60:] in words for words in ends)


def test_a_short_text_inside_a_sentence_is_forgotten() -> None:
    engine = engine_of()
    engine.prefill(f"{text(700, 20)} The zebra crossing {text(701, 20)}")
    assert engine.forget("The zebra crossing") > 0


def test_warming_beyond_the_budget_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(ram_budget_bytes=TOKEN_BYTES * 200)
    report = engine.warm([text(seed, 25) for seed in range(800, 808)])
    assert report.evicted > 0
    assert "ram_budget_bytes" in caplog.text
    assert engine_of().warm(DOCUMENTS).evicted == 0
