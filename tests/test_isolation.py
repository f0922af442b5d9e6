"""Nobody can use, see or time what another tenant or another model stored, and what is deleted is gone."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvboost_rag import Engine, SamplingParams
from kvboost_rag.chunks import Scope, as_ids, chunk_key, content_hash, prefix_hash
from kvboost_rag.fingerprints import fingerprint
from kvboost_rag.tracing import read_trace
from langchain_kvboost import ChatKVBoost
from langchain_kvboost import KVBoostVectorStore as LangChainStore
from llama_index.llms.kvboost import KVBoost
from llama_index.llms.kvboost import KVBoostVectorStore as LlamaIndexStore
from tests.disk_chunks import files_in, in_child, needs_fork, wait_for
from tests.llama_nodes import EMBEDDING, node, shown, wide_model
from tests.tiny import LIMIT, engine_of, model_of, new_model, off_by, prompt_of, random_ids, text, tokenizer_of

DOCUMENTS = [text(seed, 40) for seed in range(800, 804)]
FAKE = DeterministicFakeEmbedding(size=8)


def on(path: Path | None, model: Any = "llama", **config: Any) -> Engine:
    return engine_of(model, disk_path=path, **config)


def hits(engine: Engine, documents: list[str], **options: Any) -> int:
    """Tokens of a prompt that were not computed; changes nothing."""
    usage = engine.prefill(prompt_of(documents), store=False, **options).usage
    return usage.exact_tokens + usage.approximate_tokens


# ---- hashes ----------------------------------------------------------------------------------------------------------


def twins() -> tuple[str, str]:
    """Two names with the same xxh3-128 behind ``32:<any fingerprint>:``.

    In two of its lanes XXH3 adds products of halves of (input xor known constant). Where one half is made equal in both
    lanes, what is added to the other half in one lane can be taken from it in the other.
    """
    names = []
    for one, other in ("`b", "b`"):
        name = list("x" * 1064)
        name[28], name[32:36], name[604], name[608:612] = one, "0@00", other, "eldb"
        names.append("".join(name))
    return names[0], names[1]


def test_a_tenant_whose_name_was_made_to_collide_stores_and_learns_nothing_of_the_other():
    alice, mallory = twins()
    engine = engine_of()
    engine.warm(DOCUMENTS, namespace=alice)
    assert hits(engine, DOCUMENTS, namespace=mallory) == 0
    assert engine.warm(DOCUMENTS, namespace=mallory).computed == len(DOCUMENTS)  # else he knows that Alice has them
    assert hits(engine, DOCUMENTS, namespace=mallory) == hits(engine, DOCUMENTS, namespace=alice) > 0
    assert engine.clear(mallory) == len(DOCUMENTS)
    assert hits(engine, DOCUMENTS, namespace=alice) > 0


def test_hashes_are_the_same_everywhere_and_differ_by_all_that_they_are_of():
    ids = as_ids(range(40))
    scopes = [Scope(mark, name) for mark in ("f", "g") for name in ("a", "b", "")]
    found = [
        hash_(scope, part) for scope in scopes for hash_ in (content_hash, prefix_hash) for part in (ids, ids[:39])
    ]
    found += [chunk_key(scope, ids, 2, history) for scope in scopes for history in (None, ids[:2], ids[1:3])]
    assert len(set(found)) == len(found)
    assert Scope("ab", "c").digest() != Scope("a", "bc").digest()
    assert content_hash(Scope("f", "a"), as_ids([1, 2, 3])) == "d4eec79f8c9812c1e984d3bb6d0b9585"


def test_names_of_files_tell_nothing(tmp_path):
    names = []
    for folder in ("one", "two"):
        with on(tmp_path / folder) as engine:
            engine.warm(DOCUMENTS, namespace="alice")
        names.append({path.stem for path in files_in(tmp_path / folder)})
    assert len(names[0]) == len(names[1]) == len(DOCUMENTS)
    assert not names[0] & names[1]  # the same documents of the same tenant under the same model


# ---- another tenant --------------------------------------------------------------------------------------------------


def seen_by(engine: Engine, ids: list[int], namespace: str, **options: Any) -> tuple[Any, ...]:
    """All that an answer tells of what was stored, but for times and logits."""
    found = engine.prefill(ids, namespace=namespace, **options)
    kinds = [(part.kind, part.start, part.end) for part in found.plan.segments]
    return found.usage, kinds, found.fallback_reason


def fill(engine: Engine, namespace: str) -> list[list[int]]:
    """Store documents, exact prompts and served ones; prompts that the tenant itself finds in every way."""
    engine.warm(DOCUMENTS, namespace=namespace)
    engine.warm(DOCUMENTS[:1], context="Read this.\n\n", namespace=namespace)
    prompts = [prompt_of(DOCUMENTS), prompt_of(DOCUMENTS[::-1], preamble="Please."), prompt_of(DOCUMENTS[:1])]
    ids = [engine.tokenize(prompt) for prompt in prompts]
    for each in ids:
        engine.prefill(each, namespace=namespace)
    return [*ids, [*ids[1], *ids[2]], ids[0][7:90]]


@pytest.mark.parametrize("disk", [False, True])
def test_what_another_tenant_has_looks_like_what_nobody_has(tmp_path, disk):
    folder = tmp_path / "both" if disk else None
    engine, alone = on(folder), on(tmp_path / "alone" if disk else None)
    prompts = fill(engine, "alice")
    assert all(engine.prefill(ids, namespace="alice", store=False).usage.computed_tokens < len(ids) for ids in prompts)
    for round_ in ("now", "after a restart"):
        for ids in prompts:
            for name in ("bob", "Alice", "alice ", "alic", "default"):
                for reuse in ("exact", "approximate"):
                    found = seen_by(engine, ids, name, reuse=reuse, store=False)
                    assert found == seen_by(alone, ids, name, reuse=reuse, store=False)
                    assert found[0].exact_tokens == found[0].approximate_tokens == 0
        assert engine.forget(DOCUMENTS, namespace="bob") == engine.clear("bob") == 0
        if not disk or round_ != "now":
            break
        engine.close()
        engine = on(folder)
    # What he stores himself is stored as if nobody had it, and is his own.
    for _ in range(2):
        assert [seen_by(engine, ids, "bob") for ids in prompts] == [seen_by(alone, ids, "bob") for ids in prompts]
        reports = [replace(each.warm(DOCUMENTS, namespace="bob"), seconds=0.0) for each in (engine, alone)]
        assert reports[0] == reports[1]
    assert engine.forget(DOCUMENTS[0], namespace="bob") == alone.forget(DOCUMENTS[0], namespace="bob") > 0
    assert engine.clear("bob") == alone.clear("bob") > 0
    assert hits(engine, DOCUMENTS, namespace="alice") > 100
    for each in (engine, alone):
        each.close()


def test_tenants_of_the_integrations_are_apart(tmp_path):
    engine = on(tmp_path, wide_model())
    nodes = [node(seed) for seed in range(900, 903)]
    LangChainStore(InMemoryVectorStore(FAKE), engine, namespace="alice").add_texts(DOCUMENTS)
    LlamaIndexStore(SimpleVectorStore(), engine, namespace="alice").add(
        [each.model_copy(update={"embedding": [0.1] * 8}) for each in nodes]
    )
    everything = "\n\n".join([*DOCUMENTS, *shown(nodes)])

    def reused(ask: Any) -> int:
        before = engine.stats()
        ask()
        after = engine.stats()
        assert after.requests == before.requests + 1
        return after.exact_tokens + after.approximate_tokens - before.exact_tokens - before.approximate_tokens

    def forget_own(name: str | None) -> None:
        if name != "alice":
            engine.clear(name)

    per_call = ChatKVBoost(engine=engine, max_tokens=1, namespace="carol")
    for name, least, most in (("bob", 0, 20), (None, 0, 20), ("alice", 250, 10_000)):
        options = {"engine": engine, "namespace": name, "max_tokens": 1}
        # Not the documents themselves, but the words that every chat begins with, may be one's own from before.
        assert least <= reused(lambda options=options: ChatKVBoost(**options).invoke(f"1 {everything}")) <= most
        forget_own(name)
        assert least <= reused(lambda options=options: KVBoost(**options).complete(f"2 {everything}")) <= most
        forget_own(name)
        assert (
            least
            <= reused(lambda chat=per_call, name=name: chat.invoke(f"3 {everything}", namespace=name or "x"))
            <= most
        )
        engine.clear(name or "x") if name != "alice" else None
    engine.close()


def test_a_trace_does_not_tell_that_two_tenants_have_the_same_document(tmp_path):
    engine = on(None, trace_path=tmp_path / "trace.jsonl")
    for name in ("alice", "bob"):
        engine.warm(DOCUMENTS[0], namespace=name)
    one, two = read_trace(tmp_path / "trace.jsonl")
    assert one.namespace != two.namespace
    assert one.asked[0].name != two.asked[0].name
    raw = (tmp_path / "trace.jsonl").read_text()
    assert not any(name in raw for name in ("alice", "bob", *engine._library._index._headers))


# ---- time ------------------------------------------------------------------------------------------------------------

SURE = 4.5  # standard deviations: by chance once in 150,000 runs


def slower(pairs: list[tuple[float, float]]) -> float:
    """Sign test: how surely the first of each pair takes longer, in standard deviations.

    Only which of two neighbours was slower counts, so nothing is assumed of how times are spread, and what slows the
    machine for a while slows both. Without a difference the count is binomial.
    """
    wins = sum(one > other for one, other in pairs) + 0.5 * sum(one == other for one, other in pairs)
    return (2 * wins - len(pairs)) / math.sqrt(len(pairs))


Ids = list[int]
Pairs = list[tuple[float, float]]


def timed_pairs(count: int, ask: Any, known: list[Ids], unknown: list[Ids]) -> list[Pairs]:
    """Times of a known and an unknown prompt each, in random order; a list of pairs per figure that `ask` gives."""
    draw = random.Random(5)
    pairs: list[Pairs] = []
    for _ in range(count):
        both = [draw.choice(known), draw.choice(unknown)]
        if flipped := draw.random() < 0.5:
            both.reverse()
        times = [ask(ids) for ids in both]
        if flipped:
            times.reverse()
        pairs.append(list(zip(*times, strict=True)))
    return [list(column) for column in zip(*pairs, strict=True)]


def two_kinds(engine: Engine, tokens: int) -> tuple[list[list[Ids]], list[list[Ids]]]:
    """Prompts that Alice has and prompts that nobody has, as they were stored; and the same at another offset."""
    kinds = [[random_ids(base + seed, tokens) for seed in range(20)] for base in (10_000, 20_000)]
    for name, prompts in zip(("alice", "carol"), kinds, strict=True):  # so that they differ in nothing but the tenant
        for ids in prompts:
            engine.prefill(ids, namespace=name)
    engine.clear("carol")
    return kinds, [[random_ids(seed, 5) + ids for seed, ids in enumerate(prompts)] for prompts in kinds]


@contextmanager
def steady() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_lookup(engine: Engine, count: int) -> None:
    """Time looking up and planning."""
    same, moved = two_kinds(engine, 120)

    def timed(ids: list[int]) -> tuple[float]:
        request = engine._request("prefill", ids, namespace="bob")
        started = time.perf_counter()
        engine._serving._plan(request, engine.recipe)
        return (time.perf_counter() - started,)

    with steady():
        timed_pairs(10, timed, *moved)  # nothing is cold when it counts
        found = [slower(timed_pairs(count, timed, *kinds)[0]) for kinds in (same, moved)]
        honest = leak(engine)
        leaked = slower(timed_pairs(count, timed, *moved)[0])
        engine._library.match = honest
    assert leaked > SURE  # if lookups searched everybody's chunks and then looked whose they are, it would show
    assert max(map(abs, found)) < SURE


def check_prefill(engine: Engine, count: int) -> None:
    """Time whole requests."""
    same, moved = two_kinds(engine, 300)

    def timed(name: str) -> Any:
        def ask(ids: list[int]) -> tuple[float, float]:
            timing = engine.prefill(ids, namespace=name, store=False).timing
            return timing.lookup_s, timing.total_s

        return ask

    with steady():
        for name in ("bob", "alice"):
            timed_pairs(5, timed(name), *moved)
        found = [slower(pairs) for kinds in (same, moved) for pairs in timed_pairs(count, timed("bob"), *kinds)]
        own = slower(timed_pairs(count // 2, timed("alice"), *same)[1])
    assert own < -SURE  # Alice sees a difference
    assert max(map(abs, found)) < SURE


def leak(engine: Engine) -> Any:
    """Make lookups search Alice's chunks, too, and throw away what they find; returns the honest one."""
    library = engine._library
    honest = library.match

    def leaky(scope: Scope, ids: Any, **options: Any) -> Any:
        honest(replace(scope, namespace="alice"), ids, **options)
        return honest(scope, ids, **options)

    library.match = leaky
    return honest


def test_time_to_plan_does_not_tell_what_another_tenant_has():
    check_lookup(on(None), 200)


@pytest.mark.slow
@pytest.mark.parametrize(("disk", "ram_budget_bytes"), [(False, 1 << 30), (True, 1 << 30), (True, 0)])
def test_time_to_answer_does_not_tell_what_another_tenant_has(tmp_path, disk, ram_budget_bytes):
    engine = on(tmp_path if disk else None, ram_budget_bytes=ram_budget_bytes)
    check_lookup(engine, 1000)
    check_prefill(engine, 300)
    engine.close()


# ---- another version -------------------------------------------------------------------------------------------------


class Lora(torch.nn.Module):
    """A low-rank adapter around a linear layer, with the names that PEFT gives its parts."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters = base, ["first"], False
        self.scaling = {"first": 1.0}
        generator = torch.Generator().manual_seed(3)
        self.lora_A = torch.nn.Parameter(torch.randn(4, base.in_features, generator=generator), requires_grad=False)
        self.lora_B = torch.nn.Parameter(torch.randn(base.out_features, 4, generator=generator), requires_grad=False)

    def delta(self) -> torch.Tensor:
        return self.lora_B @ self.lora_A * self.scaling["first"] * 0.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        return out if self.disable_adapters else out + x @ self.delta().T


@torch.no_grad()
def adapter_steps(model: Any) -> Iterator[str]:
    """Take a model through the life of an adapter; after each step, its name."""
    attention = model.model.layers[1].self_attn
    base = attention.v_proj
    attention.v_proj = Lora(base)
    yield "attached"
    attention.v_proj.scaling["first"] = 2.0
    yield "scaled"
    attention.v_proj.disable_adapters = True
    yield "disabled"
    attention.v_proj.disable_adapters = False
    merged, weight = attention.v_proj.delta(), base.weight.clone()
    attention.v_proj = base
    base.weight.data += merged
    yield "merged"
    base.weight.data.copy_(weight)
    yield ""


@torch.no_grad()
def weight_steps(model: Any) -> Iterator[str]:
    weight = model.model.layers[0].self_attn.v_proj.weight
    before = weight[0, 0].clone()
    weight[0, 0] += 1e-3
    yield "one number"
    weight[0, 0] = before
    yield ""


def rope_steps(model: Any) -> Iterator[str]:
    decoder = model.model
    plain = decoder.rotary_emb
    for parameters in (
        {"rope_type": "default", "rope_theta": 2e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ):
        other = new_model("llama", rope_parameters=parameters)
        decoder.rotary_emb = other.model.rotary_emb
        yield str(parameters)
    decoder.rotary_emb = plain
    yield ""


STEPS = {"weights": weight_steps, "adapter": adapter_steps, "rotation": rope_steps}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_model_that_changes_misses_until_it_is_itself_again(tmp_path, steps, tier):
    model = new_model("llama")
    engine = on(tmp_path if tier == "disk" else None, model)
    first = engine.fingerprint
    engine.warm(DOCUMENTS)
    engine.prefill(prompt_of(DOCUMENTS))
    known = {first}
    for step in steps(model):
        if tier == "disk":
            engine.close()
            engine = on(tmp_path, model)
        if not step:
            break
        assert engine.fingerprint not in known, step
        known.add(engine.fingerprint)
        cold = engine.prefill(prompt_of(DOCUMENTS), store=False)
        assert cold.usage.exact_tokens == cold.usage.approximate_tokens == 0, step
        assert off_by(engine, cold) < LIMIT
    assert engine.fingerprint == first
    # Other layers or frequencies are another structure, for which the store in RAM begins anew.
    assert (tier == "ram" and steps is not weight_steps) or hits(engine, DOCUMENTS) > 100
    engine.close()


@torch.no_grad()
def test_frequencies_edited_in_place_are_noticed():
    model = new_model("llama")
    engine = on(None, model, reuse="exact")
    prompt = prompt_of(DOCUMENTS)
    engine.prefill(prompt)
    first = engine.fingerprint
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert fingerprint(model, engine.tokenizer) != first
    found = engine.prefill(prompt)
    assert found.usage.exact_tokens == 0
    assert off_by(engine, found) < LIMIT
    model.model.rotary_emb.inv_freq.mul_(2)
    assert engine.fingerprint == first


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_frequencies_that_follow_the_prompt_are_no_other_model(family):
    model = new_model(family)
    engine = on(None, model, reuse="exact")
    first, library = engine.fingerprint, engine._library
    for tokens in (20, 63, 20):
        model(input_ids=torch.tensor([random_ids(1, tokens)]))
        assert engine.fingerprint == first == fingerprint(model, engine.tokenizer)
    model(input_ids=torch.tensor([random_ids(1, 150)]))
    assert engine.fingerprint == first == fingerprint(model, engine.tokenizer)
    assert engine._library is library


@torch.no_grad()
def test_the_last_bits_of_frequencies_are_no_part_of_a_model():
    model = new_model("llama")
    first = fingerprint(model, None)
    model.model.rotary_emb.inv_freq.mul_(1 + 2e-7)
    assert fingerprint(model, None) == first
    model.model.rotary_emb.inv_freq.mul_(1.01)
    assert fingerprint(model, None) != first


def other_tokenizers() -> dict[str, Any]:
    plain = tokenizer_of()

    def changed(change: Any) -> Any:
        parts = json.loads(plain.backend_tokenizer.to_str())
        change(parts)
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<|im_end|>")

    def swap(parts: dict[str, Any]) -> None:
        merges = parts["model"]["merges"]
        merges[-1], merges[-2] = merges[-2], merges[-1]

    added = changed(lambda parts: None)
    added.add_tokens(["river stone"])
    normal = changed(lambda parts: parts.update(normalizer={"type": "Lowercase"}))
    return {"added token": added, "merges": changed(swap), "normaliser": normal, "fewer": tokenizer_of(20)}


OTHERS = {
    "dtype": lambda path: on(path, new_model("llama").to(torch.bfloat16)),
    "theta": lambda path: on(path, new_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 2e4})),
    "scaling": lambda path: on(path, "llama-linear"),
    "8 bits": lambda path: on(path, kv_bits=8),
    "mixed bits": lambda path: on(path, kv_bits="8/4"),
    **{
        name: lambda path, name=name: engine_of("llama", other_tokenizers()[name], disk_path=path)
        for name in ("added token", "merges", "normaliser", "fewer")
    },
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_version_misses_what_lies_in_the_same_folder(tmp_path, other):
    with on(tmp_path) as engine:
        engine.warm(DOCUMENTS)
        ids = engine.tokenize(prompt_of(DOCUMENTS))
        first = engine.fingerprint
    with other(tmp_path) as engine:
        assert engine.fingerprint != first
        for _ in range(2):
            found = engine.prefill(ids, store=False).usage
            assert found.exact_tokens == found.approximate_tokens == 0
        assert engine.warm(DOCUMENTS).already_warm == 0
    with on(tmp_path) as engine:
        assert engine.prefill(ids, store=False).usage.approximate_tokens > 100
    with other(tmp_path) as engine:
        assert hits(engine, DOCUMENTS) > 100


def test_what_a_tokenizer_was_last_asked_for_is_no_part_of_it():
    model, tokenizer = model_of("llama"), other_tokenizers()["normaliser"]
    before = fingerprint(model, tokenizer)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer(["river", "river stone"], padding=True, truncation=True, max_length=1)
    assert fingerprint(model, tokenizer) == before


# ---- deletion --------------------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_one_process_forgets_is_gone_in_another(tmp_path, how):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS, namespace="alice")
    ready, gone = os.pipe(), os.pipe()

    def child() -> None:
        mine = on(tmp_path)
        assert hits(mine, DOCUMENTS[:1], namespace="alice") > 0
        mine._library._store.flush()  # it has it in RAM now
        assert mine.stats().chunks == 1
        os.write(ready[1], b".")
        os.read(gone[0], 1)
        assert hits(mine, DOCUMENTS[:1], namespace="alice") == 0
        assert mine.stats().chunks == 0
        assert (hits(mine, DOCUMENTS[1:], namespace="alice") > 0) == (how == "forget")
        mine.close()

    process = in_child(child)
    os.read(ready[0], 1)
    count = engine.forget(DOCUMENTS[0], namespace="alice") if how == "forget" else engine.clear("alice")
    assert count == (1 if how == "forget" else len(DOCUMENTS))
    os.write(gone[1], b".")
    wait_for(process)
    for end in (*ready, *gone):
        os.close(end)
    engine.close()


def test_time_to_live_is_the_writers_or_the_readers_whichever_is_shorter(tmp_path):
    writer = on(tmp_path, ttl_s=3.0)
    writer.warm(DOCUMENTS)
    begun = time.time()
    endless, hasty = on(tmp_path), on(tmp_path, ttl_s=0.01)
    assert hits(endless, DOCUMENTS) > 0
    endless._library._store.flush()
    assert endless.stats().chunks == len(DOCUMENTS)
    assert hits(hasty, DOCUMENTS) == 0
    time.sleep(max(0.0, begun + 3.1 - time.time()))
    for engine in (writer, endless):
        assert hits(engine, DOCUMENTS) == 0
        assert engine.stats().chunks == 0
        engine.close()
    hasty.close()
    on(tmp_path).close()
    assert not list(files_in(tmp_path))


def folder_bytes(folder: Path) -> bytes:
    return b"\0".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


def marks_of(engine: Engine, namespace: str) -> dict[str, bytes]:
    """Bytes that only this tenant can have: its name, its ids, its keys and its KV."""
    engine._library._store.flush()
    store, marks = engine._library._store, {"name": namespace.encode()}
    for number, header in enumerate(store.headers_in(namespace)):
        marks[f"ids {number}"] = header.tokens[4:12].tobytes()
        marks[f"key {number}"] = header.key.encode()
        with store.pin([header.key]) as (chunk,):
            for name, tensor in chunk.kv.tensors().items():
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                middle = len(raw) // 2
                marks[f"{name} {number}"] = raw[middle : middle + 32].numpy().tobytes()
    return marks


def held_by(root: object, *without: object) -> bytes:
    """Bytes of all texts, ids and tensors that can be reached from an object."""
    seen, todo, parts = {id(each) for each in without}, [root], list[bytes]()
    while todo:
        here = todo.pop()
        if id(here) in seen or isinstance(here, type | types.ModuleType | types.CodeType | torch.nn.Module):
            continue
        seen.add(id(here))
        if isinstance(here, str):
            parts.append(here.encode("utf-8", "surrogatepass"))
        elif isinstance(here, bytes | bytearray | memoryview):
            parts.append(bytes(here))
        elif isinstance(here, np.ndarray):
            parts.append(here.tobytes())
        elif isinstance(here, torch.Tensor):
            parts.append(here.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(here, types.FunctionType):
            todo += [here.__closure__, here.__defaults__, here.__kwdefaults__, here.__dict__]
        else:
            todo += gc.get_referents(here)
    return b"\0".join(parts)


def tenant_with_everything(folder: Path, disk: bool, **config: Any) -> Engine:
    """An engine that has done for `TENANT` whatever engines do, and a little for somebody else."""
    engine = on(folder / "store" if disk else None, pack_tokens=200, trace_path=folder / "trace", **config)
    engine.warm(DOCUMENTS, namespace=TENANT)
    engine.warm(text(6, 60), namespace=TENANT)
    engine.prefill(prompt_of(DOCUMENTS[::-1]), namespace=TENANT)
    engine.prefill(text(7, 80), namespace=TENANT)
    next(engine.stream(text(8, 80), namespace=TENANT, sampling=SamplingParams(max_tokens=2)))
    engine.warm(text(9, 60), namespace="other")
    return engine


TENANT = "tenant-whose-name-nobody-else-has"


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("disk", [True, False])
def test_clearing_a_tenant_leaves_nothing_of_it_in_files_or_memory(tmp_path, disk, bits):
    engine = tenant_with_everything(tmp_path, disk, kv_bits=bits)
    marks = marks_of(engine, TENANT)
    kinds = {mark.rstrip("0123456789 ") for mark in marks}
    assert {"name", "ids", "key"} < kinds
    held, files = held_by(engine, engine.model, engine.tokenizer), folder_bytes(tmp_path)
    for mark, raw in marks.items():
        assert raw in held or raw in files, mark
    for kind in kinds:
        assert not disk or any(raw in files for mark, raw in marks.items() if mark.startswith(kind)), kind
    assert engine.clear(TENANT) > len(DOCUMENTS)
    gc.collect()
    held, files = held_by(engine, engine.model, engine.tokenizer), folder_bytes(tmp_path)
    assert [mark for mark, raw in marks.items() if raw in files] == []
    # Eviction remembers for a while, as hashes, what has left.
    left = [mark for mark, raw in marks.items() if raw in held and not mark.startswith("key ")]
    assert set(left) <= ({"name"} if disk else set())  # `DiskReader` knows which scopes it has looked for
    assert hits(engine, [text(9, 60)], namespace="other") > 0
    engine.close()
    assert not [mark for mark, raw in marks.items() if raw in folder_bytes(tmp_path)]


# ---- updates of documents --------------------------------------------------------------------------------------------


def gone(engine: Engine, folder: Path, texts: list[str]) -> bool:
    """Whether nothing of the texts can be found, and none of their ids lie in the folder."""
    assert texts
    engine._library._store.flush()
    lying = folder_bytes(folder)
    ids = [np.asarray(engine.tokenize(each)[4:16], dtype="<i4").tobytes() for each in texts]
    return not any(raw in lying for raw in ids) and all(hits(engine, [each]) <= 20 for each in texts)


@pytest.mark.parametrize("way", ["add_documents", "index"])
def test_a_changed_document_of_langchain_leaves_no_stale_kv(tmp_path, way):
    engine = on(tmp_path, pack_tokens=300)
    store = LangChainStore(InMemoryVectorStore(FAKE), engine)
    old = [Document(page_content=each, id=f"d{n}", metadata={"source": f"s{n}"}) for n, each in enumerate(DOCUMENTS)]
    new = [Document(page_content=text(66, 40), id="d1", metadata={"source": "s1"})]
    if way == "add_documents":
        store.add_documents(old)
        assert not gone(engine, tmp_path, DOCUMENTS[1:2])
        store.add_documents(new)
    else:
        records = InMemoryRecordManager(namespace="n")
        records.create_schema()
        options = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "blake2b"}
        index(old, records, store, **options)
        assert not gone(engine, tmp_path, DOCUMENTS[1:2])
        assert index(new, records, store, **options)["num_deleted"] == 1
    assert gone(engine, tmp_path, DOCUMENTS[1:2])
    engine.close()
    again = on(tmp_path)
    assert gone(again, tmp_path, DOCUMENTS[1:2])
    assert all(hits(again, [each]) > 20 for each in (DOCUMENTS[0], DOCUMENTS[2], text(66, 40)))
    again.close()


@pytest.mark.parametrize("way", ["update_ref_doc", "refresh_ref_docs"])
def test_a_changed_document_of_llama_index_leaves_no_stale_kv(tmp_path, way):
    engine = on(tmp_path, wide_model(), pack_tokens=300)
    store = LlamaIndexStore(SimpleVectorStore(), engine)
    old = [LlamaDocument(text=each, id_=f"d{n}") for n, each in enumerate(DOCUMENTS)]
    context = StorageContext.from_defaults(vector_store=store)
    made = VectorStoreIndex.from_documents(old, context, embed_model=EMBEDDING)
    assert not gone(engine, tmp_path, DOCUMENTS[1:2])
    new = LlamaDocument(text=text(66, 40), id_="d1")
    if way == "update_ref_doc":
        made.update_ref_doc(new)
    else:
        assert made.refresh_ref_docs([old[0], new, *old[2:]]) == [False, True, False, False]
    assert gone(engine, tmp_path, DOCUMENTS[1:2])
    engine.close()
    again = on(tmp_path, wide_model())
    assert gone(again, tmp_path, DOCUMENTS[1:2])
    assert all(hits(again, [each]) > 20 for each in (DOCUMENTS[0], DOCUMENTS[2], text(66, 40)))
    again.close()
