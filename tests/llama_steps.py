"""A transformation that worker processes load quickly: this module must import LlamaIndex alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode, TransformComponent


class Embedded(TransformComponent):
    """Gives each node an embedding."""

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        for at, one in enumerate(nodes):
            one.embedding = [float(at)] * 8
        return nodes
