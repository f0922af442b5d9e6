"""The wheel holds the three packages under their import names, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


OTHER = "llama-index-llms-huggingface"  # another distribution inside the namespace
IMPORTS = """
import sys
import llama_index.core
from llama_index.llms.{first}
from llama_index.llms.{second}
import llama_index.llms.kvboost as ours, llama_index.llms.huggingface as theirs, langchain_kvboost, kvboost_rag
print(*(module.__file__ for module in (ours, theirs, langchain_kvboost, kvboost_rag)), sep="\\n")
"""
OURS_FIRST = IMPORTS.format(first="kvboost import KVBoost", second="huggingface import HuggingFaceLLM")
THEIRS_FIRST = IMPORTS.format(first="huggingface import HuggingFaceLLM", second="kvboost import KVBoost")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
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


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    done = pip(
        "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder), f"{OTHER}=={version(OTHER)}"
    )
    if done.returncode:
        pytest.skip(f"{OTHER} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    (found,) = folder.glob("*.whl")
    return found


def run_beside_dependencies(python: Path, folders: list[Path], code: str) -> list[Path]:
    """Run with folders, and this environment's packages behind them, but without its path files (editable installs)."""
    paths = os.pathsep.join(map(str, [*folders, Path(sysconfig.get_path("purelib"))]))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.split()]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds nothing."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


@pytest.mark.parametrize("code", [OURS_FIRST, THEIRS_FIRST], ids=["ours first", "theirs first"])
def test_a_wheel_beside_another_of_the_namespace(wheel, other, bare, tmp_path, code):
    done = pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel), str(other))
    assert done.returncode == 0, done.stderr
    for module in run_beside_dependencies(bare, [tmp_path], code):
        assert module.is_relative_to(tmp_path)


def test_wheels_in_folders_of_their_own(wheel, other, bare, tmp_path):
    """As with a user's and a system's site-packages: a namespace package is the union of all its folders."""
    for part in (wheel, other):
        done = pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / part.stem), str(part))
        assert done.returncode == 0, done.stderr
    ours, theirs, *_ = run_beside_dependencies(bare, [tmp_path / wheel.stem, tmp_path / other.stem], THEIRS_FIRST)
    assert ours.is_relative_to(tmp_path / wheel.stem)
    assert theirs.is_relative_to(tmp_path / other.stem)


@pytest.mark.parametrize("code", [OURS_FIRST, THEIRS_FIRST], ids=["ours first", "theirs first"])
def test_an_editable_install_beside_another_wheel(other, bare, tmp_path, code):
    into = ["--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    for what in (["--no-build-isolation", "-e", str(ROOT)], [str(other)]):
        done = pip("install", *into, *what)
        assert done.returncode == 0, done.stderr
    activated = f"import site; site.addsitedir({str(tmp_path)!r})\n{code}"  # reads the path file, as at start
    ours, theirs, langchain, core = run_beside_dependencies(bare, [], activated)
    assert ours == ROOT / "integrations/llama_index/llama_index/llms/kvboost/__init__.py"
    assert langchain == ROOT / "integrations/langchain/langchain_kvboost/__init__.py"
    assert core == ROOT / "kvboost_rag/__init__.py"
    assert theirs.name == "__init__.py"


def test_this_environment_has_both():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OURS_FIRST], check=True, capture_output=True, text=True
    )
    assert "huggingface" in done.stdout
