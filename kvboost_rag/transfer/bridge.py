"""What another model has read: its stored chunks, as KV of this model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..chunks import ChunkHeader, Hit, IntArray, Scope
from ..config import EngineConfig
from ..errors import ConfigError, TransferError
from ..kv import RequestKV, StoredRun
from ..library import Library, Match
from ..planner import Plan, outside
from ..rope import Rope
from .mapping import TransferMap

TIMED_TOKENS = 256
_LOG = logging.getLogger("kvboost_rag")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A map that an engine uses.

    Attributes:
        mapping: accepted by its gate.
        source: engine that runs the source; None if the target's own disk holds the source's chunks.
    """

    mapping: TransferMap
    source: Source | None

    def check_target(self, identity: str) -> None:
        """Refuse another model than the map's target.

        Raises:
            TransferError: it is another one, or another revision of it.
        """
        target = self.mapping.target
        if identity not in target.fingerprints.values():
            raise TransferError(
                f"the map was made for {target.name} with fingerprint {target.fingerprints['plain']}, and this model "
                f"has {identity}: other weights, another dtype, adapter or tokenizer; make it again with: "
                "kvboost-rag transfer fit"
            )

    def bridge(self, own: Library, rope: Rope, device: torch.device) -> Bridge:
        """The bridge of an engine, whose library and rotation are given."""
        return Bridge(self.mapping, self.source, own, rope, device)


class Source(Protocol):
    """What must be known of an engine that runs the source."""

    @property
    def fingerprint(self) -> str:
        """Identity of its model."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it has been closed, and its RAM is empty."""
        ...

    def current_library(self) -> Library:
        """Where the KV of its model is stored."""
        ...


def transfer_of(given: TransferMap | Path | str | None, config: EngineConfig, source: Source | None) -> Transfer | None:
    """What the arguments of an engine ask for; None if nothing is to be mapped.

    Args:
        given: a map or its file.
        config: of the engine.
        source: engine of the source, if there is one.

    Raises:
        TransferError: the map cannot be read, or is not of the source.
        ConfigError: there is no source to map from.
    """
    if given is None:
        if source is not None:
            raise ConfigError("source is given without transfer; give the map, too: transfer=MAP")
        return None
    if not isinstance(given, (TransferMap, Path, str)):
        raise ConfigError(f"transfer is a {type(given).__name__}; give a map's file, or TransferMap.load(file)")
    mapping = given if isinstance(given, TransferMap) else TransferMap.load(given)
    if config.reuse != "approximate":
        raise ConfigError(
            f"transfer needs reuse='approximate', for what is mapped is approximate; it is {config.reuse!r}"
        )
    if source is not None and source.closed:
        raise ConfigError("source is closed, so there is nothing to map; give an open engine, or open it again")
    if source is None and config.disk_path is None:
        raise ConfigError(
            "transfer has nowhere to take the source's KV from; give source=ENGINE, or the disk_path where it is stored"
        )
    made_from = mapping.source
    if source is not None and source.fingerprint not in made_from.fingerprints.values():
        raise TransferError(
            f"the map was made from {made_from.name} with fingerprint {made_from.fingerprints['plain']}, and the model "
            f"of source has {source.fingerprint}; make it again with: kvboost-rag transfer fit"
        )
    if mapping.refused is not None:
        _LOG.warning("the map from %s is not used, prompts are computed: %s", mapping.source.name, mapping.refused)
        return None
    return Transfer(mapping, source)


class Bridge:
    """Finds chunks of the source model and gives their KV as the target model's.

    Nothing is kept: what was mapped lives as long as the request.

    Args:
        mapping: accepted, and of these two models.
        source: engine that holds the source's chunks; None if ``own`` does.
        own: the target's library; what its disk holds of the source is still there when ``source`` is closed.
        rope: rotation of the target's keys.
        device: of the target.
    """

    def __init__(
        self, mapping: TransferMap, source: Source | None, own: Library, rope: Rope, device: torch.device
    ) -> None:
        self._map, self._source, self._own = mapping.to(device), source, own
        self._token_s = _seconds_of_a_token(self._map, rope)

    def _library(self) -> Library:
        """Where the source's chunks are now."""
        source = self._source
        if source is not None and source.closed:
            source = self._source = None
            _LOG.warning(
                "the source engine of the map from %s is closed: what it held in RAM is mapped no more, and computed "
                "instead; build this engine again with an open source",
                self._map.source.name,
            )
        return self._own if source is None else source.current_library()

    def match(self, scope: Scope, ids: IntArray, taken: Sequence[Hit], *, token_s: float | None) -> Match:
        """What the source has read of ``ids`` where no hit of the target is; all of it as approximate hits.

        Args:
            scope: of the target's request. Only chunks of the same namespace are found.
            ids: the prompt.
            taken: the target's own hits.
            token_s: see `Library.match`.
        """
        found: list[Hit] = []
        headers: dict[str, ChunkHeader] = {}
        if scope.fingerprint not in self._map.target.fingerprints.values():
            return Match((), None, (), {})  # another adapter, say, than the map was made for
        for fingerprint in self._map.source.fingerprints.values():
            other = self._library().match(Scope(fingerprint, scope.namespace), ids, approximate=True, token_s=token_s)
            found += outside(other.hits, [*taken, *found])
            headers |= other.headers
        return Match((), None, tuple(sorted(found, key=lambda hit: hit.start)), headers)

    @contextmanager
    def pin(self, keys: Sequence[str]) -> Iterator[Mapping[str, StoredRun] | None]:
        """Chunks of the source as the target's KV, until the block is left; None if any is gone by now."""
        with self._library().pin(keys) as chunks:
            yield None if chunks is None else {key: MappedRun(run, self._map) for key, run in chunks.items()}

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of loading and mapping what a plan takes from the source."""
        return self._library().loading_s(plan.transferred_keys) + self._token_s * plan.tokens("transferred")


class MappedRun:
    """A stored run of the source model that is mapped when it is placed. Never stored itself."""

    def __init__(self, run: StoredRun, mapping: TransferMap) -> None:
        self._run, self._map = run, mapping

    @property
    def codec(self) -> str:
        """None that a store knows."""
        return "mapped"

    @property
    def tokens(self) -> int:
        """Length of the run."""
        return self._run.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the source's tensors."""
        return self._run.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """None: it is not stored."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """None: it is not stored."""
        return {}

    def place(self, into: RequestKV, at: int, *, offset: int, length: int, delta: int, rope: Rope | None) -> None:
        """Write mapped keys and values of ``length`` tokens from ``offset`` to slots ``[at, at + length)``."""
        assert rope is not None, "keys are mapped without their rotation"
        source = self._map.source
        read = RequestKV(
            source.layers, source.kv_heads, source.head_dim, source.value_dim,
            length=length, capacity=length, dtype=torch.float32, device=into.keys.device,
        )  # fmt: skip
        # As if the run began at position 0, wherever it was encoded: the map wants keys without any rotation.
        self._run.place(read, 0, offset=offset, length=length, delta=delta - at, rope=self._map.rope)
        plain = self._map.rope.angles(torch.arange(length)).unrotate(read.keys[:, :, :length])
        keys, values = self._map.apply(plain, read.values[:, :, :length])
        rope.angles(torch.arange(at, at + length)).rotate(keys, into.keys[:, :, at : at + length])
        into.values[:, :, at : at + length].copy_(values)


def _seconds_of_a_token(mapping: TransferMap, rope: Rope) -> float:
    """Time of mapping one token, beyond what placing a native one takes."""
    source = mapping.source
    shape = (source.layers, source.kv_heads, TIMED_TOKENS)
    keys = torch.zeros(*shape, source.head_dim, device=mapping.device)
    values = torch.zeros(*shape, source.value_dim, device=mapping.device)
    angles, best = rope.angles(torch.arange(TIMED_TOKENS)), float("inf")
    for _ in range(2):
        started = time.perf_counter()
        mapped, _ = mapping.apply(keys, values)
        float(angles.unrotate(mapped).sum())  # reading a number waits for an accelerator
        best = min(best, time.perf_counter() - started)
    return best / TIMED_TOKENS
