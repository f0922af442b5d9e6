"""Engines with a disk: what one ingests is warm in the next, for the same tenant and model only, and slows nobody."""

from __future__ import annotations

import gc
import logging
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import ConfigError, Engine, EngineConfig, SamplingParams
from kvboost_rag.calibration_text import PASSAGES
from kvboost_rag.errors import StoreError
from kvboost_rag.store import upkeep
from kvboost_rag.store.disk import DiskStore
from tests.disk_chunks import files_in, in_child, needs_fork, wait_for
from tests.tiny import LIMIT, Forwards, engine_of, new_model, off_by, prompt_of, text

DOCUMENTS = [text(seed, 40) for seed in range(100, 106)]
TOKEN_BYTES = 3 * 2 * (16 + 16) * 4


def on(path: Path, model: Any = "llama", **config: Any) -> Engine:
    return engine_of(model, disk_path=path, **config)


def reused(engine: Engine, documents: list[str], **options: Any) -> int:
    """Tokens of a prompt that were not computed."""
    usage = engine.prefill(prompt_of(documents), store=False, **options).usage
    return usage.exact_tokens + usage.approximate_tokens


def test_without_a_path_there_is_no_disk(tmp_path):
    engine = engine_of()
    assert engine.warm(DOCUMENTS).on_disk == 0
    assert engine.stats().disk is None


def test_what_was_warmed_is_warm_after_a_restart(tmp_path):
    engine = on(tmp_path, repair="none")
    report = engine.warm(DOCUMENTS)
    assert report.on_disk == report.chunks == len(DOCUMENTS)
    expected = engine.prefill(prompt_of(DOCUMENTS[::-1]), store=False)
    engine.close()

    again = on(tmp_path, repair="none")
    found = again.prefill(prompt_of(DOCUMENTS[::-1]), store=False)
    assert torch.equal(found.logits, expected.logits)
    assert found.usage == expected.usage
    disk = again.stats().disk
    assert disk.loads == len(DOCUMENTS)
    assert found.timing.load_s > 0
    with Forwards(again.model) as forwards:
        assert again.warm(DOCUMENTS).already_warm == len(DOCUMENTS)
    assert forwards.rows == []
    again.close()


def test_exact_hits_come_from_disk_bit_for_bit(tmp_path):
    prompt = prompt_of(DOCUMENTS)
    engine = on(tmp_path)
    expected = engine.generate(prompt, sampling=SamplingParams(max_tokens=5)).token_ids
    engine.close()
    again = on(tmp_path)
    found = again.prefill(prompt)
    assert found.usage.exact_tokens == found.usage.prompt_tokens - 1
    assert off_by(again, found) < LIMIT
    assert again.generate(prompt, sampling=SamplingParams(max_tokens=5)).token_ids == expected
    again.close()


@needs_fork
def test_it_is_warm_in_another_process(tmp_path):
    engine = on(tmp_path)

    def child() -> None:
        mine = on(tmp_path)
        mine.warm(DOCUMENTS)
        mine.close()

    before = reused(engine, DOCUMENTS)
    wait_for(in_child(child))
    assert before == 0
    assert reused(engine, DOCUMENTS) > 0  # and the engine that was there before sees it without a restart
    engine.close()


def test_only_the_files_of_the_hit_are_read(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    engine.close()
    again = on(tmp_path)
    assert reused(again, DOCUMENTS[2:4]) > 0
    assert again.stats().disk.loads == 2
    again.close()


@pytest.mark.parametrize("bits", [16, 8])
def test_every_codec_comes_back_from_disk(tmp_path, bits):
    engine = on(tmp_path, "qwen2", kv_bits=bits)
    engine.warm(DOCUMENTS)
    expected = engine.prefill(prompt_of(DOCUMENTS), store=False)
    engine.close()
    again = on(tmp_path, "qwen2", kv_bits=bits)
    assert torch.equal(again.prefill(prompt_of(DOCUMENTS), store=False).logits, expected.logits)
    assert again.stats().disk.loads > 0
    again.close()
    other = on(tmp_path, "qwen2", kv_bits=8 if bits == 16 else 16)
    assert reused(other, DOCUMENTS) == 0
    other.close()


def test_another_tenant_another_model_and_other_weights_miss(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS, namespace="alice")
    engine.close()
    again = on(tmp_path)
    assert reused(again, DOCUMENTS, namespace="bob") == 0
    assert reused(again, DOCUMENTS, namespace="alice") > 0
    again.close()
    for model in (new_model("llama", seed=1), new_model("llama").to(torch.bfloat16), "mistral"):
        other = on(tmp_path, model)
        assert reused(other, DOCUMENTS, namespace="alice") == 0
        other.close()


def test_what_ram_evicts_is_found_on_disk_and_comes_back_to_ram_when_there_is_room(tmp_path):
    small = on(tmp_path, ram_budget_bytes=TOKEN_BYTES * 130, served_share=0.0, repair="none")
    small.warm(DOCUMENTS)
    assert small.stats().chunks < len(DOCUMENTS)
    everything = reused(small, DOCUMENTS)
    assert everything > 0
    small.close()
    large = on(tmp_path, served_share=0.0, repair="none")
    assert large.stats().chunks == 0
    assert reused(large, DOCUMENTS) == everything
    large._library._store.flush()
    assert large.stats().chunks == len(DOCUMENTS)
    loads = large.stats().disk.loads
    assert reused(large, DOCUMENTS) == everything
    assert large.stats().disk.loads == loads
    large.close()


def test_no_ram_at_all_still_serves_from_disk(tmp_path):
    engine = on(tmp_path, ram_budget_bytes=0)
    report = engine.warm(DOCUMENTS)
    assert (report.rejected, report.on_disk) == (0, len(DOCUMENTS))
    assert reused(engine, DOCUMENTS) > 0
    engine.close()


def test_text_seen_in_prompts_is_written_behind_and_served_prompts_are_not(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    engine.prefill(prompt_of(DOCUMENTS))
    engine.close()
    store = DiskStore(tmp_path, 1 << 30)
    origins = {header.origin for header in store.scan()}
    store.close()
    assert "served" not in origins
    engine = on(tmp_path)
    engine.prefill(text(500, 60))
    engine.close()
    store = DiskStore(tmp_path, 1 << 30)
    assert "prompt" in {header.origin for header in store.scan()}
    store.close()


def test_prompts_do_not_wait_for_a_slow_disk_and_warming_does(tmp_path, monkeypatch):
    put, gate = DiskStore.put, threading.Event()

    def slow(self: DiskStore, *arguments: Any) -> bool:
        gate.wait(20)
        return put(self, *arguments)

    monkeypatch.setattr(DiskStore, "put", slow)
    engine = on(tmp_path, write_behind_bytes=TOKEN_BYTES * 100)
    for seed in range(600, 606):
        engine.prefill(text(seed, 60))
    disk = engine.stats().disk
    assert disk.unwritten > 0
    assert disk.waiting_bytes <= TOKEN_BYTES * 120
    assert reused(engine, [text(600, 60)]) > 0  # from RAM
    threading.Timer(0.3, gate.set).start()
    report = engine.warm(DOCUMENTS)
    assert report.on_disk == len(DOCUMENTS)
    engine.close()
    assert upkeep.verify(tmp_path).intact >= len(DOCUMENTS)


def test_the_disk_budget_holds_and_the_report_tells_what_is_lost(tmp_path, caplog):
    engine = on(tmp_path, disk_budget_bytes=3 * 60_000, ram_budget_bytes=0)
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        report = engine.warm(DOCUMENTS)
    disk = engine.stats().disk
    assert disk.stored_bytes <= disk.budget_bytes
    assert report.on_disk == disk.chunks < len(DOCUMENTS)
    assert report.evicted == len(DOCUMENTS) - disk.chunks
    assert "disk_budget_bytes" in caplog.text
    engine.close()


def test_a_disk_that_is_slower_than_the_model_is_left_alone(tmp_path):
    prompt = prompt_of(DOCUMENTS)
    engine = on(tmp_path)
    engine.prefill(prompt)
    engine.close()
    again = on(tmp_path, fallback=True, ram_budget_bytes=0)
    assert again.prefill(prompt, reuse="exact").usage.exact_tokens > 0
    again._library._store.disk.tally.loaded(1, 100.0)  # as from a disk that takes minutes
    found = again.prefill(prompt, reuse="exact")
    assert found.usage.exact_tokens == 0
    assert found.usage.stored_tokens == 0
    assert off_by(again, found) < LIMIT
    again.close()


@pytest.mark.model
@pytest.mark.slow
def test_the_command_line_warms_the_real_model_for_other_processes(model_path, tmp_path):
    passages = tmp_path / "passages"
    passages.mkdir()
    for number, passage in enumerate(PASSAGES):
        (passages / f"{number}.txt").write_text(passage, encoding="utf-8")
    call = [sys.executable, "-c", "import sys; from kvboost_rag.cli import main; sys.exit(main())"]
    options = ["--model", str(model_path), "--store", str(tmp_path / "store"), "--namespace", "alice"]
    subprocess.run([*call, "warm", str(passages), *options], check=True, timeout=600)
    config = EngineConfig(disk_path=tmp_path / "store", fallback=False, selector="query")
    with Engine.from_pretrained(str(model_path), config=config) as engine:
        prompt = [{"role": "user", "content": "Context:\n\n" + "\n\n".join(PASSAGES[::-1]) + "\n\nWhat is this?"}]
        found = engine.prefill(prompt, namespace="alice", store=False).usage
        assert found.approximate_tokens > 0.7 * found.prompt_tokens
        assert engine.prefill(prompt, namespace="bob", store=False).usage.new_tokens == found.prompt_tokens
        assert engine.stats().disk.loads == len(PASSAGES)


# ---- deletion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clear", "forget"])
def test_forgetting_reaches_disk_and_ram_and_other_processes(tmp_path, how):
    engine, other = on(tmp_path), on(tmp_path)
    engine.warm(DOCUMENTS, namespace="alice")
    engine.warm(DOCUMENTS, namespace="bob")
    assert reused(other, DOCUMENTS, namespace="alice") > 0
    other._library._store.flush()  # it has them in RAM now
    gone = engine.clear("alice") if how == "clear" else engine.forget(DOCUMENTS, namespace="alice")
    assert gone == len(DOCUMENTS)
    for one in (engine, other):
        assert reused(one, DOCUMENTS, namespace="alice") == 0
        assert reused(one, DOCUMENTS, namespace="bob") > 0
        one.close()
    again = on(tmp_path)
    assert reused(again, DOCUMENTS, namespace="alice") == 0
    assert reused(again, DOCUMENTS, namespace="bob") > 0
    again.close()
    assert len(list(files_in(tmp_path))) == len(DOCUMENTS)


def test_forgetting_reaches_what_was_stored_before_this_process_began(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    engine.close()
    again = on(tmp_path)
    assert again.forget(DOCUMENTS[0]) == 1
    assert reused(again, DOCUMENTS[:1]) == 0
    assert again.clear() == len(DOCUMENTS) - 1
    assert not list(files_in(tmp_path))
    again.close()


def test_forgetting_reaches_what_waits_to_be_written(tmp_path, monkeypatch):
    put, begun, gate = DiskStore.put, threading.Event(), threading.Event()

    def slow(self: DiskStore, *arguments: Any) -> bool:
        begun.set()
        gate.wait(20)
        return put(self, *arguments)

    monkeypatch.setattr(DiskStore, "put", slow)
    engine = on(tmp_path)
    for document in DOCUMENTS[:3]:
        engine.prefill(document)
    assert begun.wait(10)
    engine.clear()
    gate.set()
    engine.close()
    assert not list(files_in(tmp_path))


def test_clearing_leaves_no_byte_of_a_tenant(tmp_path):
    name = "tenant-whose-name-nobody-else-has"
    engine = on(tmp_path)
    engine.warm(DOCUMENTS, namespace=name)
    engine.prefill(text(700, 80), namespace=name)
    engine.warm(text(701, 60), namespace="other")
    engine._library._store.flush()
    tokens = [torch.tensor(engine.tokenize(words)[4:10], dtype=torch.int32).numpy().tobytes() for words in DOCUMENTS]
    marks = [name.encode(), *tokens]
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert all(mark in data for mark in marks)
    engine.clear(name)
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(mark in data for mark in marks)
    assert reused(engine, [text(701, 60)], namespace="other") > 0
    engine.close()


@pytest.mark.parametrize("disk", [True, False])
def test_time_to_live(tmp_path, monkeypatch, disk):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    engine = engine_of(ttl_s=100.0, disk_path=tmp_path if disk else None)
    engine.warm(DOCUMENTS[:3])
    now += 60
    engine.warm(DOCUMENTS[3:])
    assert reused(engine, DOCUMENTS[:1]) > 0
    now += 60
    assert reused(engine, DOCUMENTS[:3]) == 0
    assert reused(engine, DOCUMENTS[3:]) > 0
    assert engine.stats().chunks == 3
    if disk:
        engine._library._store.flush()
        assert len(list(files_in(tmp_path))) == 3
        engine.close()
        engine = on(tmp_path, ttl_s=100.0)
        assert reused(engine, DOCUMENTS[3:]) > 0
        now += 60
        assert reused(engine, DOCUMENTS[3:]) == 0
        assert engine.warm(DOCUMENTS).on_disk == len(DOCUMENTS)
    engine.close()


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_and_vanished_entries_are_computed_again(tmp_path, caplog):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    expected = engine.prefill(prompt_of(DOCUMENTS), store=False)
    engine.close()
    first, second, *_ = sorted(files_in(tmp_path))
    data = bytearray(first.read_bytes())
    data[-100] ^= 8
    first.write_bytes(data)
    second.unlink()
    again = on(tmp_path)
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        found = again.prefill(prompt_of(DOCUMENTS), store=False)
    assert 0 < found.usage.approximate_tokens < expected.usage.approximate_tokens
    disk = again.stats().disk
    assert (disk.bad, disk.vanished) == (1, 1)
    assert "damaged" in caplog.text
    assert again.warm(DOCUMENTS).on_disk == 2
    assert again.prefill(prompt_of(DOCUMENTS), store=False).usage == expected.usage
    again.close()


def test_a_disk_that_fails_in_the_middle_leaves_ram(tmp_path, caplog):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS[:3])
    engine._library._store.disk._reads.close()  # as a damaged catalogue would
    engine._library._store.disk._writes.close()
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        report = engine.warm(DOCUMENTS[3:])
        assert reused(engine, DOCUMENTS) > 0
    assert report.on_disk == 0
    assert report.chunks == 3
    assert "could not be written" in caplog.text
    engine.close()


def test_a_folder_that_cannot_be_used_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file.*disk_path"):
        on(tmp_path / "file")
    with pytest.raises(StoreError, match="no catalogue"):
        on(tmp_path / "missing", disk_read_only=True)


def test_reading_only(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    engine.close()
    before = sorted(path for path in tmp_path.rglob("*") if "-shm" not in path.name and "-wal" not in path.name)
    reader = on(tmp_path, disk_read_only=True)
    assert reused(reader, DOCUMENTS) > 0
    assert reader.warm(text(900, 60)).on_disk == 0
    assert reader.stats().disk.read_only
    reader.close()
    after = sorted(path for path in tmp_path.rglob("*") if "-shm" not in path.name and "-wal" not in path.name)
    assert before == after


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"disk_read_only": True}, "disk_path"),
        ({"disk_path": 3}, "disk_path"),
        ({"disk_path": ""}, "disk_path"),
        ({"disk_budget_bytes": -1}, "disk_budget_bytes"),
        ({"write_behind_bytes": 1.5}, "write_behind_bytes"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": 0}, "ttl_s is 0.*None"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"disk_path": "a\0b"}, "disk_path"),
        ({"disk_path": "x", "reuse": "off"}, "disk_path.*reuse.*'off'"),
        ({"trace_path": 3}, "trace_path"),
        ({"trace_path": "a\0b"}, "trace_path"),
        ({"trace_path": ""}, "trace_path"),
        ({"calibration_dir": 3}, "calibration_dir"),
        ({"namespace": "a\ud800"}, "namespace.*surrogate"),
        ({"disk_path": "x", "disk_read_only": "yes"}, "disk_read_only"),
    ],
)
def test_bad_settings_are_refused(bad, name):
    with pytest.raises(ConfigError, match=name):
        engine_of(**bad)


def test_a_namespace_that_no_file_can_name_is_refused_in_every_call(tmp_path):
    engine = on(tmp_path)
    for call in (engine.warm, engine.prefill, engine.forget):
        with pytest.raises(ConfigError, match="surrogate"):
            call(DOCUMENTS[0], namespace="a\ud800")


def test_a_folder_to_read_from_that_holds_nothing_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(StoreError, match=f"{name}.* holds no catalogue.*disk_read_only=False"):
            on(tmp_path / name, disk_read_only=True)
    (tmp_path / "file").write_text("")
    for options in ({}, {"disk_read_only": True}):
        with pytest.raises(StoreError, match=r"file is no folder.*choose another disk_path"):
            on(tmp_path / "file", **options)


# ---- life ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_nobody_closes_loses_nothing_and_leaves_nothing_open(tmp_path):
    engine = on(tmp_path)
    engine.prefill(DOCUMENTS[0])
    owners = tmp_path / "owners"
    assert len(list(owners.iterdir())) == 1
    del engine
    gc.collect()
    assert list(owners.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if "kvboost" in thread.name]
    assert upkeep.verify(tmp_path).intact == 1


def test_a_closed_engine_can_be_closed_again_and_the_folder_used_by_the_next(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS)
    engine.close()
    engine.close()
    assert engine.stats().disk is not None
    assert engine.stats().chunks == 0


def test_another_shape_of_the_model_opens_the_disk_anew(tmp_path):
    model = new_model("llama")
    engine = on(tmp_path, model)
    engine.warm(DOCUMENTS)
    assert reused(engine, DOCUMENTS) > 0
    model.to(torch.bfloat16)
    assert reused(engine, DOCUMENTS) == 0
    assert engine.warm(DOCUMENTS).on_disk == len(DOCUMENTS)
    engine.close()


@needs_fork
def test_a_forked_engine_writes_and_reads_for_itself(tmp_path):
    engine = on(tmp_path)
    engine.warm(DOCUMENTS[:3])

    def child() -> None:
        assert reused(engine, DOCUMENTS[:3]) > 0
        assert engine.warm(DOCUMENTS[3:]).on_disk == 3
        engine.close()

    wait_for(in_child(child))
    assert reused(engine, DOCUMENTS[3:]) > 0
    assert engine.warm(text(950, 50)).on_disk == 1
    engine.close()


def test_requests_and_warming_in_threads(tmp_path):
    engine = on(tmp_path, ram_budget_bytes=TOKEN_BYTES * 200)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(3):
                engine.warm([text(1000 + number * 10 + round_, 40)])
                found = engine.prefill(prompt_of([text(1000 + number * 10 + round_, 40)]))
                assert found.usage.exact_tokens + found.usage.approximate_tokens > 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert errors == []
    assert upkeep.verify(tmp_path).bad == {}
    assert os.path.isdir(tmp_path / "chunks")


def test_without_threads_chunks_are_written_by_whoever_brings_them(tmp_path, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    engine = on(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert engine.warm(DOCUMENTS).on_disk == len(DOCUMENTS)
        engine.close()


@pytest.mark.parametrize("column", ["tokens", "history"])
def test_ids_of_the_catalogue_that_are_not_those_of_the_file_are_no_hit(tmp_path, column):
    engine = on(tmp_path)
    engine.prefill(DOCUMENTS[0])
    ids = engine.tokenize(DOCUMENTS[0])
    engine.close()
    forged = [*ids[:10], 77, *ids[11:]]
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        raw = torch.tensor(forged if column == "tokens" else [5] * 4, dtype=torch.int32).numpy().tobytes()
        db.execute(f"UPDATE ids SET {column} = ?", (raw,))
        if column == "history":
            db.execute("UPDATE chunks SET base = 4")
    db.close()
    again = on(tmp_path, served_share=0.0)
    prompt = [*forged, 9] if column == "tokens" else [5] * 4 + [*ids, 9]
    found = again.prefill(prompt, reuse="exact", store=False)
    assert found.usage.exact_tokens == 0
    assert off_by(again, found) < LIMIT
    again.close()


def stored_keys(engine: Engine) -> list[str]:
    return [header.key for header in engine._library.headers_in("default")]


def test_what_is_forgotten_while_a_request_reads_it_is_wiped_by_the_next(tmp_path):
    with on(tmp_path) as engine:
        engine.warm(DOCUMENTS)
    engine = on(tmp_path, ram_budget_bytes=0)
    assert reused(engine, DOCUMENTS) > 0
    store = engine._library._store
    with store.pin(stored_keys(engine)) as chunks:
        engine.clear()
        assert all(chunk is not None for chunk in chunks)
        assert len(list(files_in(tmp_path))) == len(DOCUMENTS)
    del chunks
    reused(engine, DOCUMENTS)
    store.flush()
    assert not list(files_in(tmp_path))
    engine.close()


def test_what_is_forgotten_while_a_request_reads_it_is_wiped_when_the_engine_is_closed(tmp_path):
    engine = on(tmp_path, ram_budget_bytes=0)
    engine.warm(DOCUMENTS)
    assert reused(engine, DOCUMENTS) > 0
    with engine._library._store.pin(stored_keys(engine)) as chunks:
        engine.clear()
    del chunks
    engine.close()
    assert not list(files_in(tmp_path))


def test_what_is_forgotten_while_it_is_copied_to_ram_stays_forgotten(tmp_path, monkeypatch):
    with on(tmp_path) as engine:
        engine.warm(DOCUMENTS)
    engine = on(tmp_path)
    assert reused(engine, DOCUMENTS[:1]) > 0
    store = engine._library._store
    store.flush()
    keys = stored_keys(engine)
    store.clear_ram()
    hide, loaded = store.disk.hide, [store.disk.get(key) for key in keys]

    def late(gone: list[str]) -> None:
        for chunk in loaded:
            store._copy(chunk)
        hide(gone)

    monkeypatch.setattr(store.disk, "hide", late)
    engine.clear()
    assert store.stats().chunks == 0
    assert not [key for key in keys if key in store]
    engine.close()


@pytest.mark.parametrize("disk", [True, False])
def test_what_was_stored_again_has_a_time_of_its_own(tmp_path, monkeypatch, disk):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    engine = engine_of(ttl_s=100.0, disk_path=tmp_path if disk else None)
    engine.warm(DOCUMENTS[:2])
    engine.forget(DOCUMENTS[:2])
    now += 60
    engine.warm(DOCUMENTS[:2])
    now += 60
    assert reused(engine, DOCUMENTS[:2]) > 0
    now += 60
    assert reused(engine, DOCUMENTS[:2]) == 0
    engine.close()


def test_times_of_what_left_are_not_remembered():
    engine = engine_of(ttl_s=1e6, store_prompts=False)
    for _ in range(100):
        engine.warm(DOCUMENTS[0])
        engine.clear()
    assert len(engine._library._ends) < 80
