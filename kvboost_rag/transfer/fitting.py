"""Making a map: both models read the same text, sums are kept, source layers are chosen, ridges are solved.

Stopped anywhere, the same fit goes on where its last checkpoint was. Memory depends on the models, not on the text.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..chunks import IntArray
from ..errors import TransferError
from ..progress import progress
from .mapping import Affine, TransferMap, head_of, inputs, save_whole
from .models import Reader, Reading, check_pair
from .sums import KINDS, Kind, Shape, Sums, choose_layers, solve
from .texts import Texts

CHECKPOINT_S = 60.0
SINKS = 4  # first tokens of a sequence, whose keys are unlike all others; a prompt has its own
MOST_WEIGHT = 8.0  # times the mean: a few tokens that everything attends to must not be all that counts


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a map is made.

    Attributes:
        sources: source layers that each layer of the target is mapped from.
        reach: how far these may be from the layer at the same share of the depth.
        strength: of the ridge, in mean variances of the inputs.
        all_heads: map each head from all KV heads of the source, not only from the one that stands where it does.
        by_attention: let tokens count by the attention that the target pays to them.
    """

    sources: int = 4
    reach: int = 4
    strength: float = 0.01
    all_heads: bool = False
    by_attention: bool = True

    def __post_init__(self) -> None:
        for name, low in (("sources", 1), ("reach", 0)):
            if getattr(self, name) < low:
                raise TransferError(f"{name} is {getattr(self, name)}; it must be {low} or more")
        if not 0 < self.strength < float("inf"):
            raise TransferError(f"strength is {self.strength}; it must be a positive number")


def fit(
    source: Reader, target: Reader, texts: Texts, options: FitOptions, *, partial: Path, show_progress: bool = False
) -> TransferMap:
    """Fit a map, which no gate has seen yet.

    Args:
        source: model whose KV is there.
        target: model whose KV is wanted.
        texts: what both read.
        options: how.
        partial: file of checkpoints; removed by whoever keeps the map.
        show_progress: draw a progress bar, in a terminal or notebook.

    Raises:
        TransferError: no map between these models can hold, or a model gives numbers that are not finite.
    """
    check_pair(source.side, target.side)
    started = time.perf_counter()
    sums, seconds_before = _read_all(source, target, texts, options, partial, show_progress)
    fitted, held = sums["fit"].centred(), sums["choose"].centred()
    settings = {"count": options.sources, "reach": options.reach, "strength": options.strength}
    maps: dict[Kind, Affine] = {}
    shares: dict[str, list[float]] = {}
    with progress("choosing layers", 2 * target.side.layers, unit="layer", show=show_progress) as bar:
        for kind in KINDS:
            chosen = []
            for layer in range(target.side.layers):
                layers, share = choose_layers(fitted, held, kind, layer, **settings)  # type: ignore[arg-type]
                chosen.append(layers)
                shares.setdefault(kind, []).append(round(share, 4))
                bar.update()
            dtype = target.executor.runner.spec.dtype
            maps[kind] = solve(fitted, kind, chosen, strength=options.strength, dtype=dtype)
    about = {
        **asdict(options),
        "text": texts.digest,
        "tokens": texts.tokens,
        "explained": shares,
        "fit_s": round(seconds_before + time.perf_counter() - started, 1),
    }
    centre = fitted.x_mean.float().view(-1, source.side.layers, fitted.shape.inputs)
    both = (maps["keys"], maps["values"])
    mapping = TransferMap(source.side, target.side, source.rope, *both, centre, options.all_heads, about=about)
    return mapping.to(mapping.device)


def shape_of(source: Reader, target: Reader, options: FitOptions) -> Shape:
    """Sizes of what is summed."""
    a, b = source.side, target.side
    return Shape(
        layers=a.layers,
        inputs=(a.head_dim + a.value_dim) * (a.kv_heads if options.all_heads else 1),
        groups=1 if options.all_heads else a.kv_heads,
        target_layers=b.layers,
        target_heads=b.kv_heads,
        key_dim=b.head_dim,
        value_dim=b.value_dim,
        group_of=tuple(head_of(a.kv_heads, b.kv_heads, all_heads=options.all_heads)),
    )


def add(sums: Sums, source: Reading, target: Reading, options: FitOptions) -> None:
    """Add a sequence that both models have read."""
    rest = slice(SINKS, None)
    x = inputs(source.keys, source.values, list(range(sums.shape.layers)), options.all_heads)[:, rest]
    y = inputs(target.keys, target.values, list(range(sums.shape.target_layers)), False)[:, rest]
    if not bool(x.isfinite().all() and y.isfinite().all()):
        raise TransferError(
            "a model gives keys or values that are not finite; load it in another dtype, such as --dtype float32"
        )
    weights = weights_of(target.mass, len(source.keys[0, 0]), options)[rest]
    sums.add(*(part.to(sums.device) for part in (x, y, weights)))


def weights_of(mass: torch.Tensor | None, tokens: int, options: FitOptions) -> torch.Tensor:
    """How much each token counts: half alike, half by attention."""
    if mass is None or not options.by_attention:
        return torch.ones(tokens)
    share = mass / mass[SINKS:].mean().clamp_min(1e-12)
    return 0.5 + 0.5 * share.clamp_max(MOST_WEIGHT)


def _read_all(
    source: Reader, target: Reader, texts: Texts, options: FitOptions, partial: Path, show: bool
) -> tuple[dict[str, Sums], float]:
    """Sums over all text, and the seconds that earlier runs spent on what was taken from the checkpoint."""
    shape, device = shape_of(source, target, options), target.executor.runner.spec.device
    sums = {part: Sums(shape, device) for part in ("fit", "choose")}
    identity = _identity(source, target, texts, options)
    done, spent = _resume(partial, identity, sums)
    rows: list[tuple[str, IntArray]] = [("fit", ids) for ids in texts.fit] + [("choose", ids) for ids in texts.choose]
    saved = started = time.perf_counter()
    with progress("reading", len(rows), unit="sequence", show=show) as bar:
        bar.update(done)
        for number in range(done, len(rows)):
            part, ids = rows[number]
            add(sums[part], source.read(ids), target.read(ids, attention=options.by_attention), options)
            bar.update()
            if time.perf_counter() - saved > CHECKPOINT_S and number + 1 < len(rows):
                _checkpoint(partial, identity, sums, number + 1, spent + time.perf_counter() - started)
                saved = time.perf_counter()
    if done < len(rows):
        _checkpoint(partial, identity, sums, len(rows), spent + time.perf_counter() - started)
    return sums, spent


def _identity(source: Reader, target: Reader, texts: Texts, options: FitOptions) -> str:
    plain = (source.side.fingerprints["plain"], target.side.fingerprints["plain"])
    return json.dumps([*plain, texts.digest, options.all_heads, options.by_attention])


def _checkpoint(path: Path, identity: str, sums: dict[str, Sums], done: int, seconds: float) -> None:
    tensors = {f"{part}.{name}": tensor for part, one in sums.items() for name, tensor in one.tensors.items()}
    save_whole(tensors, path, {"identity": identity, "done": str(done), "seconds": str(seconds)})


def _resume(path: Path, identity: str, sums: dict[str, Sums]) -> tuple[int, float]:
    """Fill the sums from a checkpoint of the same fit; sequences that it has, and the seconds they took."""
    if not path.is_file():
        return 0, 0.0
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            if metadata.get("identity") != identity:
                return 0, 0.0
            for part, one in sums.items():
                one.tensors = {name: file.get_tensor(f"{part}.{name}").to(one.device) for name in one.tensors}
    except (SafetensorError, OSError):
        return 0, 0.0
    return int(metadata["done"]), float(metadata["seconds"])
