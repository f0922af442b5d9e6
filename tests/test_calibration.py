"""`selector="auto"` measures the candidates on this very model, once, and remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import Engine
from kvboost_rag.calibration import CANDIDATES, DEFAULT, MARGIN
from kvboost_rag.repair import SELECTORS
from tests.tiny import Forwards, engine_of, new_model, prompt_of, text

DOCUMENTS = [text(seed, 25) for seed in (100, 101, 102)]
NAMES = {f"{selector} {offset:g}" for selector, offset in CANDIDATES}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose window holds the built-in passages."""
    return new_model("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one load has left its result."""
    folder = tmp_path_factory.mktemp("calibration") / "made" / "on demand"
    engine_of(model, calibration_dir=folder)
    return folder


def _passes(model: Any, **config: Any) -> tuple[Engine, int]:
    with Forwards(model) as forwards:
        engine = engine_of(model, **config)
    return engine, sum(rows > 200 for rows in forwards.rows)


def test_every_candidate_is_measured_and_a_good_one_chosen(model: Any, folder: Path) -> None:
    calibration = engine_of(model, calibration_dir=folder).calibration
    assert calibration is not None
    assert set(calibration.scores) == NAMES
    assert all(score > 0 for score in calibration.scores.values())
    chosen = f"{calibration.recipe.selector} {calibration.recipe.offset:g}"
    default = f"{DEFAULT[0]} {DEFAULT[1]:g}"
    best = min(calibration.scores, key=calibration.scores.__getitem__)
    assert chosen == (best if calibration.scores[best] < MARGIN * calibration.scores[default] else default)


def test_a_second_load_remembers_and_does_not_measure(model: Any, folder: Path) -> None:
    first, second = (_passes(model, calibration_dir=folder) for _ in range(2))
    assert (first[1], second[1]) == (0, 0)
    assert first[0].calibration == second[0].calibration
    assert len(list(folder.iterdir())) == 1


def test_the_remembered_choice_is_what_requests_run_with(model: Any, folder: Path, tmp_path: Path) -> None:
    (written,) = folder.iterdir()
    found = json.loads(written.read_text())
    for best, (selector, offset) in zip(sorted(NAMES), sorted(CANDIDATES), strict=True):
        found["scores"] = {name: 0.001 if name == best else 1.0 for name in NAMES}
        (tmp_path / written.name).write_text(json.dumps(found))
        engine = engine_of(model, calibration_dir=tmp_path)
        assert (engine.recipe.selector, engine.recipe.offset) == (selector, offset)
        assert engine.recipe.selector in SELECTORS
    engine.warm(DOCUMENTS)
    assert engine.prefill(prompt_of(DOCUMENTS[::-1])).usage.repaired_tokens > 0


def test_a_small_gain_does_not_leave_the_default(model: Any, folder: Path, tmp_path: Path) -> None:
    (written,) = folder.iterdir()
    found = json.loads(written.read_text())
    found["scores"] = {name: 0.9 if name == "query 0" else 1.0 for name in NAMES}
    (tmp_path / written.name).write_text(json.dumps(found))
    recipe = engine_of(model, calibration_dir=tmp_path).recipe
    assert (recipe.selector, recipe.offset) == DEFAULT


@pytest.mark.parametrize("junk", ["", "{", "[]", "null", '{"version": 0, "scores": {}}', "\x00"])
def test_a_spoilt_file_is_measured_again_and_mended(model: Any, folder: Path, tmp_path: Path, junk: str) -> None:
    (written,) = folder.iterdir()
    spoilt = tmp_path / written.name
    spoilt.write_text(junk)
    engine, passes = _passes(model, calibration_dir=tmp_path)
    assert passes > 0
    assert json.loads(spoilt.read_text())["scores"] == dict(engine.calibration.scores)  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == [written.name]


def test_a_folder_that_cannot_be_written_only_means_measuring_again(model: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    engine = engine_of(model, calibration_dir=blocked)
    assert engine.calibration is not None
    assert blocked.read_text() == "in the way"


@pytest.mark.parametrize(
    "config",
    [
        {"selector": "query"},
        {"selector": "deviation"},
        {"repair": "none"},
        {"repair": "selective"},
        {"repair_ratio": 0.0},
        {"repair_ratio": 1.0},
        {"reuse": "exact"},
        {"reuse": "off"},
    ],
    ids=str,
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(model: Any, config: dict[str, Any]) -> None:
    engine, passes = _passes(model, calibration_dir=None, **config)
    assert engine.calibration is None
    assert passes == 0


def test_a_window_too_small_for_the_passages_gets_the_default() -> None:
    engine = engine_of("llama", selector="auto")
    assert engine.calibration is None
    assert (engine.recipe.selector, engine.recipe.offset) == DEFAULT


def test_another_budget_is_measured_on_its_own(model: Any, folder: Path, tmp_path: Path) -> None:
    (written,) = folder.iterdir()
    (tmp_path / written.name).write_text(written.read_text())
    assert _passes(model, calibration_dir=tmp_path, repair_ratio=0.3)[1] > 0
    assert len(list(tmp_path.iterdir())) == 2
