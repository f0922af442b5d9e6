"""The whole way to a map: texts in, a file out that says whether it may be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from safetensors import SafetensorError

from ..errors import TransferError
from .fitting import FitOptions, fit
from .gate import measure, verdict
from .mapping import TransferMap
from .models import Reader, check_pair
from .texts import split

LEAST_SEQUENCE = 256  # tokens: room for a lead, a context, a question and what follows


def make(
    source: Reader,
    target: Reader,
    documents: Sequence[str],
    path: Path,
    *,
    options: FitOptions | None = None,
    sequence_tokens: int = 1024,
    most_tokens: int | None = None,
    show_progress: bool = False,
) -> TransferMap:
    """Fit a map on some documents, measure it on others, and save it with what was found.

    Args:
        source: model whose KV is there.
        target: model whose KV is wanted.
        documents: texts of the kind that both will read.
        path: file of the map; beside it, until the map is there, checkpoints.
        options: how to fit.
        sequence_tokens: length of what the models read at once, at least 256.
        most_tokens: tokens to fit on; None takes all.
        show_progress: draw progress bars, in a terminal or notebook.

    Raises:
        TransferError: no map between these models can hold, the text is too short, or the file cannot be written.
    """
    check_pair(source.side, target.side)
    if path.is_dir():  # said now, and not when all is read
        raise TransferError(f"{path} is a folder; name a file in it")
    if sequence_tokens < LEAST_SEQUENCE:
        raise TransferError(f"sequence_tokens is {sequence_tokens}; at least {LEAST_SEQUENCE} are needed")
    window = min(reader.executor.runner.spec.window_tokens for reader in (source, target))
    if sequence_tokens > window:
        raise TransferError(f"sequence_tokens is {sequence_tokens} and the smaller window of the two models {window}")
    texts = split([source.encode(text) for text in documents], sequence_tokens=sequence_tokens, most_tokens=most_tokens)
    checkpoint = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mapping = fit(source, target, texts, options or FitOptions(), partial=checkpoint, show_progress=show_progress)
        rows = measure(mapping, source, target, texts.check, show_progress=show_progress)
        figures = {name: asdict(row) for name, row in rows.items()}
        mapping = replace(mapping, figures=figures, refused=verdict(rows))
        mapping.save(path)
    except (OSError, SafetensorError) as error:
        raise TransferError(f"{path} cannot be written: {error}; name a file in a folder with room for it") from error
    checkpoint.unlink(missing_ok=True)
    return mapping
