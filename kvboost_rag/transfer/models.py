"""The two models of a map, ready to be read; and whether a map between them can make sense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import xxhash

from ..chunks import IntArray, as_ids
from ..config import KVBits
from ..errors import ConfigError, TransferError
from ..fingerprints import fingerprint
from ..hf import cache_over, load_pretrained
from ..model_spec import inspect_model, key_bias
from ..passes import AttentionProbe
from ..prefill import Executor
from ..rope import Rope
from ..runner import ModelRunner
from ..selfcheck import self_check
from ..store import codec_for
from .mapping import Side


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A model that reads text for a map.

    Attributes:
        side: what a map says of it.
        executor: runs it.
        rope: rotation of its keys.
        tokenizer: of the model.
    """

    side: Side
    executor: Executor
    rope: Rope
    tokenizer: Any

    @classmethod
    def load(cls, name: str, dtype: str) -> Reader:
        """Load a model by hub id or folder.

        Raises:
            ModelLoadError: there is no such model.
            UnsupportedModelError: its keys cannot be moved.
        """
        return cls.of(name, *load_pretrained(name, dtype=dtype))

    @classmethod
    def of(cls, name: str, model: Any, tokenizer: Any) -> Reader:
        """A loaded model, called ``name`` in messages."""
        spec = inspect_model(model)
        runner = ModelRunner(model.eval(), spec)
        rope, checked = self_check(runner, moving=True)
        assert rope is not None
        rope.bias_from = partial(key_bias, model, spec)
        codecs = [codec_for(bits).name for bits in get_args(KVBits)]
        side = Side(
            name,
            str(model.config.model_type),
            vocabulary_of(tokenizer),
            {codec: fingerprint(model, tokenizer, codec) for codec in codecs},
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
            spec.value_dim,
        )
        return cls(side, Executor(runner, rope, cuts=checked.can_cut), rope, tokenizer)

    def encode(self, text: str) -> IntArray:
        """Ids of a text, without special tokens."""
        return as_ids(self.tokenizer(text, add_special_tokens=False).input_ids)

    def read(self, ids: IntArray, *, attention: bool = False) -> Reading:
        """Keys and values of a sequence, and what its second half attends to if asked for."""
        runner, n = self.executor.runner, len(ids)
        kv = runner.new_kv(n, n)
        device = runner.spec.device
        probe = None
        if attention:
            rows = torch.arange(n // 2, n, device=device)
            probe = AttentionProbe(rows, frozenset(range(runner.spec.layers)), ends_pass=False)
        positions = torch.arange(n, device=device)
        runner.run(kv, cache_over(kv), torch.tensor(ids, dtype=torch.int64, device=device), positions, probe=probe)
        mass = None if probe is None else torch.stack([*probe.mass.values()]).mean(0)
        keys = self.rope.angles(positions).unrotate(kv.keys[:, :, :n])
        return Reading(keys, kv.values[:, :, :n].float(), mass)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a model made of a sequence.

    Attributes:
        keys: without rotation, float32 ``(layers, kv_heads, seq, head_dim)``.
        values: float32 ``(layers, kv_heads, seq, value_dim)``.
        mass: attention that its second half paid to each token, mean over layers, ``(seq,)``; None if not asked for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mass: torch.Tensor | None


def check_pair(source: Side, target: Side) -> None:
    """Refuse two models between which no map can hold.

    Raises:
        TransferError: other tokens, another family, or twice the same model.
    """
    if source.family != target.family:
        raise TransferError(
            f"the source is a {source.family} model and the target a {target.family} model; KV can be mapped within "
            "one family only"
        )
    if source.vocabulary != target.vocabulary:
        raise TransferError(
            f"{source.name} and {target.name} have other tokens: some ids mean another text; give two models with one "
            "tokenizer"
        )
    if set(source.fingerprints.values()) & set(target.fingerprints.values()):
        raise TransferError(f"{source.name} and {target.name} are the same model, which needs no map")


def vocabulary_of(tokenizer: Any) -> str:
    """Hash of what each token id means, whatever the tokenizer is called."""
    if tokenizer is None:
        raise ConfigError("a map needs models with a tokenizer, to know that their ids mean the same")
    pairs = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return xxhash.xxh3_128(json.dumps(pairs).encode()).hexdigest()
