"""Text for fitting a map: documents kept apart by what they are for, cut into sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from ..chunks import IntArray, as_ids
from ..errors import TransferError

Part = Literal["fit", "choose", "check"]
_OF_TEN: tuple[Part, ...] = ("fit",) * 7 + ("choose", "check", "check")
LEAST_SEQUENCES: dict[Part, int] = {"fit": 8, "choose": 1, "check": 4}


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences of token ids by what they are for; no document is in two parts.

    Attributes:
        fit: maps are fitted on these.
        choose: source layers are chosen by these.
        check: the gate measures on these.
        digest: identity of all of it, and of how it is cut.
    """

    fit: tuple[IntArray, ...]
    choose: tuple[IntArray, ...]
    check: tuple[IntArray, ...]
    digest: str

    @property
    def tokens(self) -> dict[Part, int]:
        """Tokens of each part."""
        return {"fit": _sum(self.fit), "choose": _sum(self.choose), "check": _sum(self.check)}


def split(documents: Sequence[IntArray], *, sequence_tokens: int, most_tokens: int | None = None) -> Texts:
    """Sequences of whole documents, one behind another, longer ones cut.

    Args:
        documents: ids of each; one that is there twice counts once, or it would be fitted on and held out, too.
        sequence_tokens: length of every sequence; what is left over at the end of a part is not used.
        most_tokens: tokens to fit on; None takes all. The other parts are cut in proportion.

    Raises:
        TransferError: too little text; says how much is needed.
    """
    rows: dict[Part, list[IntArray]] = {"fit": [], "choose": [], "check": []}
    different = {ids.tobytes(): ids for ids in documents if len(ids)}
    # By the order of their hashes, so that neither names nor folders decide what is held out.
    ranked = [different[raw] for raw in sorted(different, key=lambda raw: blake2b(raw, digest_size=8).digest())]
    for number, ids in enumerate(ranked):
        rows[_OF_TEN[number % len(_OF_TEN)]].append(ids)
    cut = {part: _sequences(found, sequence_tokens) for part, found in rows.items()}
    if most_tokens is not None:
        fits = -(-most_tokens // sequence_tokens)
        shares: dict[Part, float] = {"fit": 1, "choose": 1 / 7, "check": 2 / 7}
        cut = {p: found[: max(round(fits * shares[p]), LEAST_SEQUENCES[p])] for p, found in cut.items()}
    for part, least in LEAST_SEQUENCES.items():
        if len(cut[part]) < least:
            share = _OF_TEN.count(part) / len(_OF_TEN)
            raise TransferError(
                f"the text is too short: {_sum(ranked)} tokens in {len(ranked)} different documents give "
                f"{len(cut[part])} sequences of {sequence_tokens} tokens to {part}, {least} are needed; give about "
                f"{round(least * sequence_tokens / share)} tokens in ten documents or more (25,000 make a good map)"
            )
    digest = blake2b(digest_size=16)
    for part, found in cut.items():
        digest.update(f"{part} {len(found)} {sequence_tokens} ".encode())
        digest.update(b"".join(ids.tobytes() for ids in found))
    return Texts(tuple(cut["fit"]), tuple(cut["choose"]), tuple(cut["check"]), digest.hexdigest())


def _sequences(documents: Sequence[IntArray], length: int) -> list[IntArray]:
    if not documents:
        return []
    joined = np.concatenate(documents)
    return [as_ids(joined[at : at + length]) for at in range(0, len(joined) - length + 1, length)]


def _sum(parts: Sequence[IntArray]) -> int:
    return sum(len(ids) for ids in parts)
