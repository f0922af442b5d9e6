"""Made-up traces: what a store is asked for under workloads of known shape. Deterministic by seed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .costs import CostModel
from .errors import ConfigError
from .repair import Recipe
from .tracing import Asked, Event

# A 135M model in bfloat16: 30 layers of 3 key heads of 64 channels; seconds measured on one core of a laptop-class CPU.
TOKEN_BYTES = 23_040
COSTS = CostModel(pass_s=0.16, token_s=3.4e-3, pair_s=1.7e-6, move_s=6.7e-6)
QUESTION_TOKENS = 40
RATE_PER_S = 0.5  # requests; arrivals are Poisson


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a made-up workload.

    Attributes:
        requests: how many.
        documents: how many there are to retrieve from.
        per_request: how many each prompt holds (k of N).
        zipf: exponent of their popularity.
        tokens: median length; lengths are log-normal.
        spread: standard deviation of the logarithm of the length.
        seed: of everything that is drawn.
    """

    requests: int = 3000
    documents: int = 1000
    per_request: int = 6
    zipf: float = 0.9
    tokens: int = 220
    spread: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "requests": 1,
            "per_request": 1,
            "documents": 12 * self.per_request,
            "zipf": 0,
            "tokens": 24,
            "seed": 0,
        }
        for name, low in least.items():
            if not (value := getattr(self, name)) >= low:
                raise ConfigError(f"{name} is {value!r}; a made-up trace needs at least {low}")


class _Maker:
    """Draws documents and writes events."""

    def __init__(self, shape: Shape, kind: str) -> None:
        self.shape = shape
        self.rng = np.random.default_rng([shape.seed, *kind.encode()])
        self._t = 0.0

    def documents(self, count: int, prefix: str) -> list[Asked]:
        """Documents of mixed lengths, 24 to 4,000 tokens, the one seldom asked for as likely long as any."""
        shape = self.shape
        lengths = np.exp(self.rng.normal(np.log(shape.tokens), shape.spread, count)).clip(24, 4000).astype(int)
        # Measured key norms hardly differ between documents and say nothing of their popularity (docs/store.md).
        norms = self.rng.normal(20.0, 0.4, count)
        return [
            document(f"{prefix}{i}", int(n), float(norm))
            for i, (n, norm) in enumerate(zip(lengths, norms, strict=True))
        ]

    def popular(self, count: int) -> npt.NDArray[np.float64]:
        """Zipf probabilities."""
        weights = np.arange(1, count + 1, dtype=np.float64) ** -self.shape.zipf
        return np.asarray(weights / weights.sum())

    def choose(self, probabilities: npt.NDArray[np.float64], size: int) -> list[int]:
        """Different documents in shuffled order, each about as often as its probability says."""
        # Gumbel's trick: the same as drawing one after another without putting back.
        keys = np.log(probabilities) + self.rng.gumbel(size=len(probabilities))
        chosen = np.argpartition(-keys, size - 1)[:size]
        return self.rng.permutation(chosen).tolist()  # type: ignore[no-any-return]

    def request(self, asked: list[Asked], namespace: str = "tenant") -> Event:
        """A prompt of chunks and a question."""
        self._t += float(self.rng.exponential(1 / RATE_PER_S))
        tokens = sum(each.wanted for each in asked) + QUESTION_TOKENS
        return Event("request", round(self._t, 3), namespace, tuple(asked), prompt_tokens=tokens)


def document(name: str, tokens: int, key_norm: float = 20.0, base: int = 600) -> Asked:
    """A chunk of a moved document, at the costs of this module."""
    saved_s = COSTS.saved(tokens, base, Recipe())
    return Asked(name, tokens, tokens * TOKEN_BYTES, tokens, saved_s, origin="warm", key_norm=key_norm)


def shuffled_rag(shape: Shape) -> Iterator[Event]:
    """Some of all documents by Zipf's law, in any order."""
    maker = _Maker(shape, "shuffled-rag")
    documents, p = maker.documents(shape.documents, "d"), maker.popular(shape.documents)
    for _ in range(shape.requests):
        yield maker.request([documents[i] for i in maker.choose(p, shape.per_request)])


def scans(shape: Shape) -> Iterator[Event]:
    """As `shuffled_rag`, but half of each prompt, and for a while all of it, is never asked for again."""
    maker = _Maker(shape, "scans")
    documents, p = maker.documents(shape.documents, "d"), maker.popular(shape.documents)
    once = iter(maker.documents(shape.requests * shape.per_request, "once"))
    for number in range(shape.requests):
        scanning = number % 500 >= 400
        regular = 0 if scanning else shape.per_request - shape.per_request // 2
        chosen = [documents[i] for i in maker.choose(p, regular)] if regular else []
        yield maker.request(chosen + [next(once) for _ in range(shape.per_request - regular)])


def changing(shape: Shape) -> Iterator[Event]:
    """As `shuffled_rag`, but every tenth of the trace other documents are the popular ones."""
    maker = _Maker(shape, "changing")
    documents, p = maker.documents(shape.documents, "d"), maker.popular(shape.documents)
    order = maker.rng.permutation(shape.documents)
    for number in range(shape.requests):
        if number % max(shape.requests // 10, 1) == 0:
            order = maker.rng.permutation(shape.documents)
        yield maker.request([documents[order[i]] for i in maker.choose(p, shape.per_request)])


def conversations(shape: Shape) -> Iterator[Event]:
    """Dialogues of some turns, several at a time; each turn asks for all before it, a few documents, and grows."""
    maker = _Maker(shape, "conversations")
    documents, p = maker.documents(shape.documents, "d"), maker.popular(shape.documents)
    system = document("system", 300)
    live: list[list[Asked]] = []
    for number in range(shape.requests):
        if len(live) < 20 and (not live or maker.rng.random() < 0.2):
            found = [documents[i] for i in maker.choose(p, max(shape.per_request // 2, 1))]
            live.append([system, *found])
        at = int(maker.rng.integers(len(live)))
        yield maker.request(live[at])
        turn = document(f"turn{number}", int(maker.rng.integers(40, 300)))
        live[at] = [*live[at], turn]
        if maker.rng.random() < 0.15:
            del live[at]


def tenants(shape: Shape) -> Iterator[Event]:
    """Twelve tenants with documents of their own, some much busier than others; one reads everything once, in order."""
    maker = _Maker(shape, "tenants")
    count = max(shape.documents // 12, shape.per_request)
    libraries = [maker.documents(count, f"t{tenant}-") for tenant in range(12)]
    p, busy = maker.popular(count), maker.popular(11)
    at = 0
    for number in range(shape.requests):
        if number % 10 == 9:
            chosen = [libraries[11][(at + i) % count] for i in range(shape.per_request)]
            at += shape.per_request
            yield maker.request(chosen, "t11")
            continue
        tenant = int(maker.rng.choice(11, p=busy))
        yield maker.request([libraries[tenant][i] for i in maker.choose(p, shape.per_request)], f"t{tenant}")


WORKLOADS: Mapping[str, Callable[[Shape], Iterator[Event]]] = {
    "shuffled-rag": shuffled_rag,
    "scans": scans,
    "changing": changing,
    "conversations": conversations,
    "tenants": tenants,
}
