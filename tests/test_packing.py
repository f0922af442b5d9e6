"""Packs: documents encoded one behind another, in several orders, and averaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineConfig
from kvboost_rag.chunks import ChunkHeader, as_ids
from kvboost_rag.config import LEAD_TOKENS, PACK_SEPARATOR
from kvboost_rag.packing import PackEncoding, order
from kvboost_rag.planner import make_plan
from kvboost_rag.repair import Recipe, floors
from tests.tiny import LIMIT, difference, engine_of, prompt_of, text

DOCUMENTS = [text(seed, 25) for seed in (300, 301, 302, 303)]


def _packed(model: str = "llama", **config: object) -> Engine:
    return engine_of(model, pack_tokens=2000, **config)


def _headers(engine: Engine) -> list[ChunkHeader]:
    return engine._library.headers(engine._scope(None))


def _alone(engine: Engine, ids: np.ndarray) -> torch.Tensor:
    """Keys and values of a sequence in one plain pass, ``(2, layers, kv_heads, n, dim)``."""
    kv = engine._serving._executor.run(as_ids(ids), make_plan(len(ids), ()), {}, Recipe()).kv
    return torch.stack([kv.keys, kv.values])[:, :, :, : len(ids)].clone()


@pytest.mark.parametrize("model", ["llama", "gemma3", "glm", "cohere2"])
def test_a_stored_document_is_the_mean_of_what_every_order_gives(model: str) -> None:
    engine = _packed(model, pack_orders=2)
    engine.warm(DOCUMENTS)
    ids = [as_ids(engine.tokenize(document)) for document in DOCUMENTS]
    separator = as_ids(engine.tokenize(PACK_SEPARATOR))
    rope, lead = engine._serving._executor.rope, ids[-1][-LEAD_TOKENS:]
    assert rope is not None
    given = []
    for one in ((0, 1, 2, 3), (2, 3, 0, 1)):
        sequence = np.concatenate([lead, *[part for i in one for part in (separator, ids[i])]])
        before = one[: one.index(1)]
        start = len(lead) + sum(len(separator) + len(ids[i]) for i in before) + len(separator)
        keys, values = _alone(engine, sequence)[:, :, :, start : start + len(ids[1])]
        given.append((start, keys, values))
    header = next(h for h in _headers(engine) if np.array_equal(h.tokens, ids[1]))
    with engine._library.pin([header.key]) as chunks:
        assert chunks is not None
        stored = chunks[header.key].tensors()
    moved = []
    for start, keys, _ in given:
        out = torch.empty_like(keys)
        rope.move(keys.contiguous(), header.base - start, out)
        moved.append(out)
    assert difference(stored["keys"], torch.stack(moved).mean(0)) < LIMIT
    assert difference(stored["values"], torch.stack([values for *_, values in given]).mean(0)) < LIMIT
    assert difference(stored["values"], given[0][2]) > LIMIT  # one order alone is something else


def test_orders_are_rotations_then_their_reverses_and_no_two_are_the_same() -> None:
    assert [order(number, 4, 4) for number in range(4)] == [(0, 1, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0), (1, 0, 3, 2)]
    for count in range(2, 9):
        for orders in range(2, count + 1):
            made = [order(number, orders, count) for number in range(orders)]
            assert len(set(made)) == orders
            assert all(sorted(one) == list(range(count)) for one in made)


def test_the_model_reads_the_pack_once_in_every_order() -> None:
    engine = _packed()
    documents = [as_ids(engine.tokenize(document)) for document in DOCUMENTS]
    encoding = PackEncoding(engine._serving._executor, documents[3][-8:], documents, separator=as_ids([5]), orders=3)
    done, read = [], []
    for number in encoding.steps():
        read.append(len(encoding._growing.ids))
        done += [] if number is None else [number]
    assert done == list(order(2, 3, 4))
    assert max(read) == 8 + sum(1 + len(ids) for ids in documents)
    assert len(read) == 3 * (1 + len(documents))


def test_one_order_keeps_the_kv_of_its_own_history() -> None:
    engine = _packed(pack_orders=1)
    engine.warm(DOCUMENTS)
    assert all(header.exact for header in _headers(engine))


def test_a_mean_never_serves_an_exact_hit() -> None:
    engine = _packed()
    engine.warm(DOCUMENTS)
    assert not any(header.exact for header in _headers(engine))
    ids = [as_ids(engine.tokenize(document)) for document in DOCUMENTS]
    separator = as_ids(engine.tokenize(PACK_SEPARATOR))
    pack = [part for document in ids for part in (separator, document)]
    whole = np.concatenate([ids[-1][-LEAD_TOKENS:], *pack, *pack, [7]])  # what the headers say stood in front
    prefill = engine.prefill(whole.tolist(), reuse="exact", store=False)
    assert prefill.usage.exact_tokens == 0


@pytest.mark.parametrize("chunking", ["fixed", "semantic"])
def test_pieces_of_one_document_meet_without_a_seam(chunking: str) -> None:
    engine = _packed(chunking=chunking, chunk_tokens=24)
    documents = [text(seed, 90) for seed in (310, 311, 312)]
    engine.warm(documents)
    plan = engine.prefill(prompt_of(documents[::-1])).plan
    assert len(plan.runs) == len(documents)
    assert sum(segment.kind == "approximate" for segment in plan.segments) > len(documents)


def test_a_plan_knows_means_which_need_less_repair() -> None:
    engine = _packed()
    engine.recipe = replace(engine.recipe, whole_asked=0)
    engine.warm(DOCUMENTS)
    known = engine.prefill(prompt_of(DOCUMENTS[::-1]))
    assert all(run.mean for run in known.plan.runs)
    seen = [text(seed, 60) for seed in (320, 321, 322)]
    engine.prefill(prompt_of(seen))
    again = engine.prefill(prompt_of(seen[::-1], preamble="Read all of this."))
    assert again.plan.runs
    assert not any(run.mean for run in again.plan.runs)
    first = sum(floors(engine.recipe, known.plan.runs))
    assert known.usage.repaired_tokens == first  # `engine_of` asks for no least tokens of short runs
    assert again.usage.repaired_tokens > sum(min(4, len(run)) for run in again.plan.runs)


def test_forgetting_one_document_takes_its_whole_pack() -> None:
    engine = _packed()
    engine.warm(DOCUMENTS)
    assert engine.forget(DOCUMENTS[3]) == len(DOCUMENTS)
    engine.warm(DOCUMENTS[:3])
    assert engine.prefill(prompt_of(DOCUMENTS[:3][::-1])).usage.approximate_tokens > 0


def test_a_pack_of_two_has_two_orders_and_of_one_has_one() -> None:
    engine = _packed()
    engine.warm(DOCUMENTS[:2])
    engine.clear()
    engine.warm(DOCUMENTS[:1])
    (header,) = _headers(engine)
    assert header.exact
    engine.clear()
    engine.warm(DOCUMENTS[:2])
    assert not any(header.exact for header in _headers(engine))


@pytest.mark.parametrize("bad", [0, -1, 65, 2.0, True, "4"])
def test_a_bad_number_of_orders_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="pack_orders is"):
        EngineConfig(pack_orders=bad)  # type: ignore[arg-type]


def test_packs_of_all_orders_survive_a_restart(tmp_path: object) -> None:
    with _packed(disk_path=tmp_path) as engine:
        engine.warm(DOCUMENTS)
        first = engine.prefill(prompt_of(DOCUMENTS[::-1]), store=False)
    with _packed(disk_path=tmp_path) as engine:
        second = engine.prefill(prompt_of(DOCUMENTS[::-1]), store=False)
        assert second.usage == first.usage
        assert torch.equal(second.logits, first.logits)
        assert engine.forget(DOCUMENTS[0]) == len(DOCUMENTS)
