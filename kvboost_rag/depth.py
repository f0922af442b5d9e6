"""A model cut at a layer: passes that end in front of it, and passes that begin there.

Repair chooses tokens in the middle of the depth. The tokens that ran up to there need not run again: they wait in front
of the layer, the chosen ones catch up, and all go on together.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from .errors import UnsupportedModelError
from .hf import ATTENTION_NAME
from .kv import EndOfPass


class Depth:
    """The layers of an unmodified Hugging Face model as places to stop and to go on, in copies that share its weights.

    Args:
        model: a causal language model.
        layers: how many layers it has.
    """

    def __init__(self, model: Any, layers: int) -> None:
        self._model, self._layers = model, layers
        self._decoder = model.get_decoder()

    def ending_before(self, layer: int) -> tuple[Any, list[torch.Tensor]]:
        """The model up to a layer: its forward ends with `EndOfPass`.

        Returns:
            The model, and a list that then holds what would have gone into the layer, ``(rows, hidden)``.
        """
        name, stack = self._stack()
        found: list[torch.Tensor] = []

        def end(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            found.append(hidden_states[0])
            raise EndOfPass

        # A twin, and no hook: other threads run the layer itself while this pass gives way to them.
        last = copy.copy(stack[layer])
        last.forward = end
        return self._with_layers({name: [*list(stack)[:layer], last]}, slice(0, layer + 1)), found

    def beginning_at(self, layer: int) -> Any:
        """The model from a layer on; it takes ``inputs_embeds`` ``(1, rows, hidden)``."""
        name, stack = self._stack()
        return self._with_layers({name: list(stack)[layer:]}, slice(layer, self._layers))

    def _with_layers(self, stack: dict[str, list[Any]], kept: slice) -> Any:
        config = copy.copy(self._decoder.config)
        config.num_hidden_layers = len(range(self._layers)[kept])
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[kept]
        config._attn_implementation = ATTENTION_NAME  # as in every pass, so that the model makes no mask of its own
        decoder = _with_modules(self._decoder, {name: torch.nn.ModuleList(layers) for name, layers in stack.items()})
        decoder.config = config
        model = _exchanged(self._model, self._decoder, decoder)
        if model is None:
            raise UnsupportedModelError(f"{type(self._model).__name__} holds no decoder that can be cut", layer=0)
        return model

    def _stack(self) -> tuple[str, torch.nn.ModuleList]:
        """Found anew each time, since adapters may replace layers."""
        for name, module in self._decoder.named_children():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self._layers:
                return name, module
        raise UnsupportedModelError(
            f"{type(self._decoder).__name__} holds no list of its {self._layers} layers; use reuse='exact'", layer=0
        )


def _exchanged(module: Any, old: Any, new: Any) -> Any:
    """A shallow copy with ``new`` in the place of ``old``, however deep adapters have wrapped it; None without one."""
    if module is old:
        return new
    for name, child in module._modules.items():
        twin = None if child is None else _exchanged(child, old, new)
        if twin is not None:
            return _with_modules(module, {name: twin})
    return None


def _with_modules(module: Any, replaced: dict[str, Any]) -> Any:
    """A shallow copy with some children of its own; the original keeps its."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **replaced}
    return twin
