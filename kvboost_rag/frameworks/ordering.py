"""Orders of documents that continue ones served before, so that prompts have long beginnings in common."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeVar

T = TypeVar("T")
NAMESPACES = 256  # remembered; the one used longest ago goes first


class PrefixOrders:
    """Orders that were served, per namespace. Thread-safe; a copy or a pickle remembers the same.

    Args:
        max_orders: orders remembered per namespace; the one used longest ago goes first.
    """

    def __init__(self, max_orders: int) -> None:
        self._max_orders = max_orders
        self._lock = threading.Lock()
        self._spaces: OrderedDict[Hashable, _Orders] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            spaces = OrderedDict((name, orders.copy()) for name, orders in self._spaces.items())
        return {"_max_orders": self._max_orders, "_spaces": spaces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())  # locks cannot be copied

    def arrange(
        self,
        ranked: Sequence[T],
        parts: Sequence[tuple[str, str]],
        namespace: Hashable = None,
        *,
        best: Literal["first", "last"] = "last",
    ) -> list[T]:
        """The documents in their new order, which is remembered as served.

        The others continue the longest beginning that was served; of what continues none, the better stand nearer to
        the best one. No document is dropped or doubled, and the same calls give the same orders.

        Args:
            ranked: documents, best first.
            parts: id, or an empty string, and text of each; equal for what a prompt would show alike.
            namespace: tenant. Tenants never see each other's orders.
            best: where the best one stands: last, next to the question, or first; then only orders that begin with it
                are continued.
        """
        if not ranked:
            return []
        keys = [_identity(*part) for part in parts]
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        sizes = {key: len(parts[at[0]][1]) for key, at in places.items()}
        # Of equal documents the best stands where the best belongs, and not its copy.
        at = -1 if best == "last" else 0
        return [ranked[places[key].pop(at)] for key in self._order(namespace, keys, sizes, best)]

    def _order(
        self, namespace: Hashable, ranked: list[bytes], sizes: dict[bytes, int], best: Literal["first", "last"]
    ) -> tuple[bytes, ...]:
        with self._lock:
            orders = self._spaces.setdefault(namespace, _Orders())
            self._spaces.move_to_end(namespace)
            if len(self._spaces) > NAMESPACES:
                self._spaces.popitem(last=False)
            if best == "last":
                others = ranked[1:]
                beginning = orders.beginning(others, sizes)
                rest = Counter(others) - Counter(beginning)
                # Worst first, so that the better stand nearer to the question.
                order = (*beginning, *sorted(rest.elements(), key=others.index, reverse=True), ranked[0])
            else:
                beginning = orders.beginning(ranked, sizes, first=ranked[0]) or (ranked[0],)
                rest = Counter(ranked) - Counter(beginning)
                order = (*beginning, *sorted(rest.elements(), key=ranked.index))
            orders.add(order, self._max_orders)
            return order


class _Orders:
    """Orders of one namespace, the latest last."""

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[bytes, ...], None] = OrderedDict()

    def copy(self) -> _Orders:
        copied = _Orders()
        copied._orders = self._orders.copy()
        return copied

    def beginning(self, keys: list[bytes], sizes: dict[bytes, int], first: bytes | None = None) -> tuple[bytes, ...]:
        """The longest beginning of a served order, with `first` in front, that these keys make; of equal the latest."""
        best: tuple[bytes, ...] = ()
        most = 0
        for order in reversed(self._orders):
            if first not in (None, order[0]):
                continue
            left, length, size = Counter(keys), 0, 0
            while length < len(order) and left[order[length]] > 0:
                left[order[length]] -= 1
                size += sizes[order[length]]
                length += 1
            if size > most:
                best, most = order[:length], size
        return best

    def add(self, order: tuple[bytes, ...], limit: int) -> None:
        self._orders[order] = None
        self._orders.move_to_end(order)
        if len(self._orders) > limit:
            self._orders.popitem(last=False)


def _identity(name: str, text: str) -> bytes:
    """Equal for what a prompt would show alike: the content counts, since a document may change under its id."""
    digest = blake2b(digest_size=16)
    for part in (name, text):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()
