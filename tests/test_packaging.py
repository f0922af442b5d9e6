"""The wheel holds the three packages under their import names, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_top_level_names(names):
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "kvboost_rag",
        "langchain_kvboost",
        "llama_index",
    }


@pytest.mark.parametrize("shared", ["llama_index/__init__.py", "llama_index/llms/__init__.py"])
def test_namespaces_stay_shared(names, shared):
    assert shared not in names


@pytest.mark.parametrize("package", ["kvboost_rag", "langchain_kvboost", "llama_index/llms/kvboost"])
def test_typed(names, package):
    assert {f"{package}/py.typed", f"{package}/__init__.py"} <= names


def test_entry_points_and_licence(names):
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_namespace_does_not_hide_the_framework():
    code = "import llama_index.core, llama_index.llms.kvboost as ours; print(ours.__name__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "llama_index.llms.kvboost"
