"""The command line: commands found by entry point, missing extras, and `check`."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from kvboost_rag import cli
from tests.tiny import model_of, tokenizer_of


@pytest.fixture
def commands(monkeypatch):
    def set_to(*points: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, cli.COMMANDS) for name, value in points]
        monkeypatch.setattr(cli, "entry_points", lambda *, group: found if group == cli.COMMANDS else [])

    return set_to


def echo(arguments: list[str]) -> int:
    sys.stdout.write(f"{arguments}\n")
    return 7


def test_found_commands_get_their_arguments(commands, capsys):
    commands(("echo", f"{__name__}:echo"))
    assert cli.main(["echo", "--model", "m", "-k", "3", "--help"]) == 7
    assert capsys.readouterr().out == "['--model', 'm', '-k', '3', '--help']\n"


def test_missing_extra_is_named(commands, capsys):
    commands(("demo", "a_package_that_is_not_installed.demo:main"))
    assert cli.main(["demo"]) == 2
    assert "pip install 'kvboost-rag[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["check"], ["check", "model", "extra"]])
def test_bad_use(commands, capsys, arguments):
    commands()
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: kvboost-rag" in capsys.readouterr().err


def test_help_lists_commands(commands, capsys):
    commands(("demo", "x:y"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "check" in out
    assert "demo" in out


def test_check_of_nothing(capsys, tmp_path):
    assert cli.main(["check", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.model
def test_check_of_the_real_model(capsys, model_path):
    assert cli.main(["check", str(model_path)]) == 0
    out = capsys.readouterr().out
    assert "reuse='approximate': yes" in out
    assert "rotary layout: half" in out


def test_check_says_which_codecs_a_model_can_bear(tmp_path, capsys):
    model_of("qwen3").save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    assert cli.main(["check", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for bits in ("8", "'8/4'", "4"):
        assert re.search(rf"^kv_bits={bits}: (yes|no)\. .*limit is 0\.01", printed, re.MULTILINE)
