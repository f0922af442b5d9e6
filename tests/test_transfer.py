"""KV of one model as KV of another: fitted, judged, used, and refused where it must be."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvboost_rag import ConfigError, Engine, EngineConfig, SamplingParams, TransferError, TransferMap
from kvboost_rag.transfer.fitting import FitOptions, fit
from kvboost_rag.transfer.gate import MAPPED, NATIVE, NOTHING, WRONG, Row, repaired, verdict
from kvboost_rag.transfer.making import make
from kvboost_rag.transfer.models import Reader
from kvboost_rag.transfer.texts import split
from tests.tiny import SETTINGS, kl, model_of, new_model, plain_logits, prompt_of, text, tokenizer_of

DOCUMENTS = [text(100 + seed, 90) for seed in range(120)]
LENGTH = 256


def twin_of(model: Any, seed: int = 1) -> Any:
    """A model of the same answers with other KV: keys scaled, values turned, and both undone behind attention.

    So the KV of either is an exact linear map of the other's.
    """
    twin = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    config = model.config
    heads, kv_heads, dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        model.model.layers[0].self_attn.head_dim,
    )
    for layer in twin.model.layers:
        attention = layer.self_attn
        scale = float(torch.rand(1, generator=draw)) + 0.5
        for weight in attention.k_proj.parameters():
            weight.data *= scale
        for weight in attention.q_proj.parameters():
            weight.data /= scale
        turn = torch.linalg.qr(torch.randn(dim, dim, generator=draw))[0]
        both = torch.block_diag(*[turn] * kv_heads)
        attention.v_proj.weight.data = both @ attention.v_proj.weight.data
        if attention.v_proj.bias is not None:
            attention.v_proj.bias.data = both @ attention.v_proj.bias.data
        attention.o_proj.weight.data = attention.o_proj.weight.data @ torch.block_diag(*[turn.T] * heads)
    return twin


@pytest.fixture(scope="module")
def source() -> Reader:
    return Reader.of("small", model_of("qwen2"), tokenizer_of())


@pytest.fixture(scope="module")
def target() -> Reader:
    return Reader.of("twin", twin_of(model_of("qwen2")), tokenizer_of())


@pytest.fixture(scope="module")
def mapping(source: Reader, target: Reader, tmp_path_factory: pytest.TempPathFactory) -> TransferMap:
    path = tmp_path_factory.mktemp("maps") / "small-to-twin.safetensors"
    made = make(source, target, DOCUMENTS, path, sequence_tokens=LENGTH)
    assert not path.with_name(path.name + ".partial").exists()
    loaded = TransferMap.load(path)
    assert (loaded.source, loaded.target, loaded.figures, loaded.refused) == (
        made.source, made.target, made.figures, made.refused,
    )  # fmt: skip
    return loaded


def engine(reader: Reader, *, transfer: Any = None, given: Engine | None = None, **config: Any) -> Engine:
    settings = EngineConfig(**{**SETTINGS, **config})
    return Engine(reader.executor.runner.model, reader.tokenizer, settings, transfer=transfer, source=given)


# ---- fitting and judging ---------------------------------------------------------------------------------------------


def test_a_linear_relation_is_found(mapping: TransferMap) -> None:
    assert mapping.accepted
    rows = mapping.figures
    assert rows[NATIVE]["fidelity"] == pytest.approx(1.0, abs=1e-4)
    assert rows[MAPPED]["fidelity"] > 0.9
    assert rows[NOTHING]["fidelity"] == pytest.approx(0.0, abs=1e-6)
    assert rows[WRONG]["fidelity"] < rows[MAPPED]["fidelity"]
    assert [rows[repaired(budget)]["charged"] for budget in (0.05, 0.1, 0.2)] == sorted(
        rows[repaired(budget)]["charged"] for budget in (0.05, 0.1, 0.2)
    )
    assert min(mapping.about["explained"]["keys"] + mapping.about["explained"]["values"]) > 0.95
    assert min(rows[MAPPED]["cosines"]) > 0.9
    assert len(rows[MAPPED]["cosines"]) == mapping.target.layers


def test_mapped_kv_is_the_targets(mapping: TransferMap, source: Reader, target: Reader) -> None:
    ids = source.encode(text(7, 200))[:LENGTH]
    own = target.read(ids)
    read = source.read(ids)
    keys, values = mapping.apply(read.keys, read.values)
    for mapped, native in ((keys, own.keys), (values, own.values)):
        assert mapped.shape == native.shape
        assert float((mapped - native)[:, :, 4:].pow(2).sum() / native[:, :, 4:].pow(2).sum()) < 0.02


@pytest.mark.parametrize("all_heads", [False, True])
def test_other_shapes(source: Reader, all_heads: bool, tmp_path: Path) -> None:
    """More layers, other heads, another head size: nothing is linear here, so only shapes and honesty count."""
    other = new_model("qwen2", seed=3, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    larger = Reader.of("larger", other, tokenizer_of())
    options = FitOptions(sources=2, all_heads=all_heads)
    made = make(source, larger, DOCUMENTS, tmp_path / "map", sequence_tokens=LENGTH, options=options)
    read = source.read(source.encode(DOCUMENTS[0]))
    keys, values = made.apply(read.keys, read.values)
    assert keys.shape == (4, 1, read.keys.shape[2], 32)
    assert values.shape == keys.shape
    assert made.keys.layers.shape == (4, 2)
    assert made.figures[MAPPED]["kl"] < made.figures[NOTHING]["kl"] or not made.accepted


def test_norms_of_keys_belong_to_what_is_mapped(tmp_path: Path) -> None:
    model = model_of("qwen3")
    readers = (Reader.of("a", model, tokenizer_of()), Reader.of("b", twin_values(model), tokenizer_of()))
    made = make(*readers, DOCUMENTS, tmp_path / "map", sequence_tokens=LENGTH)
    assert min(made.about["explained"]["keys"]) > 0.95
    assert made.accepted


def twin_values(model: Any) -> Any:
    """A twin of a model that norms its keys: a norm would undo their scale, so only values are turned."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.self_attn.v_proj.weight.data *= 2
        layer.self_attn.o_proj.weight.data /= 2
    return twin


def test_a_map_that_tells_nothing_is_refused(source: Reader, target: Reader, tmp_path: Path) -> None:
    made = make(_Shuffled(source), target, DOCUMENTS, tmp_path / "map", sequence_tokens=LENGTH)  # type: ignore[arg-type]
    assert "no better than wrong document" in str(made.refused)
    assert not TransferMap.load(tmp_path / "map").accepted


class _Shuffled:
    """A source whose KV belongs to other tokens than those it is said to."""

    def __init__(self, reader: Reader) -> None:
        self.side, self.executor, self.rope, self.encode = reader.side, reader.executor, reader.rope, reader.encode
        self._reader = reader

    def read(self, ids: Any, **options: Any) -> Any:
        read = self._reader.read(ids, **options)
        return replace(read, keys=read.keys.flip(2), values=read.values.flip(2))


def test_the_verdict() -> None:
    def row(kl: float, nll: float = 2.0) -> Row:
        return Row(nll, kl, 0.5, 0.5, 0.1, None)

    good = {NATIVE: row(0.0), MAPPED: row(0.1), WRONG: row(0.3), NOTHING: row(0.5, 2.5)}
    assert verdict(good) is None
    assert "no better than no context" in str(verdict(good | {MAPPED: row(0.5)}))
    assert "no better than wrong document" in str(verdict(good | {MAPPED: row(0.4)}))
    assert "2.6 nats per token" in str(verdict(good | {MAPPED: row(0.1, 2.6)}))
    assert verdict(good | {MAPPED: row(0.1, 2.6), NATIVE: row(0.0, 2.7)}) is None  # text that gains nobody anything
    assert verdict(good | {MAPPED: row(float("nan"))}) is not None


def test_sums_do_not_depend_on_how_text_is_cut_and_go_on(source: Reader, target: Reader, tmp_path: Path) -> None:
    texts = split([source.encode(one) for one in DOCUMENTS], sequence_tokens=LENGTH)
    options, partial = FitOptions(sources=2), tmp_path / "partial"
    whole = fit(source, target, texts, options, partial=partial)
    assert partial.is_file()
    calls: list[int] = []
    counted = _Counting(source, calls)
    again = fit(counted, target, texts, options, partial=partial)  # type: ignore[arg-type]
    assert calls == []  # all of it came from the checkpoint
    assert torch.equal(again.keys.weight, whole.keys.weight)
    partial.write_bytes(partial.read_bytes()[:1000])
    fit(counted, target, texts, options, partial=partial)  # type: ignore[arg-type]
    assert len(calls) == len(texts.fit) + len(texts.choose)  # a torn checkpoint is none


class _Counting:
    def __init__(self, reader: Reader, calls: list[int]) -> None:
        self.side, self.rope, self._reader, self._calls = reader.side, reader.rope, reader, calls

    def read(self, ids: Any, **options: Any) -> Any:
        self._calls.append(len(ids))
        return self._reader.read(ids, **options)


# ---- use -------------------------------------------------------------------------------------------------------------


def test_what_the_source_has_read_is_mapped(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60), text(2, 60)]
    prompt = prompt_of(documents)
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        small.warm(documents)
        prefill = large.prefill(prompt)
        usage = prefill.usage
        assert usage.transferred_tokens > 0.7 * usage.prompt_tokens
        assert (usage.exact_tokens, usage.approximate_tokens) == (0, 0)
        assert usage.read_tokens + usage.new_tokens == usage.prompt_tokens
        assert usage.repaired_tokens > 0
        assert usage.computed_tokens < usage.prompt_tokens
        assert {segment.kind for segment in prefill.plan.segments} == {"compute", "transferred"}
        assert 0 < prefill.timing.transfer_s <= prefill.timing.load_s
        full = plain_logits(large.model, prefill.token_ids)
        nothing = plain_logits(large.model, large.tokenize(prompt_of([])))
        assert kl(full, prefill.logits) < 0.5 * kl(full, nothing)
        assert large.stats().transferred_tokens == usage.transferred_tokens


def test_mapped_kv_is_never_stored(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60), text(2, 60)]
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        small.warm(documents)
        first = large.prefill(prompt_of(documents))
        again = large.prefill(prompt_of(documents, question="Which stone?"))
        assert again.usage.transferred_tokens == first.usage.transferred_tokens
        small.clear()
        alone = large.prefill(prompt_of(documents, question="Which garden?"))
        assert alone.usage.transferred_tokens == 0
        assert alone.usage.read_tokens < 0.3 * alone.usage.prompt_tokens  # what stands around the documents
        own = large.prefill(prompt_of(documents[::-1], question="Which copper?"))  # computed by now, so its own
        assert own.usage.transferred_tokens == 0
        assert own.usage.approximate_tokens > 0.7 * own.usage.prompt_tokens


def test_its_own_kv_comes_first(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60), text(2, 60)]
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        small.warm(documents)
        large.warm(documents[1])
        prefill = large.prefill(prompt_of(documents))
        kinds = [segment.kind for segment in prefill.plan.segments if segment.kind != "compute"]
        assert kinds == ["transferred", "approximate"]
        assert {run.mapped for run in prefill.plan.runs} == {True, False}


def test_tenants_stay_apart(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60)]
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        small.warm(documents, namespace="red")
        assert large.prefill(prompt_of(documents), namespace="blue").usage.read_tokens == 0
        assert large.prefill(prompt_of(documents), namespace="red").usage.transferred_tokens > 0


def test_exact_answers_take_nothing_mapped(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60)]
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        small.warm(documents)
        for mode in ("exact", "off"):
            prefill = large.prefill(prompt_of(documents), reuse=mode, store=False)  # type: ignore[arg-type]
            assert prefill.usage.read_tokens == 0
            assert kl(plain_logits(large.model, prefill.token_ids), prefill.logits) < 1e-6


def test_everything_repaired_is_a_full_prefill(source: Reader, target: Reader, mapping: TransferMap) -> None:
    documents = [text(1, 60)]
    with engine(source) as small, engine(target, transfer=mapping, given=small, repair_ratio=1.0) as large:
        small.warm(documents)
        prefill = large.prefill(prompt_of(documents))
        assert prefill.usage.transferred_tokens > 0
        assert kl(plain_logits(large.model, prefill.token_ids), prefill.logits) < 1e-6


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_through_a_disk_that_both_use(
    source: Reader, target: Reader, mapping: TransferMap, tmp_path: Path, kv_bits: Any
) -> None:
    documents = [text(1, 60), text(2, 60)]
    with engine(source, disk_path=tmp_path / "kv", kv_bits=kv_bits) as small:
        assert small.warm(documents).on_disk > 0
    with engine(target, transfer=mapping, disk_path=tmp_path / "kv") as large:
        prefill = large.prefill(prompt_of(documents))
        assert prefill.usage.transferred_tokens > 0.7 * prefill.usage.prompt_tokens
        full = plain_logits(large.model, prefill.token_ids)
        nothing = plain_logits(large.model, large.tokenize(prompt_of([])))
        assert kl(full, prefill.logits) < 0.5 * kl(full, nothing)


def test_a_conversation_goes_on_with_the_other_model(source: Reader, target: Reader, mapping: TransferMap) -> None:
    chat = [{"role": "user", "content": prompt_of([text(1, 60)])}]
    with engine(source) as small, engine(target, transfer=mapping, given=small) as large:
        said = small.generate(chat, sampling=SamplingParams(max_tokens=12)).text
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "And which garden?"}]
        answer = large.generate(chat, sampling=SamplingParams(max_tokens=4))
        assert answer.usage.transferred_tokens > 0.6 * answer.usage.prompt_tokens
        assert answer.usage.completion_tokens > 0


def test_a_refused_map_means_a_normal_prefill(
    source: Reader, target: Reader, mapping: TransferMap, caplog: pytest.LogCaptureFixture
) -> None:
    refused = replace(mapping, refused="it is no better than no context")
    with engine(source) as small, caplog.at_level(logging.WARNING, "kvboost_rag"):
        with engine(target, transfer=refused, given=small) as large:
            small.warm(text(1, 60))
            prefill = large.prefill(prompt_of([text(1, 60)]))
        assert prefill.usage.read_tokens == 0
    assert "is not used" in caplog.text
    assert "no better than no context" in caplog.text


def test_a_source_that_is_closed(
    source: Reader, target: Reader, mapping: TransferMap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of([text(1, 60)])
    for path, still_there in ((None, False), (tmp_path / "kv", True)):
        small = engine(source, disk_path=path)
        with engine(target, transfer=mapping, given=small, disk_path=path) as large:
            small.warm(text(1, 60))
            assert large.prefill(prompt, store=False).usage.transferred_tokens > 0
            small.close()
            caplog.clear()
            with caplog.at_level(logging.WARNING, "kvboost_rag"):
                found = [large.prefill(prompt, store=False).usage.transferred_tokens > 0 for _ in range(2)]
            assert found == [still_there] * 2
            assert caplog.text.count("is closed") == 1
    with pytest.raises(ConfigError, match="source is closed"):
        engine(target, transfer=mapping, given=small)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_two_models_that_no_map_can_hold_between(source: Reader, tmp_path: Path) -> None:
    def refuse(other: Reader, what: str) -> None:
        with pytest.raises(TransferError, match=what):
            make(source, other, DOCUMENTS, tmp_path / "map", sequence_tokens=LENGTH)
        assert list(tmp_path.iterdir()) == []

    refuse(Reader.of("other tokens", twin_of(model_of("qwen2")), tokenizer_of(8)), "other tokens")
    refuse(Reader.of("llama", model_of("llama"), tokenizer_of()), "qwen2 model and the target a llama model")
    refuse(source, "the same model, which needs no map")
    with pytest.raises(ConfigError, match="with a tokenizer"):
        Reader.of("no tokenizer", model_of("qwen2"), None)


def test_too_little_text(source: Reader, target: Reader, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"too short.*8 are needed; give about 2926 tokens"):
        make(source, target, DOCUMENTS[:8], tmp_path / "map", sequence_tokens=LENGTH)
    with pytest.raises(TransferError, match="at least 256"):
        make(source, target, DOCUMENTS, tmp_path / "map", sequence_tokens=64)
    with pytest.raises(TransferError, match="the smaller window"):
        make(source, target, DOCUMENTS, tmp_path / "map", sequence_tokens=1 << 20)


@pytest.mark.parametrize(
    ("name", "value"), [("sources", 0), ("reach", -1), ("strength", 0.0), ("strength", float("nan"))]
)
def test_options_out_of_their_domain(name: str, value: Any) -> None:
    with pytest.raises(TransferError, match=f"{name} is {value}"):
        FitOptions(**{name: value})


def test_numbers_that_are_not_finite(target: Reader, tmp_path: Path) -> None:
    broken = copy.deepcopy(model_of("qwen2"))
    reader = Reader.of("broken", broken, tokenizer_of())
    broken.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(TransferError, match=r"not finite.*--dtype float32"):
        make(reader, target, DOCUMENTS, tmp_path / "map", sequence_tokens=LENGTH)


def test_files_that_are_no_whole_map(mapping: TransferMap, tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    mapping.save(path)
    assert TransferMap.load(path).accepted
    with pytest.raises(TransferError, match="there is no map"):
        TransferMap.load(tmp_path / "none")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TransferError, match="no whole map"):
        TransferMap.load(path)
    path.write_bytes(whole[:-40] + bytes(40))
    with pytest.raises(TransferError, match="damaged"):
        TransferMap.load(path)
    save_file({"keys": torch.zeros(2)}, path)
    with pytest.raises(TransferError, match="is no map for KV transfer"):
        TransferMap.load(path)
    bad = replace(mapping, values=replace(mapping.values, bias=mapping.values.bias.fill_(1.0).clone() * float("nan")))
    bad.save(path)
    with pytest.raises(TransferError, match=r"not finite, in values\.bias"):
        TransferMap.load(path)


def test_a_map_of_other_models(source: Reader, target: Reader, mapping: TransferMap) -> None:
    other = Reader.of("another revision", twin_of(model_of("qwen2"), seed=5), tokenizer_of())
    with engine(source) as small:
        with pytest.raises(TransferError, match="the map was made for twin"):
            engine(other, transfer=mapping, given=small)
        with pytest.raises(TransferError, match="the map was made from small"), engine(other) as wrong:
            engine(target, transfer=mapping, given=wrong)
        with pytest.raises(ConfigError, match="needs reuse='approximate'"):
            engine(target, transfer=mapping, given=small, reuse="exact")
        with pytest.raises(ConfigError, match="source is given without transfer"):
            engine(target, given=small)
    with pytest.raises(ConfigError, match="nowhere to take"):
        engine(target, transfer=mapping)
    with pytest.raises(TransferError, match="there is no map"):
        engine(target, transfer="nowhere.safetensors")


def test_a_full_disk_leaves_no_half_map(source: Reader, target: Reader, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TransferError, match="cannot be written"):
        make(source, target, DOCUMENTS, blocked / "map", sequence_tokens=LENGTH)
