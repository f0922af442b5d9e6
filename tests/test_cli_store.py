"""`kvboost-rag warm` and `kvboost-rag store`: what they print, what they leave, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost_rag import ConfigError, Engine, EngineConfig, cli
from kvboost_rag.store.database import NAME
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store_command import bytes_of, text_of
from tests.disk_chunks import ALICE, BOB, chunk_of, files_in
from tests.tiny import model_of, text, tokenizer_of


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of("llama").save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


@pytest.fixture
def documents(tmp_path) -> Path:
    folder = tmp_path / "documents"
    (folder / "deeper").mkdir(parents=True)
    for seed in range(5):
        (folder / ("deeper" if seed % 2 else "") / f"{seed}.md").write_text(text(seed, 40), encoding="utf-8")
    (folder / "notes.log").write_text("not a document")
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    """A store of seven chunks of two tenants."""
    store = DiskStore(tmp_path / "store", 1 << 30)
    for seed in range(7):
        store.put(chunk_of(seed, scope=BOB if seed < 2 else ALICE))
    store.close()
    return store.folder


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def as_json(capsys, *arguments: object, status: int = 0):
    assert run(*arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


# ---- warm ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_warmed_and_found_by_an_engine(model, documents, tmp_path, capsys):
    place = tmp_path / "store"
    assert run("warm", documents, "--model", model, "--store", place, "--namespace", "docs") == 0
    out = capsys.readouterr().out
    assert "5 documents: 5 computed" in out
    config = EngineConfig(disk_path=place, fallback=False, calibration_dir=None)
    with Engine.from_pretrained(str(model), config=config) as engine:
        prompt = f"Read this.\n\n{text(3, 40)}\n\nWhich river?"
        assert engine.prefill(prompt, namespace="docs").usage.approximate_tokens > 0
        assert engine.prefill(prompt).usage.approximate_tokens == 0


def test_it_goes_on_where_it_was_stopped(model, documents, tmp_path, capsys, monkeypatch):
    place, warm = tmp_path / "store", Engine.warm
    batches = 0

    def stopped(self, *arguments, **options):
        nonlocal batches
        batches += 1
        if batches == 3:
            raise KeyboardInterrupt
        return warm(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "warm", stopped)
        assert run("warm", documents, "--model", model, "--store", place, "--batch", "2") == 130
    assert "goes on from here" in capsys.readouterr().err
    report = as_json(capsys, "warm", documents, "--model", model, "--store", place, "--batch", "2")
    assert (report["already_warm"], report["computed"], report["on_disk"]) == (4, 1, 1)
    assert len(list(files_in(place))) == 5


def test_what_cannot_be_stored_is_named(model, documents, tmp_path, capsys):
    (documents / "binary.txt").write_bytes(b"\xff\xfe\xff")
    assert run("warm", documents, "--model", model, "--store", tmp_path / "a") == 1
    assert "binary.txt" in capsys.readouterr().err
    (documents / "binary.txt").unlink()
    report = as_json(
        capsys, "warm", documents, "--model", model, "--store", tmp_path / "b", "--budget", "150K", status=1
    )
    assert "--budget" in report["failed"][0]
    assert report["store_bytes"] <= 150 << 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--budget": "much"}, "no number of bytes"),
        ({"--batch": "0"}, "--batch"),
        ({"--glob": "*.pdf"}, "--glob"),
        ({"--model": "/nowhere"}, "nowhere"),
        ({"--namespace": ""}, "namespace"),
        ({"--kv-bits": "8", "--reuse": "exact"}, "kv_bits"),
    ],
)
def test_bad_use_of_warm_ends_with_2(model, documents, tmp_path, capsys, change, message):
    options = {"--model": model, "--store": tmp_path / "store", **change}
    assert run("warm", documents, *(part for pair in options.items() for part in pair)) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_missing_ends_with_2(model, tmp_path, capsys):
    assert run("warm", tmp_path / "missing", "--model", model, "--store", tmp_path / "store") == 2
    assert "no folder" in capsys.readouterr().err


# ---- store -----------------------------------------------------------------------------------------------------------


def test_ls_lists_entries_and_no_text(folder, capsys):
    assert run("store", "ls", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0].split()[:3] == ["name", "namespace", "model"]
    listed = as_json(capsys, "store", "ls", folder, "--namespace", "bob")
    assert [entry["namespace"] for entry in listed] == ["bob", "bob"]
    assert {entry["tokens"] for entry in listed} == {20}
    assert "ids" not in json.dumps(listed)


def test_stats_counts_by_tenant(folder, capsys):
    assert run("store", "stats", folder) == 0
    assert "7 chunks" in capsys.readouterr().out
    counted = as_json(capsys, "store", "stats", folder)
    assert {part["namespace"]: part["chunks"] for part in counted["scopes"]} == {"alice": 5, "bob": 2}
    assert counted["stored"] == 7


def test_verify_gc_and_rebuild(folder, capsys):
    assert run("store", "verify", folder) == 0
    assert "7 intact, 0 damaged" in capsys.readouterr().out
    bad, gone, *_ = sorted(files_in(folder))
    bad.write_bytes(b"x" * 4000)
    gone.unlink()
    found = as_json(capsys, "store", "verify", folder, status=1)
    assert (found["intact"], list(found["bad"]), found["missing"]) == (5, [bad.stem], [gone.stem])
    assert run("store", "verify", folder) == 1
    assert "gc --drop-bad" in capsys.readouterr().out
    assert as_json(capsys, "store", "gc", folder, "--drop-bad")["bad"] == 2
    assert run("store", "verify", folder) == 0
    (folder / NAME).write_bytes(b"no database")
    capsys.readouterr()
    assert run("store", "stats", folder) == 2
    assert "store rebuild" in capsys.readouterr().err
    assert as_json(capsys, "store", "rebuild", folder)["intact"] == 5
    assert run("store", "gc", folder) == 0
    assert run("store", "verify", folder) == 0


def test_rebuild_says_what_it_removed(folder, capsys):
    first = sorted(files_in(folder))[0]
    first.write_bytes(b"")
    assert run("store", "rebuild", folder) == 1
    assert "6 entries found again; 1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["ls", "stats", "verify", "gc", "rebuild"])
def test_what_is_no_store_ends_with_2_and_stays_untouched(what, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert run("store", what, tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert run("store", what, tmp_path / "missing") == 2


@pytest.mark.parametrize("arguments", [["store"], ["store", "nothing", "x"], ["store", "ls"], ["warm"], ["warm", "x"]])
def test_bad_use_shows_how(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert "usage: kvboost-rag" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["store", "--help"], ["warm", "--help"], ["store", "gc", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(*arguments)
    assert f"kvboost-rag {arguments[0]}" in capsys.readouterr().out


def test_sizes_as_people_write_them():
    assert [bytes_of(t) for t in ("4096", "2G", "1.5 MiB", "10kb")] == [4096, 2 << 30, 3 << 19, 10240]
    assert [text_of(n) for n in (5, 2048, 3 << 19, 5 << 40)] == ["5 B", "2.0 KiB", "1.5 MiB", "5.0 TiB"]
    for bad in ("", "G", "-1", "2X", "1e9"):
        with pytest.raises(ConfigError):
            bytes_of(bad)


@pytest.mark.parametrize(("flag", "value"), [("--glob", "/etc/*.txt"), ("--glob", ""), ("--dtype", "float12")])
def test_values_that_nothing_can_be_done_with_end_with_2(model, documents, tmp_path, capsys, flag, value):
    command = ["warm", str(documents), "--model", str(model), "--store", str(tmp_path / "s"), flag, value]
    assert cli.main(command) == 2
    assert flag in capsys.readouterr().err
