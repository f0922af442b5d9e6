"""Puts an engine's parts together: what is checked, measured and built once per model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .calibration import Calibration, Calibrator, measure_costs, recipe_of
from .chunking import BreakFinder
from .chunks import as_ids
from .config import PACK_SEPARATOR, EngineConfig
from .fingerprints import fingerprint
from .gate import CodecCheck, check_codec, check_rotation
from .keeping import Keeper
from .library import Library
from .model_spec import inspect_model, key_bias
from .planning import Planning
from .prefill import Executor
from .prompts import PromptEncoder
from .question import Tokens
from .runner import ModelRunner
from .selfcheck import SelfCheck, check_full_pass, self_check
from .serving import Serving
from .store import DiskReader, DiskStore, KVShape, codec_for
from .store.policies import policy_of
from .tracing import Recorder
from .transfer.bridge import Transfer
from .warming import Warmer
from .worth import Appraiser


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine works with.

    Attributes:
        executor: runs the model.
        checked: what the self-check measured; None if nothing is reused.
        calibration: what `selector="auto"` chose from; None if there was nothing to choose.
        codec: name of the form that KV is stored in.
        codec_check: what that form loses; None if nothing.
    """

    fingerprint: str
    window_tokens: int
    encoder: PromptEncoder
    library: Library
    warmer: Warmer
    serving: Serving
    executor: Executor
    checked: SelfCheck | None
    calibration: Calibration | None
    codec: str
    codec_check: CodecCheck | None


def _recorder(path: Path | str, config: EngineConfig, appraiser: Appraiser) -> Recorder:
    about = {"budget_bytes": config.ram_budget_bytes, "eviction": config.eviction}
    return Recorder(path, about, appraiser.saved_s)


def _disk(config: EngineConfig, appraiser: Appraiser) -> DiskReader | None:
    if config.disk_path is None:
        return None
    folder = Path(config.disk_path).expanduser()
    if config.disk_read_only:
        return DiskReader(folder, ttl_s=config.ttl_s)
    return DiskStore(
        folder,
        config.disk_budget_bytes,
        gdsf=config.eviction != "lru",
        ttl_s=config.ttl_s,
        saved_s=lambda chunk: appraiser.saved_s(chunk.header),
    )


def assemble(model: Any, tokenizer: Any, config: EngineConfig, transfer: Transfer | None = None) -> Parts:
    """Check a model and build the parts around it.

    Raises:
        UnsupportedModelError: the model cannot be served in ``config.reuse``.
        StoreError: ``config.disk_path`` cannot be used.
    """
    spec = inspect_model(model)
    codec = codec_for(config.kv_bits)
    if not codec.lossless:
        check_rotation(spec, config.kv_bits)
    runner = ModelRunner(model, spec)
    rope, checked = None, None
    if config.reuse == "off":
        check_full_pass(runner)
    else:
        rope, checked = self_check(runner, moving=config.reuse == "approximate")
    if rope is not None:
        rope.bias_from = partial(key_bias, model, spec)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    encoder = PromptEncoder(tokenizer, markers=config.markers, vocabulary=vocabulary)
    identity = fingerprint(model, tokenizer, codec.name)
    piece = None if tokenizer is None else encoder.piece
    tokens = Tokens() if tokenizer is None else encoder.tokens
    executor = Executor(runner, rope, cuts=checked is not None and checked.can_cut, tokens=tokens)
    checked_codec = None
    if not codec.lossless:  # before anything is opened
        checked_codec = check_codec(executor, None if tokenizer is None else encoder, config, codec, identity)
    foreign = frozenset(() if transfer is None else transfer.mapping.source.fingerprints.values())
    appraiser = Appraiser(runner, rope, config, foreign=foreign)
    disk = _disk(config, appraiser)
    library = Library(
        config.ram_budget_bytes,
        int(config.served_share * config.ram_budget_bytes),
        policy=policy_of(config.eviction, config.ram_budget_bytes),
        worth=appraiser.worth,
        recorder=None if config.trace_path is None else _recorder(config.trace_path, config, appraiser),
        disk=disk,
        write_behind_bytes=config.write_behind_bytes,
        ttl_s=config.ttl_s,
    )
    keeper = Keeper(
        library,
        None if piece is None else BreakFinder(piece),
        config,
        codec=codec,
        shape=KVShape(spec.layers, spec.kv_heads, spec.head_dim, spec.value_dim, spec.dtype),
        rope=rope,
        window_tokens=spec.window_tokens,
    )
    separator = as_ids([]) if tokenizer is None else encoder.encode_text(PACK_SEPARATOR)
    warmer = Warmer(executor, keeper, config, separator=separator, window_tokens=spec.window_tokens)
    recipe, calibration = recipe_of(config), None
    costs = None if rope is None else measure_costs(runner, rope, codec)
    if costs is not None and tokenizer is not None and config.selector == "auto":
        calibration = Calibrator(executor, encoder, config).choose(recipe, identity, token_s=costs.token_s)
    recipe = calibration.recipe if calibration else recipe
    appraiser.costs, appraiser.recipe = costs, recipe
    bridge = None if transfer is None or rope is None else transfer.bridge(library, rope, spec.device)
    weighed = costs if config.fallback else None
    planning = Planning(
        library,
        tokens,
        config,
        costs=weighed,
        lossy=not codec.lossless,
        bridge=bridge,
        static_rope_tokens=spec.static_rope_tokens,
    )
    serving = Serving(runner, executor, library, keeper, tokenizer, planning, recipe=recipe, bridge=bridge)
    return Parts(
        identity,
        spec.window_tokens,
        encoder,
        library,
        warmer,
        serving,
        executor,
        checked,
        calibration,
        codec.name,
        checked_codec,
    )
