"""Identity of a model: what must be equal for stored KV to belong to it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

SAMPLE = 16  # numbers of each weight that are compared at every request
SMALL = 4096  # buffers up to this size are compared entirely: rotary frequencies, scales
STEPS = 1024  # per octave: machines differ in the last bits of the powers that frequencies are


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
    for name, buffer in _buffers(model):
        h.update(f"{name}|{tuple(buffer.shape)}|{buffer.dtype}|".encode())
        h.update(_rounded(buffer))
    if tokenizer is not None:
        h.update(_tokenizer_text(tokenizer).encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = json.loads(backend.to_str())
    for state in ("truncation", "padding"):  # what its last caller asked for, and no part of what it is
        parts.pop(state, None)
    return json.dumps(parts, sort_keys=True)


class Watch:
    """Notices, cheaply enough for every request, whether a model is still the one it was.

    It sees weights that are replaced or edited in place, adapters that are attached, merged, switched, scaled or
    disabled, other rotary frequencies, and a move to another dtype or device. Edits through ``.data``, as adapters are
    merged, leave no trace in autograd's version counters, so some numbers of each weight are compared too; such an edit
    of others goes unseen.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places: Hashable = None
        self._samples: list[torch.Tensor] = []

    def look(self) -> tuple[Hashable, Hashable]:
        """Two values: one changes when the model must be inspected anew, the other when its fingerprint must."""
        weights = list(self._model.parameters())
        buffers = [buffer.detach() for _, buffer in _buffers(self._model)]
        shapes = tuple((tuple(w.shape), w.dtype, w.device) for w in (*weights, *buffers))
        places = tuple((id(w), w.data_ptr()) for w in weights)
        if places != self._places:
            self._places, self._samples = places, _samples(weights)
        versions = tuple(0 if w.is_inference() else w._version for w in weights)
        numbers = tuple(sample.cpu().numpy().tobytes() for sample in _joined(self._samples))
        # Keys are moved by these, so that others make another structure.
        scales = tuple(
            part.cpu().numpy().tobytes() for part in _joined([b.reshape(-1).view(torch.uint8) for b in buffers])
        )
        return (shapes, scales), (places, versions, numbers, scales, repr(_adapters(self._model)))


def _buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Small numbers that belong to a model and are in no checkpoint, such as rotary frequencies.

    Frequencies that follow the length of the last prompt are left out; what they come from is not.
    """
    for path, module in model.named_modules():
        if not module._buffers:  # most have none, and this is asked at every request
            continue
        kinds = str(getattr(module, "rope_type", ""))
        follows = "dynamic" in kinds or "longrope" in kinds
        for name, buffer in module._buffers.items():
            passing = follows and name.endswith("inv_freq") and "original" not in name
            if (
                buffer is not None
                and not passing
                and buffer.is_floating_point()
                and 0 < buffer.numel() <= SMALL
                and not buffer.is_meta
            ):
                yield f"{path}.{name}", buffer


def _rounded(buffer: torch.Tensor) -> bytes:
    """Numbers to a fourteen-hundredth, so that they are the same on every machine."""
    numbers = buffer.detach().cpu().double().reshape(-1).numpy()
    with np.errstate(divide="ignore"):
        steps = np.rint(np.log2(np.abs(numbers)) * STEPS)
    raw: bytes = (np.sign(numbers) * np.where(numbers == 0, 0, steps + (1 << 20))).astype("<i8").tobytes()
    return raw


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
