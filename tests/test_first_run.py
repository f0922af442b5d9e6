"""What goes wrong on the first day: each is tried as a user types it, and each says in one line what to type next."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kvboost_rag import ConfigError, Engine, EngineConfig, KVBoostError, MissingExtraError, ModelLoadError, cli, loading
from kvboost_rag.loading import available_bytes, check_memory, weight_bytes
from tests.tiny import VOCAB, model_of, new_model, tokenizer_of

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a good model."""
    folder = tmp_path_factory.mktemp("models") / "good"
    model_of("llama").save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _save(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return str(folder)


def refused(model: str, capsys: pytest.CaptureFixture[str], *words: str, error: type[KVBoostError]) -> None:
    """Both ways to name a model refuse it with the same line: Python, and the command line, which shows no more."""
    with pytest.raises(error) as caught:
        Engine.from_pretrained(model)
    capsys.readouterr()
    assert cli.main(["check", model]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: {caught.value}\n"
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


# ---- what is no model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./models/lama", ["there is no folder ./models/lama", "give a hub id", "folder"]),
        ("~/no-such-folder", ["there is no folder ~/no-such-folder"]),
        ("a/b/c", ["there is no folder a/b/c"]),
        ("", ["the model is ''", "give a hub id"]),
        ("  ", ["the model is '  '", "give a hub id"]),
    ],
)
def test_a_wrong_path_is_named(model: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(model, capsys, *words, error=ConfigError)


def test_a_name_that_is_neither(capsys: pytest.CaptureFixture[str]) -> None:
    refused("my model", capsys, "'my model' is no folder and no hub id", "give a hub id", error=ModelLoadError)


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(str(tmp_path), capsys, "holds no config.json", "give the folder", error=ConfigError)
    (tmp_path / "model-q4.gguf").touch()
    refused(str(tmp_path), capsys, "holds no config.json", "gguf_file='model-q4.gguf'", error=ConfigError)


def test_a_file_of_a_model(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(str(saved / "model.safetensors"), capsys, f"give its folder, '{saved}'", error=ConfigError)


def test_a_folder_without_weights(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "model.safetensors").unlink()
    refused(str(copied), capsys, "no file named model.safetensors", "save_pretrained", error=ModelLoadError)


def test_a_folder_without_a_tokenizer(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in copied.glob("*token*"):
        file.unlink()
    refused(str(copied), capsys, "holds no tokenizer", "tokenizer.save_pretrained(", error=ModelLoadError)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", ["config.json", "not a valid JSON"]), ("{}", ["model_type"])],
)
def test_a_broken_config(copied: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]) -> None:
    (copied / "config.json").write_text(content)
    refused(str(copied), capsys, *words, "save_pretrained", error=ModelLoadError)


def test_a_model_newer_than_transformers(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "llama99"}))
    refused(str(copied), capsys, "'llama99'", "pip install --upgrade transformers", error=ModelLoadError)


# ---- damaged weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 200, 200_000])
def test_a_truncated_file(copied: Path, capsys: pytest.CaptureFixture[str], keep: int) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(str(copied), capsys, f"{file} is incomplete", f"({keep} bytes)", "download it", error=ModelLoadError)


def test_a_shard_that_is_truncated_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("llama").save_pretrained(tmp_path, max_shard_size="150KB")
    tokenizer_of().save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    refused(str(tmp_path), capsys, f"{shards[1]} is incomplete", error=ModelLoadError)


def test_a_pointer_instead_of_weights(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 537000000\n"
    (copied / "model.safetensors").write_text(pointer)
    refused(str(copied), capsys, "a pointer of Git LFS", "git lfs pull", error=ModelLoadError)


# ---- models that cannot answer ---------------------------------------------------------------------------------------


def test_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(vocab_size=VOCAB, **SMALL)
    for name, kind in (("base", BertModel), ("with-head", BertForMaskedLM)):
        model = _save(tmp_path / name, kind(config))
        refused(model, capsys, "is a bert model", "does not continue text", "give a decoder", error=ModelLoadError)


def test_an_encoder_with_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16)
    model = _save(tmp_path, T5ForConditionalGeneration(config))
    refused(model, capsys, "is a t5 model", "give a decoder", error=ModelLoadError)


def test_a_decoder_without_its_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _save(tmp_path, LlamaModel(model_of("llama").config))
    refused(model, capsys, "lacks 1 of the weights", "lm_head.weight", "give a decoder", error=ModelLoadError)


def test_a_model_without_rotary_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _save(tmp_path, new_model("gpt2"))
    with pytest.raises(KVBoostError, match=r"layer 0.* not a plain rotary .* use EngineConfig\(reuse='exact'\)"):
        Engine.from_pretrained(model)
    Engine.from_pretrained(model, config=EngineConfig(reuse="exact")).close()  # what it says works
    assert cli.main(["check", model]) == 0
    assert "reuse='exact': yes" in capsys.readouterr().out


def test_a_model_without_a_chat_template(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "chat_template.jinja").unlink()
    with (
        Engine.from_pretrained(str(copied), config=EngineConfig(reuse="exact")) as engine,
        pytest.raises(KVBoostError, match=r"no chat template.* string"),
    ):
        engine.generate([{"role": "user", "content": "river"}])
    assert cli.main(["check", str(copied)]) == 0
    assert "no chat template" in capsys.readouterr().out


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_weights_are_measured_before_they_are_loaded(saved: Path) -> None:
    model = model_of("llama")
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(str(saved), None, {}) == weight_bytes(str(saved), torch.float32, {}) == stored
    assert weight_bytes(str(saved), torch.bfloat16, {}) == stored // 2
    assert weight_bytes("organisation/not-here", None, {}) == 0


def test_shards_are_added_up(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path, max_shard_size="150KB")
    assert weight_bytes(str(tmp_path), None, {}) == sum(p.numel() * 4 for p in model_of("llama").parameters())


def _claim(folder: Path, gib: int) -> None:
    """Weights whose header claims so much; no byte of them is there, so that reading them would fail."""
    shape = [gib << 30 >> 2]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, shape[0] * 4]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + shape[0] * 4)  # a hole: takes no room


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _claim(copied, 4096)
    refused(
        str(copied), capsys, "take 4096.0 GiB of memory as torch.float32", "GiB are free", "dtype='bfloat16'",
        "take a smaller model", error=ModelLoadError,
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"take 2048\.0 GiB of memory as torch\.bfloat16") as caught:
        Engine.from_pretrained(str(copied), dtype="bfloat16")
    assert "dtype=" not in str(caught.value)  # it is given already


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    for name, text in {
        "memory.max": f"{3 << 20}\n",
        "memory.current": f"{3 << 20}\n",
        "memory.stat": f"anon {2 << 20}\nfile {1 << 20}\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(loading, "_CGROUP", tmp_path)
    assert available_bytes() == 1 << 20
    check_memory(str(saved), None, {})
    (tmp_path / "memory.max").write_text(f"{2 << 20}\n")
    with pytest.raises(ModelLoadError, match=r"0\.0 GiB are free"):
        check_memory(str(saved), None, {})
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 1 << 28


# ---- the hub ---------------------------------------------------------------------------------------------------------

_HUB = {  # what the hub answers: status, error code in its header, message
    "/api/models/org/gated": (200, "", ""),
    "/org/gated/resolve/main/config.json": (403, "GatedRepo", "Access to model org/gated is restricted."),
    "/api/models/org/private": (401, "", "Invalid username or password."),
    "/api/models/org/missing": (404, "RepoNotFound", "Repository not found"),
    "/api/models/org/revised/revision/v9": (404, "RevisionNotFound", "Invalid rev id: v9"),
}


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code, message = _HUB.get(self.path, (404, "EntryNotFound", "Entry not found"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        body = json.dumps({"id": "org/gated", "siblings": []}).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def _hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


_ASK = """
import contextlib, io, json, sys
from kvboost_rag import Engine, cli
for model, options in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["check", model])
    try:
        Engine.from_pretrained(model, **options)
    except Exception as error:
        raised = [type(error).__name__, str(error)]
    print(json.dumps([status, out.getvalue(), err.getvalue(), *raised]))
"""


def _ask_a_hub(endpoint: str, home: Path, *models: tuple[str, dict[str, Any]], **env: str) -> list[list[Any]]:
    """In a process of its own: the hub's client reads its address when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(models)],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Retrying" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_the_hub_refuses(tmp_path: Path) -> None:
    asked = [("org/gated", {}), ("org/private", {}), ("org/missing", {}), ("org/revised", {"revision": "v9"})]
    with _hub() as endpoint:
        gated, private, missing, revised = _ask_a_hub(endpoint, tmp_path, *asked)
    for status, out, err, kind, message in (gated, private, missing):
        assert (status, out, kind) == (2, "", "ModelLoadError")
        assert err == f"error: {message}\n"
    assert "org/gated is gated" in gated[4]
    assert "`hf auth login`" in gated[4]
    for answer in (private, missing):
        assert "no folder and no model on the hub called org/" in answer[4]
        assert "`hf auth login` if it is private" in answer[4]
    assert revised[3] == "ModelLoadError"
    assert "no such revision" in revised[4]


@pytest.mark.parametrize("env", [{}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow)])
def test_without_network_it_says_at_once_how_to_fetch_it(tmp_path: Path, env: dict[str, str]) -> None:
    nobody = "http://127.0.0.1:9"  # the port of a service that discards what it gets, where nobody listens
    ((status, out, err, kind, message),) = _ask_a_hub(nobody, tmp_path, ("org/name", {}), **env)
    assert (status, out, kind) == (2, "", "ModelLoadError")
    assert err == f"error: {message}\n"
    assert "org/name is no folder here, and the hub cannot be reached" in message
    assert "`hf download org/name`" in message


# ---- what is not installed -------------------------------------------------------------------------------------------

_WITHOUT = """
import contextlib, importlib.abc, io, json, sys
gone = ""
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == gone or name.startswith(gone + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from kvboost_rag import Engine, cli
for gone, code in json.loads(sys.argv[1]):
    loaded = (gone, "langchain_kvboost", "llama_index", "langchain_community", "kvboost_rag.telemetry")
    for name in [name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in loaded)]:
        del sys.modules[name]
    out, err, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code)
        except Exception as error:
            err.write(f"{type(error).__name__}: {error}\\n")
    print(json.dumps([status, err.getvalue()]))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int | None, str]]:
    """What each use of a package that is not there ends with. One process for all: to import torch takes seconds."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "model.gguf").touch()
    trace = folder / "trace.jsonl"
    assert cli.main(["trace", "make", "scans", str(trace), "--requests", "20"]) == 0
    simulate = ["trace", "simulate", str(trace), "--plot", str(folder / "plot.png")]
    gguf = f"Engine.from_pretrained({str(folder)!r}, gguf_file='model.gguf')"
    uses = {
        ("prometheus_client", "prometheus"): "import kvboost_rag.telemetry.prometheus",
        ("opentelemetry", "otel"): "import kvboost_rag.telemetry.otel",
        ("llama_index.core", "llama-index"): "import llama_index.llms.kvboost",
        ("langchain_core", "langchain"): "import langchain_kvboost",
        ("gguf", "gguf"): gguf,
        ("accelerate", "gguf"): gguf,
        ("langchain_core", "demo"): "status = cli.main(['demo'])",
        ("langchain_community", "demo"): "status = cli.main(['demo'])",
        ("faiss", "demo"): "status = cli.main(['demo'])",
        ("matplotlib", "plots"): f"status = cli.main({simulate!r})",
    }
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, json.dumps([(missing, code) for (missing, _), code in uses.items()])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {use: tuple(json.loads(line)) for use, line in zip(uses, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize(
    ("missing", "extra"),
    [
        ("prometheus_client", "prometheus"),
        ("opentelemetry", "otel"),
        ("llama_index.core", "llama-index"),
        ("langchain_core", "langchain"),
        ("gguf", "gguf"),
        ("accelerate", "gguf"),
    ],
)
def test_a_missing_extra_is_named_in_python(without: Any, missing: str, extra: str) -> None:
    _, error = without[missing, extra]
    assert error.startswith("MissingExtraError: ")
    assert f"needs the package {missing.partition('.')[0]!r}, which is not installed" in error
    assert error.endswith(f"pip install 'kvboost-rag[{extra}]'\n")


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("langchain_core", "demo"), ("langchain_community", "demo"), ("faiss", "demo"), ("matplotlib", "plots")],
)
def test_a_missing_extra_is_one_line_of_the_command_line(without: Any, missing: str, extra: str) -> None:
    status, shown = without[missing, extra]
    assert status == 2
    (line,) = shown.splitlines()
    assert line.startswith("error: ")
    assert missing in line
    assert line.endswith(f"pip install 'kvboost-rag[{extra}]'")


def test_a_missing_extra_is_also_an_import_error() -> None:
    error = MissingExtraError("this", ModuleNotFoundError("No module named 'x.y'", name="x.y"), extra="plots")
    assert isinstance(error, ImportError)
    assert (
        str(error)
        == "this needs the package 'x', which is not installed; install it with: pip install 'kvboost-rag[plots]'"
    )
    assert (error.extra, error.name) == ("plots", "x.y")


# ---- an old Python ---------------------------------------------------------------------------------------------------


def test_an_old_python_is_told_by_pip_and_by_the_installer(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"  # what pip refuses by
    code = (
        "import runpy, sys; sys.version_info = (3, 10, 4, 'final', 0); sys.version = '3.10.4 (main)'; "
        f"sys.argv = ['install.py', '--venv', {str(tmp_path / 'venv')!r}]; "
        f"runpy.run_path({str(ROOT / 'scripts' / 'install.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Python 3.10.4 is too old, 3.11 or later is needed" in line
    assert "make PYTHON=" in line
    assert not (tmp_path / "venv").exists()


# ---- bars ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bars_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of transformers are on, whatever `HF_HUB_DISABLE_PROGRESS_BARS` says where the tests run."""
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)


@pytest.mark.usefixtures("bars_of_transformers")
@pytest.mark.parametrize(("show", "terminal"), [(True, True), (True, False), (False, True)])
def test_bars_are_shown_on_request_and_to_somebody(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: bool, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    config = EngineConfig(reuse="exact")
    with Engine.from_pretrained(str(saved), config=config, show_progress=show) as engine:
        loading_shown = capsys.readouterr().err
        engine.warm(["river " * 20], show_progress=show)
    warming_shown = capsys.readouterr().err
    if show and terminal:
        assert "Loading weights" in loading_shown
        assert "warming: 100%" in warming_shown
    else:
        assert (loading_shown, warming_shown) == ("", "")


@pytest.mark.usefixtures("bars_of_transformers")
def test_other_bars_of_transformers_stay_as_they_were(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    Engine.from_pretrained(str(saved), config=EngineConfig(reuse="exact")).close()
    assert capsys.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(saved)
    assert "Loading weights" in capsys.readouterr().err
