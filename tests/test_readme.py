"""The README's example runs as it stands, with the fetched model in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.model
def test_the_example_runs(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        code = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model_path))
        exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_example_is_short() -> None:
    first = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 16
