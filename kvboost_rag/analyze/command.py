"""`kvboost-rag trace analyze`: what a log of prompts repeats, and whether reuse is worth switching on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ..calibration import measure_costs, recipe_of
from ..config import EngineConfig
from ..costs import CostModel
from ..errors import ConfigError, UnsupportedModelError
from ..hf import load_pretrained, load_tokenizer
from ..model_spec import inspect_model
from ..runner import ModelRunner
from ..selfcheck import self_check
from ..store import KVShape, codec_for
from ..store_command import bytes_of
from ..synthetic import COSTS
from .analysis import Log, analyze
from .encoding import Encoding, EstimatedEncoding, ModelEncoding
from .formats import Format
from .picture import draw
from .replay import Rules
from .report import About, as_json, as_text
from .verdict import HELP

TOKENS_PER_S = 300.0  # prefill of a 135M model on one CPU core
NOMINAL_TOKEN_BYTES = 1 << 15  # where the shape is not known and so not reported
REMEMBERED_TOKENS = 10_000_000  # whose ids are kept unless --budget says otherwise: some 0.5 GB in both modes together
LONG_WINDOW = 1 << 20  # where no model says how much it can hold


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model that is asked about.

    Attributes:
        encoding: makes token ids.
        costs: its coefficients.
        seconds: where these come from, for the report.
        token_bytes: KV of one token; None if unknown.
        window_tokens: context window.
    """

    encoding: Encoding
    costs: CostModel
    seconds: str
    token_bytes: int | None
    window_tokens: int


def add_parser(commands: Any) -> None:
    """Add `analyze` to the commands of `kvboost-rag trace`."""
    parser = commands.add_parser(
        "analyze",
        help="say what a log of prompts repeats, what each mode would save, and whether to switch it on",
        description="Replays a log of prompts through the engine's index, planner, keeping rules and cost model. It "
        "reads plain prompts, chat messages, OpenAI requests (also of batch files) and LangSmith runs, one JSON value "
        "in each line or in one array, gzipped or not. No text is printed, and nothing leaves this machine.",
        epilog=f"{HELP} Exit status: 0 if there is a report, 2 if there is none.",
    )
    parser.add_argument("file", type=Path, help="the log")
    parser.add_argument("--format", choices=get_args(Format), default="auto", help="of the log (default: looked at)")
    parser.add_argument(
        "--namespace-field",
        metavar="PATH",
        help="field that names the tenant, such as user or metadata.tenant; nothing counts as repeated across tenants "
        "(default: one tenant for all)",
    )
    parser.add_argument("--by-time", action="store_true", help="replay in order of time, not as the log stands")
    parser.add_argument("--time-field", metavar="PATH", help="field of the time (default: the usual names)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="Hugging Face id or folder; its speed is measured on this machine")
    which.add_argument("--tokenizer", help="the same, but only its tokenizer and shape are loaded, not its weights")
    parser.add_argument(
        "--prefill-tokens-per-second",
        type=float,
        metavar="N",
        help=f"speed to predict with (default: measured with --model, else {TOKENS_PER_S:g})",
    )
    parser.add_argument(
        "--budget",
        help=f"bytes of RAM for stored KV, like 2G (default: room for {REMEMBERED_TOKENS:,} tokens)",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the report (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Run `kvboost-rag trace analyze`; 0.

    Raises:
        KVBoostError: there is nothing to report; says why.
    """
    if options.time_field is not None and not options.by_time:
        raise ConfigError("--time-field has no effect without --by-time; give both")
    model = _model(options)
    if options.budget is not None and model.token_bytes is None:
        raise ConfigError("--budget is in bytes of KV, whose size per token only the model tells; give --tokenizer too")
    token_bytes = model.token_bytes or NOMINAL_TOKEN_BYTES
    budget = REMEMBERED_TOKENS * token_bytes if options.budget is None else bytes_of(options.budget)
    config = EngineConfig(ram_budget_bytes=budget)
    rules = Rules(config, model.costs, recipe_of(config), token_bytes, model.window_tokens)
    log = Log(
        path=options.file,
        format=options.format,
        namespace_field=options.namespace_field,
        time_field=options.time_field,
        by_time=options.by_time,
    )
    analysis = analyze(log, model.encoding, rules)
    about = About(
        options.file.name,
        model.encoding.about,
        model.seconds,
        model.token_bytes,
        None if options.budget is None else budget,
    )
    if options.plot:
        go = f"go, reuse={analysis.verdict.mode!r}" if analysis.verdict.go else "no-go"
        draw(analysis, options.plot, title=f"{options.file.name}: {len(analysis.tally):,} requests, {go}")
    print(json.dumps(as_json(analysis, about), indent=1) if options.json else as_text(analysis, about))
    if options.plot:
        print(f"picture: {options.plot}", file=sys.stderr)
    return 0


def _model(options: argparse.Namespace) -> Model:
    rate = options.prefill_tokens_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--prefill-tokens-per-second is {rate:g}; it must be a number above 0")
    assumed = assumed_costs(rate or TOKENS_PER_S)
    said = f"seconds assume {rate or TOKENS_PER_S:g} tokens/s of prefill; ratios hardly depend on it"
    try:
        if options.model is not None:
            model = _measured(options.model)
            return model if rate is None else replace(model, costs=assumed, seconds=said)
        if options.tokenizer is not None:
            tokenizer, config = load_tokenizer(options.tokenizer)
            window = getattr(config, "max_position_embeddings", None) or LONG_WINDOW
            return Model(ModelEncoding(tokenizer, options.tokenizer), assumed, said, _token_bytes(config), window)
    except (OSError, ValueError) as error:  # transformers raises these
        raise ConfigError(f"{options.model or options.tokenizer} cannot be loaded: {error}") from error
    return Model(EstimatedEncoding(), assumed, said, None, LONG_WINDOW)


def _measured(name: str) -> Model:
    """A model whose speed is measured here."""
    loaded, tokenizer = load_pretrained(name)
    spec = inspect_model(loaded)
    runner, codec = ModelRunner(loaded, spec), codec_for(16)
    try:
        rope, _ = self_check(runner, moving=True)
    except UnsupportedModelError as error:
        raise ConfigError(f"{name} cannot move what it stored, so only reuse='exact' is open to it: {error}") from error
    costs = measure_costs(runner, rope, codec)
    shape = KVShape(spec.layers, spec.kv_heads, spec.head_dim, spec.value_dim, spec.dtype)
    said = f"seconds by costs measured on this machine ({1 / costs.token_s:,.0f} tokens/s of prefill)"
    return Model(ModelEncoding(tokenizer, name), costs, said, codec.nbytes(shape, 1), spec.window_tokens)


def assumed_costs(tokens_per_s: float) -> CostModel:
    """Coefficients for a speed: those of a 135M model on one CPU core, scaled."""
    factor = 1 / (tokens_per_s * COSTS.token_s)
    return CostModel(
        pass_s=factor * COSTS.pass_s,
        token_s=factor * COSTS.token_s,
        pair_s=factor * COSTS.pair_s,
        move_s=factor * COSTS.move_s,
    )


def _token_bytes(config: Any) -> int | None:
    """KV of one token by a model's configuration; None if it does not say."""
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    hidden = getattr(config, "hidden_size", None)
    if not (heads and layers and hidden):
        return None
    dim = getattr(config, "head_dim", None) or hidden // heads
    itemsize = getattr(getattr(config, "dtype", None), "itemsize", 2)
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * dim * itemsize)
