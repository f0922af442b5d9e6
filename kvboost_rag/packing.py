"""The KV of documents that are encoded one behind another, in several orders, and averaged.

What stood in front of a document leaves its mark on the document's KV. The prompt that will use it shows other
neighbours, so that mark is noise, and the mean over several orders has less of it: at no cost when the prompt comes,
it halves what is left to repair (docs/accuracy.md). Keys are averaged where they meet at one position, that is with
the same rotation.

Approximate: a mean is not the KV of any one history, and never serves an exact hit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .chunks import IntArray, as_ids
from .kv import RequestKV
from .prefill import Executor


def order(number: int, orders: int, count: int) -> tuple[int, ...]:
    """The documents of a pack in one of several orders: rotations first, at least two of them, then their reverses."""
    rotations = max(min(orders, 2), (orders + 1) // 2)
    shift = number % rotations * count // rotations
    rotated = (*range(shift, count), *range(shift))
    return rotated if number < rotations else rotated[::-1]


class PackEncoding:
    """Encodes the documents of a pack.

    The first two orders are rotations: all documents but one keep their neighbour right in front of them, and
    neighbours are often pieces of one text that refer to each other. More orders add the reverses, which average out
    more of what is noise, and some of what ties neighbours together (docs/accuracy.md).

    Args:
        executor: runs the model; with more than one order it needs the rotation of keys.
        lead: ids in front of every order.
        documents: ids of each, at least one.
        separator: ids in front of each document.
        orders: how many to average; there are no more than documents.

    Attributes:
        ids: what the documents have seen and they themselves, int32. With several orders a document has seen all of its
            pack, so the pack stands there twice, the second time for the documents' own places.
        starts: where each document begins in `ids`.
        exact: whether a document's KV is that of its history in `ids`, which it is with one order.
        kv: of `ids`, as far as documents are done.
    """

    def __init__(
        self,
        executor: Executor,
        lead: IntArray,
        documents: Sequence[IntArray],
        *,
        separator: IntArray,
        orders: int,
    ) -> None:
        self._executor, self._lead, self._documents, self._separator = executor, lead, documents, separator
        self._orders = min(orders, len(documents))
        self.exact = self._orders == 1
        pack = [part for ids in documents for part in (separator, ids)]
        seen = [lead] if self.exact else [lead, *pack]
        sizes = [len(separator) + len(ids) for ids in documents]
        first = sum(map(len, seen)) + len(separator)
        self.starts = [first + before for before in itertools.accumulate(sizes[:-1], initial=0)]
        self.ids = as_ids(np.concatenate([*seen, *pack]))
        self._growing = executor.grow(len(lead) + sum(sizes))
        self.kv: RequestKV = self._growing.kv if self.exact else executor.runner.new_kv(len(self.ids), len(self.ids))

    def steps(self) -> Iterator[int | None]:
        """Run the model piece by piece: after each piece, the document whose KV is done with it, if any."""
        count = len(self._documents)
        for number in range(self._orders):
            if number:
                self._growing = self._executor.grow(self._growing.kv.capacity)
            self._growing.extend(self._lead)
            yield None
            for document in order(number, self._orders, count):
                ids = self._documents[document]
                at = self._growing.extend(np.concatenate([self._separator, ids])) + len(self._separator)
                if not self.exact:
                    self._add(document, at, number + 1)
                yield document if number + 1 == self._orders else None

    def _add(self, document: int, at: int, number: int) -> None:
        """Take what the running order gave for a document into its mean, of ``number`` orders by now."""
        rope = self._executor.rope
        assert rope is not None, "documents are averaged only where they can be moved"
        start, length = self.starts[document], len(self._documents[document])
        given, mean = slice(at, at + length), slice(start, start + length)
        keys, values = self._growing.kv.keys[:, :, given], self._growing.kv.values[:, :, given]
        moved = torch.empty_like(keys)
        rope.move(keys, start - at, moved)
        for total, one in ((self.kv.keys, moved), (self.kv.values, values)):
            if number == 1:
                total[:, :, mean] = one
            else:
                total[:, :, mean].lerp_(one, 1 / number)
