"""What a chunk is worth to the store, by the measured costs of this model on this machine."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .chunks import ChunkHeader
from .config import EngineConfig
from .costs import CostModel
from .kv import StoredRun
from .repair import Recipe
from .rope import Rope
from .runner import ModelRunner
from .store import Chunk
from .store.eviction import Worth


class Appraiser:
    """Seconds that a chunk saves, and the norm of its keys where somebody asks for it.

    Attributes:
        costs: of the model; None while they are not measured, and then all bytes count as equally dear.
        recipe: how moved chunks are repaired.

    Args:
        runner: of the model.
        rope: rotation of its keys; None where keys stay as they are.
        config: says whether chunks are moved, and whether anything looks at norms.
        foreign: fingerprints of another model, whose chunks come from a disk that both use; their KV has its own shape.
    """

    def __init__(
        self, runner: ModelRunner, rope: Rope | None, config: EngineConfig, *, foreign: Collection[str] = ()
    ) -> None:
        self.costs: CostModel | None = None
        self.recipe: Recipe | None = None
        self._runner, self._rope, self._foreign = runner, rope, foreign
        self._moves = config.reuse == "approximate"
        self._norms = config.eviction == "importance" or config.trace_path is not None

    def worth(self, chunk: Chunk[StoredRun]) -> Worth:
        """What a chunk that enters the store is worth."""
        known = self._norms and chunk.header.scope.fingerprint not in self._foreign
        return Worth(self.saved_s(chunk.header), self.key_norm(chunk) if known else 0.0)

    def saved_s(self, header: ChunkHeader) -> float | None:
        """Seconds that one use of the whole chunk saves, about where it stood when it was computed."""
        if self.costs is None:
            return None
        # A prompt as it was served is used at its own place and not repaired again.
        repaired = self._moves and header.origin != "served"
        return self.costs.saved(len(header), header.base, self.recipe if repaired else None)

    def key_norm(self, chunk: Chunk[StoredRun]) -> float:
        """Mean L2 norm of the keys over layers, heads and tokens. A rotation does not change it."""
        run = chunk.kv
        kv = self._runner.new_kv(run.tokens, run.tokens)
        run.place(kv, 0, offset=0, length=run.tokens, delta=-chunk.header.base, rope=self._rope)
        return float(torch.linalg.vector_norm(kv.keys[:, :, : run.tokens].float(), dim=-1).mean())
