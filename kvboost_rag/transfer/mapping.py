"""A linear map from the KV of one model to that of another one of its family, and the file that holds it.

Keys are mapped without their rotation (after their norm, where a model has one), values as they are. Each KV head of
each layer of the target has an affine map of its own, from a few layers of the source.

Sources: separate ridge maps of K and V from several source layers, arXiv 2608.03893; inputs of the matching head, arXiv
2609.00891. Re-implemented from their descriptions. Approximate: what is mapped is repaired like any moved KV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import TransferError
from ..rope import Rope, RopeGroup

FORMAT = 1
_ABOUT, _SUM = "kvboost-rag-transfer", "xxh3"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models of a map.

    Attributes:
        name: what the user called it, for messages.
        family: `model_type` of its config.
        vocabulary: hash of what each token id means.
        fingerprints: of the model, by the name of the codec that stores its KV.
        layers, kv_heads, head_dim, value_dim: shape of its KV.
    """

    name: str
    family: str
    vocabulary: str
    fingerprints: Mapping[str, str]
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """The maps of all layers and heads of a target's keys, or of its values.

    Attributes:
        layers: source layers that each target layer is mapped from, int64 ``(target_layers, n)``.
        weight: for inputs less their mean, ``(target_layers, target_heads, inputs, dim)``, in the dtype of the models.
        bias: float32 ``(target_layers, target_heads, dim)``.
    """

    layers: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def to(self, device: torch.device) -> Affine:
        """On another device; the list of layers stays."""
        return Affine(self.layers, self.weight.to(device), self.bias.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class TransferMap:
    """KV of ``source`` → KV of ``target``. Make one with `kvboost-rag transfer fit`, read it with `load`.

    Attributes:
        source, target: the two models.
        rope: rotation of the source's keys.
        keys, values: the maps.
        centre: means of the inputs, float32 ``(kv_heads, layers, inputs of a layer)``; with `all_heads` the first is 1.
            Taken off before anything is rounded: some keys are large numbers that hardly differ.
        all_heads: whether inputs are all KV heads of a source layer, or the one that stands where the target's does.
        figures: what the gate measured on held-out text, see `gate`.
        refused: why the map must not be used; None if it passed.
        about: how it was made: options, texts.
    """

    source: Side
    target: Side
    rope: Rope
    keys: Affine
    values: Affine
    centre: torch.Tensor
    all_heads: bool
    figures: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the gate let it pass."""
        return self.refused is None

    @property
    def device(self) -> torch.device:
        """Where the maps lie."""
        return self.keys.weight.device

    def to(self, device: torch.device) -> TransferMap:
        """The same map on another device."""
        parts = {name: getattr(self, name).to(device) for name in ("rope", "keys", "values", "centre")}
        return replace(self, **parts)

    def apply(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of the target.

        Args:
            keys: of the source, without rotation, float32 ``(layers, kv_heads, seq, head_dim)``.
            values: of the source, float32 ``(layers, kv_heads, seq, value_dim)``.

        Returns:
            Keys without rotation and values of the target, float32, likewise.
        """
        heads = head_of(self.source.kv_heads, self.target.kv_heads, all_heads=self.all_heads)
        read: dict[tuple[int, ...], torch.Tensor] = {}  # neighbours among the target's layers often share their inputs
        out = (list[torch.Tensor](), list[torch.Tensor]())
        for at in range(self.target.layers):
            wanted = {tuple(affine.layers[at].tolist()) for affine in (self.keys, self.values)}
            read = {layers: read[layers] if layers in read else self._read(keys, values, layers) for layers in wanted}
            for affine, made in zip((self.keys, self.values), out, strict=True):
                x = read[tuple(affine.layers[at].tolist())]  # no copy of it for every head: it is most of the time
                rows = [x[group] @ weight for group, weight in zip(heads, affine.weight[at], strict=True)]
                made.append(torch.stack(rows).float() + affine.bias[at][:, None])
        return torch.stack(out[0]), torch.stack(out[1])

    def _read(self, keys: torch.Tensor, values: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
        centre = self.centre[:, list(layers)].flatten(1)[:, None]
        return (inputs(keys, values, list(layers), self.all_heads) - centre).to(self.keys.weight.dtype)

    def save(self, path: Path) -> None:
        """Write the map to a file, which appears whole or not at all."""
        tensors = {
            f"{name}.{part}": getattr(getattr(self, name), part).cpu().contiguous()
            for name in ("keys", "values")
            for part in ("layers", "weight", "bias")
        }
        tensors["centre"] = self.centre.cpu().contiguous()
        tensors |= {f"rope.{i}": group.inv_freq.cpu().contiguous() for i, group in enumerate(self.rope.groups)}
        if (bias := self.rope.key_bias) is not None:
            tensors["rope.key_bias"] = bias.cpu().contiguous()
        about = {
            "format": FORMAT,
            "source": asdict(self.source),
            "target": asdict(self.target),
            "rope": [{"layers": group.layers, "layout": group.layout} for group in self.rope.groups],
            "all_heads": self.all_heads,
            "figures": dict(self.figures),
            "refused": self.refused,
            "about": dict(self.about),
        }
        text = json.dumps(about)
        save_whole(tensors, path, {_ABOUT: text, _SUM: _digest(text, tensors)})

    @classmethod
    def load(cls, path: Path | str) -> TransferMap:
        """Read a map.

        Raises:
            TransferError: there is no such file, or it is no whole map.
        """
        path = Path(path).expanduser()
        remedy = "make it again with: kvboost-rag transfer fit"
        if not path.is_file():
            raise TransferError(f"there is no map {path}; {remedy}")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise TransferError(f"{path} is no whole map ({error}); copy it again, or {remedy}") from error
        if _ABOUT not in metadata:
            raise TransferError(f"{path} is no map for KV transfer; {remedy}")
        if metadata.get(_SUM) != _digest(metadata[_ABOUT], tensors):
            raise TransferError(f"{path} is damaged: its checksum is not that of its content; {remedy}")
        about = json.loads(metadata[_ABOUT])
        if about["format"] != FORMAT:
            raise TransferError(f"{path} has format {about['format']}, this version reads {FORMAT}; {remedy}")
        if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
            raise TransferError(f"{path} holds numbers that are not finite, in {bad[0]}; {remedy}")
        return _from(about, tensors)


def save_whole(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that appears whole or not at all."""
    part = path.with_name(path.name + ".writing")
    save_file(tensors, part, metadata)
    part.replace(path)


def inputs(keys: torch.Tensor, values: torch.Tensor, layers: list[int], all_heads: bool) -> torch.Tensor:
    """What a target layer is mapped from: keys and values of some source layers, side by side.

    Args:
        keys: of the source, without rotation, ``(layers, kv_heads, seq, head_dim)``.
        values: of the source, ``(layers, kv_heads, seq, value_dim)``.
        layers: which.
        all_heads: all heads side by side instead of each on its own.

    Returns:
        ``(kv_heads, seq, inputs)``, or ``(1, seq, kv_heads · inputs)`` with all heads.
    """
    both = torch.cat([keys[layers], values[layers]], -1)  # (n, kv_heads, seq, dims)
    if all_heads:
        return both.permute(2, 0, 1, 3).flatten(1)[None]
    return both.permute(1, 2, 0, 3).flatten(2)


def head_of(source_heads: int, target_heads: int, *, all_heads: bool) -> list[int]:
    """For each head of the target, the row of `inputs` that it is mapped from."""
    return [0 if all_heads else head * source_heads // target_heads for head in range(target_heads)]


def _from(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> TransferMap:
    source, target = Side(**about["source"]), Side(**about["target"])
    groups = [
        RopeGroup(tuple(group["layers"]), tensors[f"rope.{i}"], group["layout"])
        for i, group in enumerate(about["rope"])
    ]
    bias = tensors.get("rope.key_bias")
    keys, values = (
        Affine(*(tensors[f"{name}.{part}"] for part in ("layers", "weight", "bias"))) for name in ("keys", "values")
    )
    rope = Rope(groups, source.layers, None if bias is None else lambda: bias)
    given = (about["all_heads"], about["figures"], about["refused"], about["about"])
    return TransferMap(source, target, rope, keys, values, tensors["centre"], *given)


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    h = xxhash.xxh3_128(text.encode())
    for name in sorted(tensors):
        h.update(name.encode())
        h.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()
