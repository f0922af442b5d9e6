"""Identity of a model: what must be equal for stored KV to belong to it."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import torch
import xxhash

SAMPLE = 16  # numbers of each weight that are compared at every request


def fingerprint(model: Any, tokenizer: Any, codec: str = "plain") -> str:
    """Identity of weights, adapters, tokenizer, RoPE, dtype and codec; canonical across processes and machines."""
    h = xxhash.xxh3_128(b"kvboost-rag 1")
    if codec != "plain":
        h.update(f"codec {codec}".encode())
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"):
        config.pop(volatile, None)
    h.update(json.dumps(config, sort_keys=True, default=str).encode())
    h.update(type(model).__name__.encode())
    h.update(repr(_adapters(model)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        h.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        h.update(text.encode("utf-8", "surrogatepass"))
    return h.hexdigest()


class Watch:
    """Notices, cheaply enough for every request, whether a model is still the one it was.

    It sees weights that are replaced or edited in place, adapters that are attached, merged, switched, scaled or
    disabled, and a move to another dtype or device. Edits through ``.data``, as adapters are merged, leave no trace in
    autograd's version counters, so some numbers of each weight are compared too; such an edit of others goes unseen.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places: Hashable = None
        self._samples: list[torch.Tensor] = []

    def look(self) -> tuple[Hashable, Hashable]:
        """Two values: one changes when the model must be inspected anew, the other when its fingerprint must."""
        weights = list(self._model.parameters())
        shapes = tuple((tuple(w.shape), w.dtype, w.device) for w in weights)
        places = tuple((id(w), w.data_ptr()) for w in weights)
        if places != self._places:
            self._places, self._samples = places, _samples(weights)
        versions = tuple(0 if w.is_inference() else w._version for w in weights)
        numbers = tuple(sample.cpu().numpy().tobytes() for sample in _joined(self._samples))
        return shapes, (places, versions, numbers, repr(_adapters(self._model)))


def _samples(weights: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Views of a few numbers out of the middle of each weight, as bytes."""
    views = []
    for weight in weights:
        if weight.is_contiguous() and weight.numel() and not weight.is_meta:
            middle = max(0, (weight.numel() - SAMPLE) // 2)
            views.append(weight.detach().view(-1)[middle : middle + SAMPLE].view(torch.uint8))
    return views


@torch.inference_mode()
def _joined(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    devices = {sample.device: None for sample in samples}
    return [torch.cat([sample for sample in samples if sample.device == device]) for device in devices]


def _adapters(model: Any) -> list[tuple[Any, ...]]:
    """State of adapter layers (PEFT): switching or disabling one changes no weight."""
    return [
        (list(m.active_adapters), bool(m.disable_adapters), sorted(dict(getattr(m, "scaling", {})).items()))
        for m in model.modules()
        if hasattr(m, "base_layer") and hasattr(m, "active_adapters")
    ]
