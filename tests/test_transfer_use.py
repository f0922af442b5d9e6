"""KV transfer as users meet it: the command, killed and run again, and both frameworks."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.llms import ChatMessage
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_rag import ConfigError, Engine, EngineConfig, TransferError, TransferMap
from kvboost_rag.chunks import as_ids
from kvboost_rag.cli import main
from kvboost_rag.frameworks import release_engines
from kvboost_rag.transfer.making import make
from kvboost_rag.transfer.models import Reader
from kvboost_rag.transfer.texts import split
from langchain_kvboost import ChatKVBoost
from llama_index.llms.kvboost import KVBoost
from tests.test_readme import run_blocks
from tests.test_transfer import twin_of
from tests.tiny import SETTINGS, model_of, new_model, prompt_of, random_ids, text, tokenizer_of

TINY = ["--sequence-tokens", "256", "--sources", "2"]


@dataclass(frozen=True)
class Places:
    """Folders of two models and of text, and a map from the first to the second."""

    small: Path
    large: Path
    texts: Path
    map: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("transfer")
    made = Places(root / "small", root / "large", root / "texts", root / "map.safetensors")
    for folder, model in ((made.small, model_of("qwen2")), (made.large, twin_of(model_of("qwen2")))):
        model.save_pretrained(folder)
        tokenizer_of().save_pretrained(folder)
    made.texts.mkdir()
    for seed in range(120):
        (made.texts / f"{seed:03d}.txt").write_text(text(100 + seed, 90))
    assert main(_fit(made, made.map)) == 0
    return made


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release_engines()


def _fit(places: Places, out: Path, *further: str) -> list[str]:
    names = ["--source", str(places.small), "--target", str(places.large), "--text", str(places.texts)]
    return ["transfer", "fit", *names, "--out", str(out), *TINY, *further]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_a_map_is_worth(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    assert main(["transfer", "show", str(places.map), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert f"{places.small} → {places.large}" in shown
    assert "| mapped + 20% repair |" in shown
    assert shown.rstrip().endswith("accepted")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_way_back_is_a_map_of_its_own(places: Places, tmp_path: Path) -> None:
    back = replace(places, small=places.large, large=places.small)
    assert main(_fit(back, tmp_path / "back")) == 0
    forth, made = TransferMap.load(places.map), TransferMap.load(tmp_path / "back")
    assert (made.source.fingerprints, made.target.fingerprints) == (
        forth.target.fingerprints,
        forth.source.fingerprints,
    )
    rows = made.figures
    assert rows["mapped"]["fidelity"] > 0.9 > rows["wrong document"]["fidelity"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--text", "nowhere"], "nowhere is no folder"),
        (["--glob", "*.pdf"], "holds no file like *.pdf"),
        (["--dtype", "int3"], "--dtype is 'int3'"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--source", "nowhere/at-all"], "nowhere/at-all"),
        (["--sources", "0"], "sources is 0"),
        (["--glob", "00*.txt"], "the text is too short"),
    ],
)
def test_bad_arguments(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    assert main(_fit(places, tmp_path / "map", *change)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert not list(tmp_path.iterdir())


def test_a_killed_fit_goes_on(places: Places, tmp_path: Path) -> None:
    out = tmp_path / "map"
    partial = tmp_path / "map.partial"
    code = (
        "import sys; from kvboost_rag.transfer import fitting; fitting.CHECKPOINT_S = 0.0; "
        "from kvboost_rag.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *_fit(places, out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not partial.is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.is_file()
    assert not out.exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not partial.exists()
    again, whole = TransferMap.load(out), TransferMap.load(places.map)
    assert again.about["text"] == whole.about["text"]
    assert float((again.keys.weight - whole.keys.weight).abs().max()) < 1e-3
    assert again.figures["mapped"]["kl"] == pytest.approx(whole.figures["mapped"]["kl"], rel=0.05)


def test_what_cannot_be_written(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, blocked = tmp_path / "folder", tmp_path / "blocked"
    folder.mkdir()
    assert main(_fit(places, folder)) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    assert [place.name for place in tmp_path.iterdir()] == ["folder"]  # nothing was read for it
    blocked.with_name("blocked.partial.writing").mkdir()
    assert main(_fit(places, blocked)) == 2
    assert "blocked cannot be written" in capsys.readouterr().err


def test_a_map_is_shown_though_no_picture_can_be_drawn(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "show", str(places.map), "--plot", "map.strange"]) == 2
    said = capsys.readouterr()
    assert said.out.rstrip().endswith("accepted")
    assert said.err.startswith("error: ")


def test_no_document_is_fitted_on_and_held_out() -> None:
    documents = [as_ids(random_ids(seed, 64)) for seed in range(40)]
    nothing = as_ids([])
    once = split(documents, sequence_tokens=32)
    assert split([*documents, nothing, *documents[::-1], nothing], sequence_tokens=32).digest == once.digest
    with pytest.raises(TransferError, match="64 tokens in 1 different documents"):
        split(documents[:1] * 100, sequence_tokens=32)


def test_text_that_is_cut_otherwise_is_another_text() -> None:
    documents = [as_ids(random_ids(seed, 64)) for seed in range(40)]
    long, short = (split(documents, sequence_tokens=tokens) for tokens in (64, 32))
    assert long.tokens == short.tokens  # all of it in either, so a checkpoint of one must not be taken for the other
    assert long.digest != short.digest


def test_all_of_a_map_goes_to_another_device(places: Places) -> None:
    mapping = TransferMap.load(places.map)
    moved = mapping.to(torch.device("meta"))  # it stands for an accelerator: it too refuses tensors that lie elsewhere
    keys = torch.empty(3, 2, 8, 16, device="meta")
    assert {part.device.type for part in moved.apply(keys, keys)} == {"meta"}
    assert {group.inv_freq.device.type for group in moved.rope.groups} == {"meta"}
    assert moved.rope.key_bias is not None
    assert moved.rope.key_bias.device.type == "meta"
    assert mapping.rope.groups[0].inv_freq.device.type == "cpu"


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [({"transfer": 5}, "transfer is a int"), ({"transfer": b"map"}, "transfer is a bytes"),
     ({"transfer": "map", "source": "small"}, "source is a str; it must be a Engine")],
)  # fmt: skip
def test_arguments_of_another_type(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(model_of("qwen2"), tokenizer_of(), EngineConfig(**SETTINGS), **given)


def test_a_disk_shared_with_a_source_of_another_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The source's chunks come to the target's RAM as they are: nothing may take them for its own."""
    larger = new_model("qwen2", seed=3, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    readers = [Reader.of(name, model, tokenizer_of()) for name, model in (("a", model_of("qwen2")), ("b", larger))]
    documents = [text(100 + seed, 90) for seed in range(120)]
    mapping = replace(make(readers[0], readers[1], documents, tmp_path / "map", sequence_tokens=256), refused=None)
    config = EngineConfig(**SETTINGS, disk_path=tmp_path / "kv", eviction="importance")
    with Engine(model_of("qwen2"), tokenizer_of(), config) as small:
        small.warm(documents[:2])
    with Engine(larger, tokenizer_of(), config, transfer=mapping) as large:
        for question in ("Which river?", "Which stone?"):
            prefill = large.prefill(prompt_of(documents[:2], question=question), store=False)
            assert prefill.usage.transferred_tokens > 0.7 * prefill.usage.prompt_tokens
            large.current_library().on_disk([])  # waits for what is copied to RAM behind the request
        assert large.stats().chunks == 2
    assert caplog.text == ""


# ---- frameworks ------------------------------------------------------------------------------------------------------


def test_a_chain_continues_a_conversation_on_the_other_model(places: Places) -> None:
    chat = ChatKVBoost(
        model=str(places.small),
        max_tokens=4,
        engine_config=EngineConfig(**SETTINGS),
        transfers={str(places.large): str(places.map)},
    )
    asked = [HumanMessage(prompt_of([text(1, 60)]))]
    said = chat.invoke(asked)
    answer = chat.invoke([*asked, AIMessage(said.content), HumanMessage("And which garden?")], model=str(places.large))
    reuse = answer.response_metadata
    assert reuse["model_name"] == str(places.large)
    assert reuse["transferred_tokens"] > 60
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= reuse["transferred_tokens"]
    assert chat.bind(model=str(places.large)).invoke(asked).response_metadata["transferred_tokens"] > 60
    assert json.loads(chat.model_dump_json())["transfers"] == {str(places.large): str(places.map)}
    strange = chat.model_copy(update={"transfers": {}})
    release_engines()
    strange.invoke(asked)
    assert strange.invoke(asked, model=str(places.large)).response_metadata["transferred_tokens"] == 0


def test_llama_index_goes_on_with_the_other_model(places: Places) -> None:
    llm = KVBoost(
        model=str(places.small),
        max_tokens=4,
        engine_config=EngineConfig(**SETTINGS),
        transfers={str(places.large): str(places.map)},
    )
    question = ChatMessage(role="user", content=prompt_of([text(1, 60)]))
    said = llm.chat([question]).message
    large = llm.on_model(str(places.large))
    assert large.on_model(str(places.large)) is large
    answer = large.chat([question, said, ChatMessage(role="user", content="And which garden?")])
    assert answer.raw["transferred_tokens"] > 60


def test_there_and_back_and_on_to_others(places: Places) -> None:
    small, large = str(places.small), str(places.large)
    chat = ChatKVBoost(model=small, engine_config=EngineConfig(**SETTINGS), transfers={large + "/": str(places.map)})
    there = chat.on_model(large)  # spelled otherwise
    asked = [HumanMessage(prompt_of([text(1, 60)]))]
    chat.invoke(asked, max_tokens=4)
    assert there.invoke(asked, max_tokens=4).response_metadata["transferred_tokens"] > 60
    assert there.on_model(large + "/.") is there
    back = there.on_model(small)
    assert back.get_engine() is chat.get_engine()
    assert there.model_copy(deep=True).get_engine() is there.get_engine()
    assert json.loads(there.model_dump_json())["model_kwargs"] == {}
    assert there._identifying_params["transfer"] == str(places.map)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(there)
    pickle.dumps(back)


def test_the_page_runs(places: Places, model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (AutoModelForCausalLM.from_pretrained(place) for place in (places.small, places.large))
    names = {
        "small_model": small, "large_model": large, "tokenizer": AutoTokenizer.from_pretrained(places.small),
        "documents": [text(1, 60), text(2, 60)], "map_file": str(places.map),
        "small_folder": str(places.small), "large_folder": str(places.large),
    }  # fmt: skip
    run_blocks(Path(__file__).resolve().parents[1] / "docs" / "transfer.md", model_path, names)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert names["answer"].usage.prompt_tokens > 0  # type: ignore[attr-defined]
