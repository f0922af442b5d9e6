"""Shadow audits: a share of the live requests is computed in full once more, when nobody waits for the model.

What reuse gave is compared with what a full prefill gives. Where that drifts beyond a bound, the namespace goes to
exact mode until somebody says otherwise. Audits store nothing and keep nothing of text that is forgotten.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .chunks import IntArray
from .config import EngineConfig, Reuse
from .kv import Cancelled
from .planner import make_plan
from .prefill import Executor
from .repair import Recipe
from .request import Request
from .scheduler import Turn
from .serving import Served
from .stats import AuditStats, Fallback, NamespaceAudits, Usage

_NOTHING = Recipe(strategy="none")  # nothing is repaired where everything is computed
MOST_PENDING = 16  # audits that wait; each holds a prompt's ids and one row of logits
ANSWER_TOKENS = 32  # of an answer that are compared, each a pass of one token
REMEMBERED = 4096  # namespaces whose latest audits are kept; those in exact mode are never forgotten
_log = logging.getLogger("kvboost_rag")


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """A request that is to be computed in full.

    Attributes:
        ids: of the prompt, int32 ``(n,)``.
        fingerprint: of the model that answered.
        namespace: of the tenant.
        logits: that the request had for its first token, float32 ``(vocab,)``.
        answer: first tokens of the answer, if each was the likeliest; empty otherwise.
        usage: of the request.
        cancel: set when the audit must not go on.
    """

    ids: IntArray
    fingerprint: str
    namespace: str
    logits: torch.Tensor
    answer: tuple[int, ...]
    usage: Usage
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Deviation:
    """What an audit found.

    Attributes:
        kl: KL divergence of the first token's distribution from full recompute's, nats; infinite if there is none.
        first: whether the likeliest first token is the same.
        equal, compared: tokens of the answer that full recompute would choose behind the same text, and how many were
            looked at.
    """

    kl: float
    first: bool
    equal: int
    compared: int


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL of the distribution of ``other`` from that of ``full``, nats; infinite where a number is missing.

    Args:
        full: logits of a full prefill ``(vocab,)``.
        other: logits that are compared ``(vocab,)``.
    """
    p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(other.double(), -1)
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    kl = float(terms.sum())
    return max(kl, 0.0) if math.isfinite(kl) else math.inf


class Auditor:
    """Chooses requests, audits them in a thread that lives only while there is work, and counts. Thread-safe.

    Args:
        config: share, bound and window.
        fingerprint: of the model as it is now.

    Attributes:
        executor: runs the model; set once it is there.
    """

    executor: Executor

    def __init__(self, config: EngineConfig, fingerprint: Callable[[], str]) -> None:
        self._share, self._bound, self._window = config.audit_share, config.audit_bound, config.audit_window
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._queue: deque[_Sample] = deque()
        self._at_work: list[_Sample] = []  # the one that is audited now, if one is
        self._threads: list[threading.Thread] = []  # the one that audits, if there is work
        self._stopped = threading.Event()
        self._seen: Counter[str] = Counter()
        self._latest: OrderedDict[str, deque[float]] = OrderedDict()
        self._exact: dict[str, str] = {}
        self._sums: Counter[str] = Counter()
        self._kl, self._most_kl = 0.0, 0.0
        # Torch must not be in a forward while the interpreter goes.
        weakref.finalize(self, _halt, self._stopped, self._at_work, self._threads)

    def narrow(self, namespace: str, mode: Reuse) -> tuple[Reuse, Fallback | None]:
        """The mode that a namespace may use, and why it is narrower than what was asked for."""
        if mode != "approximate" or not self._exact:
            return mode, None
        reason = self._exact.get(namespace)
        return (mode, None) if reason is None else ("exact", Fallback("drift", reason))

    def resume(self, namespace: str) -> bool:
        """Let a namespace use approximate reuse again, and count its audits anew; whether it could not."""
        with self._lock:
            self._seen.pop(namespace, None)
            self._latest.pop(namespace, None)
            return self._exact.pop(namespace, None) is not None

    def offer(self, request: Request, served: Served, answer: Sequence[int] = ()) -> None:
        """A finished request: every so many that reused something, by share and namespace, will be audited."""
        if not self._share or served.plan.tokens("compute") == len(request.ids) or request.cancel.is_set():
            return
        with self._lock:
            if request.forgotten or self._stopped.is_set() or not self._is_turn_of(request.scope.namespace):
                return
            sample = _Sample(
                request.ids,
                request.scope.fingerprint,
                request.scope.namespace,
                served.executed.logits.detach().clone(),  # the caller may write to its own
                tuple(answer[:ANSWER_TOKENS]) if self._is_greedy(request) else (),
                served.usage(len(answer)),
            )
            if len(self._queue) == MOST_PENDING:
                self._queue.popleft()
                self._sums["dropped"] += 1
            self._queue.append(sample)
            if not self._threads:
                worker = threading.Thread(target=self._work, name="kvboost-audit", daemon=True)
                self._threads.append(worker)
                worker.start()

    def drop(self, namespace: str) -> None:
        """Audit nothing of a namespace that was asked before now."""
        with self._lock:
            kept = [sample for sample in self._queue if sample.namespace != namespace]
            self._sums["dropped"] += len(self._queue) - len(kept)
            self._queue = deque(kept)
            for sample in self._at_work:
                if sample.namespace == namespace:
                    sample.cancel.set()

    def close(self) -> None:
        """Stop; what waits is dropped. Waits for the layer that is being computed."""
        with self._lock:
            self._stopped.set()
            self._sums["dropped"] += len(self._queue)
            self._queue.clear()
        _halt(self._stopped, self._at_work, self._threads)

    def stats(self) -> AuditStats | None:
        """Counts so far; None without audits."""
        if not self._share:
            return None
        with self._lock:
            sums, audits = self._sums, self._sums["audits"]
            return AuditStats(
                audits=audits,
                pending=len(self._queue) + len(self._at_work),
                dropped=sums["dropped"],
                failed=sums["failed"],
                mean_kl=self._kl / audits if audits else 0.0,
                max_kl=self._most_kl,
                first_token_agreement=sums["first"] / audits if audits else 1.0,
                answer_agreement=sums["equal"] / sums["compared"] if sums["compared"] else 1.0,
                repair_ratio=sums["repaired"] / sums["approximate"] if sums["approximate"] else 0.0,
                namespaces={
                    name: NamespaceAudits(
                        audits=len(self._latest.get(name, ())),
                        mean_kl=_mean(self._latest.get(name, ())),
                        exact_because=self._exact.get(name),
                    )
                    for name in {*self._latest, *self._exact}
                },
            )

    # ---- choosing ----------------------------------------------------------------------------------------------------

    def _is_turn_of(self, namespace: str) -> bool:
        """Every 1/share-th request of a namespace. Under the lock."""
        count = self._seen[namespace] + 1
        if len(self._seen) >= REMEMBERED and count == 1:
            self._seen.clear()
        self._seen[namespace] = count
        return int(count * self._share + 1e-9) > int((count - 1) * self._share + 1e-9)

    def _is_greedy(self, request: Request) -> bool:
        """Whether each token of the answer was the likeliest, so that it can be compared with another likeliest one."""
        sampling = request.sampling
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = getattr(self.executor.runner.model.generation_config, "repetition_penalty", None)
        return sampling.temperature == 0 and not sampling.logits_processors and penalty in (None, 1.0)

    # ---- auditing ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._stopped.is_set():
                    self._threads.clear()  # another one is made for the next audit
                    return
                sample = self._queue.popleft()
                self._at_work.append(sample)
            found, outcome = None, "dropped"
            try:
                found = self._audit(sample)
            except Cancelled:
                pass
            except Exception as error:  # an audit must not take anything down with it
                outcome = "failed"
                _log.warning("an audit of a request of %d tokens failed: %r", len(sample.ids), error)
            drift = None
            with self._lock:
                self._at_work.clear()
                if found is None or sample.cancel.is_set():
                    self._sums[outcome] += 1
                else:
                    self._count(sample, found)
                    drift = self._judge(sample.namespace)
            if drift is not None:
                _log.warning("namespace %r uses exact reuse only from now on: %s", sample.namespace, drift)

    def _audit(self, sample: _Sample) -> Deviation | None:
        """Compute a request in full and compare; None if the model is another one by now.

        Raises:
            Cancelled: the sample is dropped.
        """
        if self._fingerprint() != sample.fingerprint:
            return None
        runner, n, answer = self.executor.runner, len(sample.ids), sample.answer
        with runner.scheduler.turn(Turn(float(n), sample.cancel, background=True)):
            full = self.executor.run(
                sample.ids, make_plan(n, ()), {}, _NOTHING, room=len(answer), cancelled=sample.cancel.is_set
            )
            kl, likeliest = divergence(full.logits, sample.logits), [int(full.logits.argmax())]
            for at, token in enumerate(answer[:-1], n):
                full.kv.lengths = [at + 1] * len(full.kv.lengths)
                position = torch.tensor([at], device=full.logits.device)
                row = runner.run(full.kv, full.cache, torch.tensor([token], device=position.device), position)
                assert row is not None
                likeliest.append(int(row.argmax()))
        if self._fingerprint() != sample.fingerprint:  # it changed under the audit
            return None
        equal = sum(a == b for a, b in zip(answer, likeliest, strict=False))
        return Deviation(kl, likeliest[0] == int(sample.logits.argmax()), equal, len(answer))

    def _count(self, sample: _Sample, found: Deviation) -> None:
        """Add an audit to the counts. Under the lock."""
        usage = sample.usage
        self._sums.update(
            audits=1,
            first=found.first,
            equal=found.equal,
            compared=found.compared,
            repaired=usage.repaired_tokens,
            approximate=usage.changed_tokens,
        )
        self._kl += found.kl
        self._most_kl = max(self._most_kl, found.kl)
        if not usage.changed_tokens:
            return
        latest = self._latest.setdefault(sample.namespace, deque(maxlen=self._window))
        self._latest.move_to_end(sample.namespace)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)
        latest.append(found.kl)

    def _judge(self, namespace: str) -> str | None:
        """Why a namespace uses exact reuse only from now on; None if nothing changes. Under the lock."""
        latest = self._latest.get(namespace, ())
        # No KL is negative: once the sum is beyond what a full window may have, what is still to come cannot mend it.
        if self._bound is None or namespace in self._exact or not math.fsum(latest) > self._bound * self._window:
            return None
        total, most = math.fsum(latest), self._bound * self._window
        reason = self._exact[namespace] = (
            f"audits found too much drift: KL from full recompute adds up to {total:.3g} nats in {len(latest)} of "
            f"{self._window} audits, where audit_bound={self._bound:g} allows {most:.3g}; engine.resume(namespace) "
            "allows approximate reuse again, after you raise repair_ratio or audit_bound, or warm documents together"
        )
        return reason


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def _halt(stopped: threading.Event, at_work: list[_Sample], threads: list[threading.Thread]) -> None:
    """End all audits; waits for the layer that is being computed."""
    stopped.set()
    for sample in list(at_work):
        sample.cancel.set()
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join()
