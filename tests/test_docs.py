"""The documentation: its code runs, its links lead somewhere, its lists are those of the code, and its site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvboost_rag
import langchain_kvboost
from kvboost_rag import Engine, EngineConfig, repair
from kvboost_rag.repair import SELECTORS
from llama_index.llms import kvboost
from tests.test_readme import run_blocks
from tests.tiny import LENGTH_DEPENDENT, PECULIAR, SERVED, STATEFUL, UNMOVABLE, engine_of, model_of, text, tokenizer_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")])
DOCUMENTS = [text(seed, 60) for seed in (900, 901, 902)]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as git hosts and the site make them."""
    titles = re.findall(r"^#{1,6} +(.+?) *$", without_code(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[tuple[str, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_every_page_with_code_is_run_by_a_test() -> None:
    with_code = {page.name for page in DOCS.rglob("*.md") if "```python\n" in page.read_text(encoding="utf-8")}
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert {name for name in with_code if f'"{name}"' not in tests} == set()


def test_every_page_of_the_site_is_in_its_contents() -> None:
    for folder in (DOCS, DOCS / "api"):
        listed = re.findall(r"^([a-z_]+(?:/[a-z_]+)?)$", (folder / "index.md").read_text(encoding="utf-8"), flags=re.M)
        pages = {page.stem for page in folder.glob("*.md")} - {"index"}
        assert {name for name in listed if "/" not in name} == pages


def test_the_operations_page_runs(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"model": model_of("llama"), "tokenizer": tokenizer_of(), "__name__": "page"}
    run_blocks(DOCS / "operations.md", model_path, names)
    names["engine"].close()
    assert names["report"].tokens > 0
    assert names["other"].usage.approximate_tokens == 0
    assert capsys.readouterr().out.strip()


def test_the_extending_page_runs(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repair, "SELECTORS", dict(SELECTORS))  # the page adds one, which no other test may meet
    engine = engine_of("llama", store_prompts=False)
    prompt = "\n\n".join(["Read this.", *DOCUMENTS[::-1], "Which river?"])
    names: dict[str, Any] = {"engine": engine, "documents": DOCUMENTS, "prompt": prompt, "__name__": "page"}
    with engine:
        run_blocks(DOCS / "extending.md", model_path, names)
    usage = names["tried"].usage
    assert 0.15 < usage.repaired_tokens / usage.approximate_tokens < 0.9  # short passages may be repaired whole
    assert 0 < float((names["other"].keys - names["full"].keys)[:, :, 8:32].abs().max()) < 0.01
    assert capsys.readouterr().out.strip().endswith("True None")


def test_the_accuracy_page_runs(model_path: Path) -> None:
    engine = engine_of("llama")
    engine.warm(DOCUMENTS)
    names: dict[str, Any] = {"engine": engine, "EngineConfig": EngineConfig}
    run_blocks(DOCS / "accuracy.md", model_path, names)
    prompt = "\n\n".join(["Read this.", *DOCUMENTS[::-1], "Which river?"])
    assert 0 < names["distance"](engine, prompt) < 1
    engine.close()


@pytest.mark.model
def test_the_store_page_runs(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the page writes a trace
    names: dict[str, Any] = {"model": str(model_path), "Engine": Engine, "EngineConfig": EngineConfig}
    run_blocks(DOCS / "store.md", model_path, names)
    names["engine"].prefill("What is a river?")
    names["engine"].close()
    assert (tmp_path / "trace.jsonl").stat().st_size > 0


def test_the_models_page_names_every_family_of_the_tests() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    families = [*SERVED, *LENGTH_DEPENDENT, *UNMOVABLE, *PECULIAR, *STATEFUL]
    assert [name for name in families if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", ["engine", "langchain", "llama_index"])
def test_the_reference_has_every_public_name(page: str) -> None:
    module = {"engine": kvboost_rag, "langchain": langchain_kvboost, "llama_index": kvboost}[page]
    named = set(re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api" / f"{page}.md").read_text(), flags=re.M))
    elsewhere = {"RequestTimeoutError", "release_engines", "shared_engine"} if page != "engine" else set()
    assert named | elsewhere == set(module.__all__) | elsewhere


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index", "concepts", "operations", "api/engine"):
        assert (tmp_path / f"{page}.html").is_file()
