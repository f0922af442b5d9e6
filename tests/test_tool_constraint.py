"""Constrained answers are valid and complete, whatever the model prefers and however few tokens it has."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import torch
from chat_tokenizers import CHATML, MAKERS, byte_level, sentencepiece, special
from pydantic import BaseModel, Field
from tiny import tokenizer_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvboost_rag import Engine, EngineConfig, SamplingParams
from kvboost_rag.errors import ConfigError
from kvboost_rag.tools import constraint as constraint_module
from kvboost_rag.tools.constraint import Constraint, ConstraintError, constraint_for
from kvboost_rag.tools.formats import FORMATS, HERMES, MISTRAL, ToolFormat
from kvboost_rag.tools.grammar import (
    Grammar,
    any_json_grammar,
    calls_or_json_grammar,
    forced_calls_grammar,
    json_grammar,
    text_or_calls_grammar,
)

PROMPT = [1, 2, 3]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS: list[tuple[str, dict[str, Any]]] = [("get_weather", WEATHER), ("now", {})]
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                "others": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["value", "left"],
        }
    },
}


DEEP = {
    "type": "object",
    "properties": {"color": {"enum": ["ultramarine", "red"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
}


class Walk:
    """Plays a model whose scores are random, with a liking of some texts."""

    def __init__(self, tokenizer: Any, width: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.width = width or len(tokenizer)
        self.eos = int(tokenizer.eos_token_id)
        self.constraint = constraint_for(tokenizer, [self.eos], self.width)
        self.opening = self._ids('{"', "{", "[", '": {"', "[[", '[{"', " [", "',", ',"', ' {"', ",", "a", "1", ".")
        self.closing = self._ids("}", "]", '"', '"}', "}}", '"]', "]]")

    def _ids(self, *texts: str) -> list[int]:
        found = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return [ids[0] for ids in found if len(ids) == 1]

    def least(self, grammar: Grammar) -> int:
        ending = self.constraint._start(grammar).ending
        assert ending is not None
        return len(ending) + (not grammar.free)

    def ids(self, grammar: Grammar, max_tokens: int, seed: int, mood: str = "random") -> list[int]:
        processor = self.constraint.processor(grammar, max_tokens)
        draw = torch.Generator().manual_seed(seed)
        ids = list(PROMPT)
        while len(ids) < len(PROMPT) + max_tokens:
            scores = torch.randn(1, self.width, generator=draw)
            scores[:, self.opening if mood == "opens" else []] += 6
            scores[:, self.closing if mood == "never closes" else []] -= 30
            scores = processor(torch.tensor([ids]), scores)
            if mood == "samples":
                ids.append(int(torch.multinomial(scores[0].softmax(-1), 1, generator=draw)))
            else:
                ids.append(int(scores[0].argmax()))
            if ids[-1] == self.eos:
                break
        return ids[len(PROMPT) :]

    def text(self, grammar: Grammar, max_tokens: int, seed: int, mood: str = "random") -> str:
        ids = self.ids(grammar, max_tokens, seed, mood)
        assert ids[-1] == self.eos, f"no end within {max_tokens}: {self.tokenizer.decode(ids)!r}"
        text: str = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        return text


def tokenizer_without_signs() -> Any:
    """That has a special token, and nothing to spell it with."""
    signs = 'abcdefghijklmnopqrstuvwxyz"{}[]:, 0123456789'
    backend = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    backend.add_special_tokens(["<|end|>"])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


MOODS = ["random", "opens", "never closes", "samples"]


def schema_of(draw: random.Random, depth: int) -> dict[str, Any]:
    """A random schema."""
    flat = [
        {"type": "string"},
        {"type": "string", "minLength": draw.randint(0, 5), "maxLength": 20},
        {"type": ["string", "null"]},
        {"type": "integer"},
        {"type": "integer", "minimum": 120, "maximum": 990},
        {"type": "integer", "multipleOf": 5},
        {"type": "number"},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": draw.sample(["a", "bb", "red and green", "x" * 40, "été", "😀", 'q"\\', 1, None], draw.randint(1, 4))},
        {"const": draw.choice(["kind", 3, None, "line\nbreak", [1, 2], {"a": 1}])},
        {"type": "string", "format": draw.choice(["date", "date-time", "time", "uuid", "email", "ipv4", "uri"])},
        {"type": "string", "pattern": draw.choice([r"^[a-z]+@x\.com$", "^[A-Z]{3}-[0-9]{2,4}$", "ba", "^[a-z]{40}$"])},
    ]
    if depth == 0 or draw.random() < 0.4:
        return draw.choice(flat)
    inner = lambda: schema_of(draw, depth - 1)  # noqa: E731
    names = draw.sample(
        ["name", "größe", "a b", 'q"x', "items", "id", "long_name_of_property", "日本"], draw.randint(0, 5)
    )
    return draw.choice(
        [
            lambda: {"type": "array", "items": inner(), **draw.choice([{}, {"minItems": 2}, {"maxItems": 3}])},
            lambda: {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2},
            lambda: {"type": "object", "additionalProperties": inner()},
            lambda: {"anyOf": [inner() for _ in range(draw.randint(2, 3))]},
            lambda: draw.choice([{}, {"type": "object"}, {"type": "array"}]),
            *[
                lambda: {
                    "type": "object",
                    "properties": {name: inner() for name in names},
                    "required": [name for name in names if draw.random() < 0.6],
                }
            ]
            * 4,
        ]
    )()


@pytest.fixture(scope="module")
def small() -> Walk:
    return Walk(tokenizer_of())


@pytest.fixture(scope="module")
def real(model_path: Path) -> Walk:
    from transformers import AutoTokenizer

    return Walk(AutoTokenizer.from_pretrained(model_path))


def check_schemas(walk: Walk, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        schema = schema_of(draw, 3)
        grammar = json_grammar(schema)
        max_tokens = walk.least(grammar) + draw.choice([0, 0, 1, 3, 10, 40, 120])
        text = walk.text(grammar, max_tokens, seed, draw.choice(MOODS))
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
        text.encode()  # no lone surrogate


class TestRandomAnswers:
    def test_random_schemas_on_a_small_tokenizer(self, small: Walk) -> None:
        check_schemas(small, range(100))

    @pytest.mark.model
    def test_random_schemas_on_the_real_tokenizer(self, real: Walk) -> None:
        check_schemas(real, range(1000, 1050))

    @pytest.mark.slow
    @pytest.mark.model
    def test_many_random_schemas(self, small: Walk, real: Walk) -> None:
        check_schemas(small, range(2000, 2500))
        check_schemas(real, range(3000, 3600))

    @pytest.mark.parametrize("kind", ["mistral", "mistral-legacy", "gemma2", "qwen2.5", "phi3"])
    def test_random_schemas_on_tokenizers_of_other_families(self, kind: str) -> None:
        check_schemas(Walk(MAKERS[kind]()), range(5000, 5015))

    @pytest.mark.parametrize("mood", MOODS)
    def test_recursive_schemas_end(self, small: Walk, mood: str) -> None:
        grammar = json_grammar(TREE)
        least = small.least(grammar)
        for seed, more in enumerate((0, 1, 2, 5, 10, 20, 40, 80, 160)):
            tree = json.loads(small.text(grammar, least + more, seed, mood))
            jsonschema.validate(tree, TREE, cls=jsonschema.Draft202012Validator)

    @pytest.mark.parametrize("mood", MOODS)
    def test_any_json_ends(self, small: Walk, mood: str) -> None:
        for seed, max_tokens in enumerate((3, 4, 8, 20, 60, 200)):
            assert isinstance(json.loads(small.text(any_json_grammar(), max_tokens, seed, mood)), dict)

    @pytest.mark.parametrize("mood", MOODS)
    def test_pydantic_models_validate(self, small: Walk, mood: str) -> None:
        class Part(BaseModel):
            kind: Literal["screw", "nut"]
            size: float = Field(gt=0, le=100)

        class Order(BaseModel):
            id: int
            parts: list[Part] = Field(min_length=1)
            counts: dict[str, int] = {}
            votes: dict[Literal["yes", "no"], int]
            at: datetime
            parent: Order | None = None
            either: Part | str | list[bool]

        grammar = json_grammar(Order.model_json_schema())
        for seed, more in enumerate((0, 3, 20, 200)):
            Order.model_validate_json(small.text(grammar, small.least(grammar) + more, seed, mood))

    @pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
    def test_calls_are_complete(self, small: Walk, format: ToolFormat) -> None:
        for parallel in (False, True):
            grammar = forced_calls_grammar(TOOLS, format, parallel=parallel)
            for seed, more in enumerate((0, 1, 5, 30, 120)):
                text = small.text(grammar, small.least(grammar) + more, seed, MOODS[seed % 4])
                names = calls_in(text, format)
                assert names
                assert parallel or len(names) == 1

    @pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
    def test_calls_or_an_answer_are_complete(self, small: Walk, format: ToolFormat) -> None:
        schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
        grammar = calls_or_json_grammar(TOOLS, format, schema)
        kinds = set()
        for seed in range(16):
            text = small.text(grammar, small.least(grammar) + 60, seed, MOODS[seed % 4])
            if text.startswith('{"title"'):
                jsonschema.validate(json.loads(text), schema)
                kinds.add("answer")
            else:
                assert calls_in(text, format)
                kinds.add("call")
        assert kinds == {"answer", "call"}


def calls_in(text: str, format: ToolFormat) -> list[str]:
    """Names of the calls of an answer that is nothing but calls in a format."""
    assert text.startswith(format.begin + format.call_begin)
    assert text.endswith(format.call_end + format.end)
    inner = text[len(format.begin + format.call_begin) : len(text) - len(format.call_end + format.end)]
    names = []
    while inner:
        call, end = json.JSONDecoder().raw_decode(inner)
        assert list(call) == [format.name_key, format.arguments_key]
        if call[format.name_key] == "now":
            assert call[format.arguments_key] == {}
        else:
            jsonschema.validate(call[format.arguments_key], WEATHER)
        names.append(call[format.name_key])
        inner = inner[end:].removeprefix(format.call_end + format.between + format.call_begin)
    return names


class TestTextOfSpecialTokens:
    @pytest.mark.parametrize(
        "schema",
        [
            {"const": "<|im_end|>"},
            {"const": "a <|im_start|> b"},
            {"enum": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]},
            {"type": "string", "pattern": r"^<\|im_(start|end)\|>$"},
            {"type": "object", "properties": {"<|im_end|>": {"type": "boolean"}}, "required": ["<|im_end|>"]},
        ],
    )
    @pytest.mark.parametrize("mood", MOODS)
    def test_is_written_with_ordinary_tokens(self, small: Walk, schema: dict[str, Any], mood: str) -> None:
        for more in (0, 30):
            grammar = json_grammar(schema)
            ids = small.ids(grammar, small.least(grammar) + more, 1, mood)
            assert not set(small.tokenizer.all_special_ids) & set(ids[:-1])
            jsonschema.validate(json.loads(small.tokenizer.decode(ids[:-1])), schema)

    def test_markers_of_calls_stay_special(self) -> None:
        tokenizer = byte_level(None, ["</s>"], special("[TOOL_CALLS]"), eos_token="</s>")
        walk = Walk(tokenizer)
        tools = [("f", {"type": "object", "properties": {"a": {"const": "[TOOL_CALLS]"}}, "required": ["a"]})]
        ids = walk.ids(forced_calls_grammar(tools, MISTRAL), 80, 0)
        assert ids.count(tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")) == 1
        assert tokenizer.decode(ids).count("[TOOL_CALLS]") == 2

    def test_that_no_ordinary_token_can_write_is_refused(self) -> None:
        walk = Walk(tokenizer_without_signs())
        assert walk.text(json_grammar({"const": "abc"}), 20, 0) == '"abc"'
        with pytest.raises(ConfigError, match=r"'<\|end\|>'.*special token"):
            walk.constraint.processor(json_grammar({"enum": ["abc", "<|end|>"]}), 20)


class TestFreeText:
    def test_runs_to_the_limit_without_an_end(self, small: Walk) -> None:
        grammar = text_or_calls_grammar(TOOLS, HERMES)
        assert grammar is not None
        lengths = [len(small.ids(grammar, 40, seed)) for seed in range(10)]
        assert max(lengths) == 40

    @pytest.mark.parametrize("marked", ["text", "added", "special", "mistral"])
    def test_a_call_that_is_begun_is_finished(self, marked: str) -> None:
        markers = ["<tool_call>", "</tool_call>"]
        tokenizer, format = {
            "text": (byte_level(None, CHATML, eos_token="<|im_end|>"), HERMES),
            "added": (byte_level(None, CHATML, markers, eos_token="<|im_end|>"), HERMES),
            "special": (byte_level(None, [*CHATML, *markers], eos_token="<|im_end|>"), HERMES),
            "mistral": (sentencepiece(None, legacy=False, added=special("[TOOL_CALLS]")), MISTRAL),
        }[marked]
        walk = Walk(tokenizer)
        grammar = text_or_calls_grammar(TOOLS, format)
        assert grammar is not None
        trigger = tokenizer("Hm. " + (format.begin + format.call_begin).split()[0], add_special_tokens=False).input_ids
        least = len(trigger) + walk.least(forced_calls_grammar(TOOLS, format))
        for max_tokens in (least, least + 5, least + 40):
            processor = walk.constraint.processor(grammar, max_tokens)
            ids = list(PROMPT)
            for step in range(max_tokens):
                scores = torch.randn(1, walk.width, generator=torch.Generator().manual_seed(step))
                if step < len(trigger):
                    scores[0, trigger[step]] += 100
                ids.append(int(processor(torch.tensor([ids]), scores)[0].argmax()))
                if ids[-1] == walk.eos:
                    break
            text = tokenizer.decode(ids[len(PROMPT) :], skip_special_tokens=False)
            assert format.end + format.call_end in text
            assert calls_in(text[text.index(format.begin + format.call_begin) :].split(tokenizer.eos_token)[0], format)

    def test_a_call_that_cannot_be_finished_is_not_begun(self, small: Walk) -> None:
        grammar = text_or_calls_grammar(TOOLS, HERMES)
        assert grammar is not None
        processor = small.constraint.processor(grammar, 12)
        ids = list(PROMPT)
        trigger = small.tokenizer("<tool_call>", add_special_tokens=False).input_ids
        for step in range(12):
            scores = torch.zeros(1, small.width)
            scores[0, trigger[min(step, len(trigger) - 1)]] = 100
            ids.append(int(processor(torch.tensor([ids]), scores)[0].argmax()))
        assert "<tool_call>" not in small.tokenizer.decode(ids[len(PROMPT) :])


class TestProcessor:
    def test_too_few_tokens_are_refused_at_the_start(self, small: Walk) -> None:
        grammar = json_grammar(WEATHER)
        least = small.least(grammar)
        with pytest.raises(ConfigError, match=rf"max_tokens is {least - 1}, .* needs about {least} tokens"):
            small.constraint.processor(grammar, least - 1)
        json.loads(small.text(grammar, least, 0))

    def test_only_the_end_is_allowed_behind_a_complete_answer(self, small: Walk) -> None:
        processor = small.constraint.processor(json_grammar({"const": "a"}), 100)
        ids = [*PROMPT, *small.tokenizer('"a"').input_ids]
        processor(torch.tensor([PROMPT]), torch.zeros(1, small.width))
        scores = processor(torch.tensor([ids]), torch.zeros(1, small.width))
        assert torch.isfinite(scores[0]).nonzero().tolist() == [[small.eos]]
        assert not processor.complete
        scores = processor(torch.tensor([[*ids, small.eos]]), torch.zeros(1, small.width))
        assert processor.complete
        assert torch.isfinite(scores[0]).nonzero().tolist() == [[small.eos]]

    def test_every_end_of_the_engine_ends_an_answer(self) -> None:
        tokenizer = tokenizer_of()
        ends = [int(tokenizer.eos_token_id), int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))]
        constraint = Constraint(tokenizer, ends, len(tokenizer))
        processor = constraint.processor(json_grammar({"type": "integer"}), 100)
        empty = torch.zeros(1, len(tokenizer))
        assert not torch.isfinite(processor(torch.tensor([PROMPT]), empty)[0, ends]).any()
        scores = processor(torch.tensor([[*PROMPT, *tokenizer("7").input_ids]]), empty)[0]
        assert torch.isfinite(scores[ends]).all()
        assert torch.isfinite(scores).sum() > 2  # more digits

    def test_scores_are_not_changed_and_may_be_wider(self, small: Walk) -> None:
        wide = small.width + 50
        processor = Constraint(small.tokenizer, [small.eos], wide).processor(json_grammar(TREE), 200)
        before = torch.randn(1, wide, dtype=torch.float32)
        kept = before.clone()
        before[0, small.width :] += 100
        kept[0, small.width :] += 100
        after = processor(torch.tensor([PROMPT]), before)
        assert torch.equal(before, kept)
        assert int(after[0].argmax()) < small.width

    def test_what_others_forbid_leaves_something(self, small: Walk) -> None:
        processor = small.constraint.processor(json_grammar({"const": "a"}), 100)
        scores = processor(torch.tensor([PROMPT]), torch.full((1, small.width), float("-inf")))
        assert torch.isfinite(scores).any()

    def test_misuse_is_said(self, small: Walk) -> None:
        processor = small.constraint.processor(json_grammar(WEATHER), 100)
        scores = torch.zeros(1, small.width)
        processor(torch.tensor([PROMPT]), scores)
        with pytest.raises(ConstraintError, match="does not fit the grammar"):
            processor(torch.tensor([[*PROMPT, *small.tokenizer("x").input_ids]]), scores)
        with pytest.raises(ConstraintError, match="make one for each request"):
            processor(torch.tensor([PROMPT[:1]]), scores)
        with pytest.raises(ConstraintError, match="2 answers"):
            processor(torch.tensor([PROMPT, PROMPT]), torch.zeros(2, small.width))

    def test_without_an_end_or_a_fast_tokenizer(self, small: Walk) -> None:
        with pytest.raises(ConfigError, match="no token ends an answer"):
            constraint_for(small.tokenizer, [], small.width)

        class Slow:
            def __len__(self) -> int:
                return 3

        with pytest.raises(ConfigError, match="Slow is a slow tokenizer"):
            constraint_for(Slow(), [1], 3)

    def test_without_llguidance(self, small: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
        with pytest.raises(ConfigError, match=r"pip install 'kvboost-rag\[langchain\]'"):
            Constraint(small.tokenizer, [small.eos], small.width)


class TestSharing:
    def test_made_once_for_a_tokenizer_and_dropped_with_it(self) -> None:
        tokenizer = byte_level(None, CHATML, eos_token="<|im_end|>")
        first = constraint_for(tokenizer, [2], len(tokenizer))
        assert constraint_for(tokenizer, [2], len(tokenizer)) is first
        assert constraint_for(tokenizer, [1, 2], len(tokenizer)) is not first
        tokenizer.add_tokens(["<tool_call>"])
        assert constraint_for(tokenizer, [2], len(tokenizer)) is not first
        gone = weakref.ref(tokenizer)
        del tokenizer
        gc.collect()
        assert gone() is None
        assert all(shelf.made for shelf in constraint_module._MADE.values())

    def test_the_tokenizer_keeps_its_settings(self) -> None:
        tokenizer = byte_level(None, CHATML, eos_token="<|im_end|>")
        tokenizer.backend_tokenizer.enable_truncation(5)
        constraint_for(tokenizer, [2], len(tokenizer))
        assert tokenizer.backend_tokenizer.truncation["max_length"] == 5

    def test_two_answers_at_a_time(self, small: Walk) -> None:
        grammars = [json_grammar(TREE), forced_calls_grammar(TOOLS, HERMES, parallel=True)]
        alone = [[small.ids(grammar, 120, seed) for seed in range(3)] for grammar in grammars]
        together: list[list[list[int]]] = [[], []]

        def run(at: int) -> None:
            together[at] = [small.ids(grammars[at], 120, seed) for seed in range(3)]

        threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Engine:
    return Engine.from_pretrained(str(model_path), config=EngineConfig(reuse="off"))


@pytest.mark.model
class TestRealModel:
    def processor(self, engine: Engine, grammar: Grammar, max_tokens: int) -> Any:
        vocab = engine.model.config.vocab_size
        return constraint_for(engine.tokenizer, [engine.tokenizer.eos_token_id], vocab).processor(grammar, max_tokens)

    def answer(self, engine: Engine, grammar: Grammar, max_tokens: int, **sampling: Any) -> str:
        processor = self.processor(engine, grammar, max_tokens)
        params = SamplingParams(max_tokens=max_tokens, logits_processors=(processor,), **sampling)
        done = engine.generate(
            [{"role": "user", "content": "What is the weather in Paris for 3 days?"}], sampling=params
        )
        assert done.finish_reason == "stop"
        return done.text

    @pytest.mark.parametrize("format", [FORMATS["hermes"], FORMATS["json"]], ids=lambda format: format.name)
    def test_a_forced_call(self, engine: Engine, format: ToolFormat) -> None:
        text = self.answer(engine, forced_calls_grammar(TOOLS[:1], format), 34)
        assert calls_in(text, format) == ["get_weather"]

    @pytest.mark.parametrize("more", [0, 5])
    def test_structured_output_within_few_tokens(self, engine: Engine, more: int) -> None:
        words = {"type": "array", "items": {"type": "string"}}
        schema = {"type": "object", "properties": {"words": words, "deep": DEEP}, "required": ["words", "deep"]}
        grammar = json_grammar(schema)
        start = constraint_for(engine.tokenizer, [engine.tokenizer.eos_token_id], engine.model.config.vocab_size)
        ending = start._start(grammar).ending
        assert ending is not None
        text = self.answer(engine, grammar, len(ending) + 1 + more)
        jsonschema.validate(json.loads(text), schema)

    @pytest.mark.parametrize("tokens", [24, 40])
    def test_a_string_that_is_ended_early_gets_no_stray_bracket(self, engine: Engine, tokens: int) -> None:
        fields = {"setup": {"type": "string"}, "punchline": {"type": "string"}}
        schema = {"type": "object", "properties": fields, "required": ["setup", "punchline"]}
        text = self.answer(engine, json_grammar(schema), tokens)
        assert not any(value.endswith(("}", "]")) for value in json.loads(text).values())

    def test_hot_sampling_stays_valid(self, engine: Engine) -> None:
        text = self.answer(engine, json_grammar(WEATHER), 24, temperature=1.8, seed=1)
        jsonschema.validate(json.loads(text), WEATHER)
