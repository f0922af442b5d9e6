"""The notebooks are made from the scripts, and run from top to bottom without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from make_notebooks import EXAMPLES, HELPER, notebook_of, scripts

NAMES = [script.stem for script in scripts()]
TOLD = {  # what a run says if reuse took place
    "agent_tools": r"'approximate_tokens': [12]\d{3}, 'repaired_tokens': [1-9]\d",
    "langchain_swap": r"'cache_read': [1-9]\d\d",
    "llama_index_swap": r"'approximate_tokens': [1-9]\d\d",
    "still_warm": r"store on disk: .*'approximate_tokens': 1\d{3}",
    "trust": r"everything: 100.0 % of the tokens run, fidelity 1.000",
    "worth_it": r"documents in any order: go, reuse='approximate'",
}
every_example = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def environment(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of an example are told."""
    for name, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "KVBOOST_MODEL": str(model_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("KVBOOST_DOCS", "KVBOOST_LOG"):
        monkeypatch.delenv(name, raising=False)


def test_every_example_is_tested() -> None:
    assert sorted(TOLD) == NAMES
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == NAMES


@every_example
def test_the_notebook_is_made_from_the_script(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert text == notebook_of(script), "run: make examples"
    code = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@every_example
def test_the_example_is_listed_and_uses_public_names_only(name: str) -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"]({name}.py)" in listed
    assert f"]({name}.ipynb)" in listed
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert not re.findall(r"(?:\.|import )_(?!get|aget)[a-z]\w*", source)
    imported = re.findall(
        r"^\s*(?:from|import) ((?:kvboost_rag|langchain_kvboost|llama_index\.llms)[\w.]*)", source, re.M
    )
    assert set(imported) <= {"kvboost_rag", "langchain_kvboost", "llama_index.llms.kvboost"}


def test_documents_may_be_those_of_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shared = __import__(Path(HELPER).stem)
    (tmp_path / "one.md").write_text("A sentence about rivers.\n\n" * 30)
    (tmp_path / "short.md").write_text("Too short.")
    monkeypatch.setenv("KVBOOST_DOCS", str(tmp_path))
    assert list(shared.passages(1)) == ["one"]
    with pytest.raises(SystemExit, match="1 documents of 300 characters and more, 2 are needed"):
        shared.passages(2)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("environment")
@every_example
def test_the_notebook_runs_from_top_to_bottom(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()
    outputs: list[Any] = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    said = "".join(out.text for out in outputs if out.output_type == "stream")
    assert re.search(TOLD[name], said), said
    pictures = [out for out in outputs if out.output_type == "display_data" and "image/png" in out.data]
    assert len(pictures) == 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "worth_it.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert re.search(TOLD["worth_it"], done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["worth_it.png"]
