"""What a request reports: usage, timing, results. Plain frozen values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from .planner import Plan

FinishReason = Literal["stop", "length", "cancelled"]
FallbackKind = Literal["cost", "evicted", "rotary", "codec", "drift"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why less was reused than was asked for, or found.

    Attributes:
        kind: "cost": reuse was predicted to take as long as computing; "evicted": what was found had left the store;
            "rotary": the prompt is longer than the rotary frequencies stay the same for; "codec": nothing stored in
            fewer bits is exact; "drift": audits switched the namespace to exact reuse.
        text: the same in a sentence, with figures.
    """

    kind: FallbackKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: exact + approximate + transferred + new tokens.
        exact_tokens: served with the KV a full prefill would give.
        approximate_tokens: served with moved KV, before repair, or with KV that lost bits in the store.
        transferred_tokens: served with KV that was mapped from another model's, before repair.
        repaired_tokens: approximate and transferred tokens that were recomputed in the new context.
        computed_tokens: every token that ran before the first answer token, each pass charged by its share of
            the layers, rounded up.
        completion_tokens: tokens generated.
        stored_tokens: tokens of the prompt and its answer whose KV was added to the store.
    """

    prompt_tokens: int
    exact_tokens: int = 0
    approximate_tokens: int = 0
    transferred_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    stored_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that no stored chunk held."""
        return self.prompt_tokens - self.read_tokens

    @property
    def changed_tokens(self) -> int:
        """Prompt tokens with KV that a full prefill would not give: approximate and transferred."""
        return self.approximate_tokens + self.transferred_tokens

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were read from a store."""
        return self.exact_tokens + self.changed_tokens

    @property
    def written_tokens(self) -> int:
        """Prompt tokens that were added to the store; an answer may be kept too, which this does not count."""
        return min(self.stored_tokens, self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one request, wall clock, device synchronised.

    Attributes:
        queue_s: waiting for other requests of this engine.
        tokenize_s: rendering and tokenising the prompt.
        lookup_s: matching against the index and planning.
        load_s: fetching, moving and placing chunks, `transfer_s` included.
        transfer_s: mapping the KV of another model.
        prefill_s: all forward passes before the first token.
        model_s: the part of `prefill_s` inside the model's forward.
        store_s: keeping new chunks; not part of `ttft_s`, it happens after the first token is known.
        ttft_s: call entry to first token.
        total_s: call entry to the end.
    """

    queue_s: float = 0.0
    tokenize_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    model_s: float = 0.0
    store_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """State before the first answer token.

    Attributes:
        logits: next-token logits of the last prompt token, float32 ``(vocab,)``.
        cache: Hugging Face cache that holds every prompt token; ``cache.get_seq_length() == len(token_ids)``.
        token_ids: ids of the prompt.
        plan: what was reused and what was computed.
        usage, timing: see there.
        fallback_reason: why reuse that was asked for was not used; None otherwise.
    """

    logits: torch.Tensor
    cache: Any
    token_ids: tuple[int, ...]
    plan: Plan
    usage: Usage
    timing: Timing
    fallback_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    fallback_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of a streamed answer. The last one has `generation` set and may have empty text.

    The texts of all deltas joined equal `Generation.text`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    generation: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """What `Engine.warm` did.

    Attributes:
        documents: texts given.
        computed: texts whose KV was computed now.
        already_warm: texts that were stored before.
        too_short: texts with fewer tokens than an anchor (16), which cannot be found inside a prompt.
        rejected: texts whose KV does not fit the budget, even after eviction.
        chunks, tokens, stored_bytes: what was added.
        on_disk: chunks of those that are on disk now, for good; 0 without `disk_path`.
        evicted: chunks that left the store in the meantime to make room, perhaps some of these: then the budget is too
            small for the documents.
        seconds: wall clock.
    """

    documents: int = 0
    computed: int = 0
    already_warm: int = 0
    too_short: int = 0
    rejected: int = 0
    chunks: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    on_disk: int = 0
    evicted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """State of a folder of stored KV, and totals of this process.

    Attributes:
        chunks: chunks that can be loaded.
        newer_chunks: chunks of a newer version of kvboost-rag, which are neither used nor deleted.
        stored_bytes: bytes of all files and what the catalogue says of them, including what is being written.
        budget_bytes: their limit.
        read_only: nothing is written.
        written, written_bytes: chunks written, and the bytes of their files.
        loads, loaded_bytes, load_s: chunks mapped, their bytes, and the seconds until they were ready to be read.
        evictions: chunks pushed out to make room.
        rejections: chunks that do not fit the budget.
        bad: damaged entries that were dropped, to be computed again.
        vanished: chunks whose file was gone.
        unreadable: loads that failed for want of memory, open files or permission; their entries stay.
        newer: loads refused because a newer version wrote the file.
        unwritten: chunks that were not written because too much waited to be written.
        write_errors: chunks that could not be written: the disk was full, or the like.
        waiting_bytes: bytes that wait to be written.
        last_error: what went wrong last.
    """

    chunks: int = 0
    newer_chunks: int = 0
    stored_bytes: int = 0
    budget_bytes: int = 0
    read_only: bool = False
    written: int = 0
    written_bytes: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    evictions: int = 0
    rejections: int = 0
    bad: int = 0
    vanished: int = 0
    unreadable: int = 0
    newer: int = 0
    unwritten: int = 0
    write_errors: int = 0
    waiting_bytes: int = 0
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAudits:
    """Latest audits of a namespace's requests that reused something approximately.

    Attributes:
        audits: how many, at most `EngineConfig.audit_window`.
        mean_kl: of these, nats.
        exact_because: why the namespace uses exact reuse only; None if it does not.
    """

    audits: int = 0
    mean_kl: float = 0.0
    exact_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStats:
    """Requests that were computed in full once more, and how far what reuse gave was from that.

    Attributes:
        audits: finished.
        pending: waiting or running.
        dropped: given up: too many waited, the text was forgotten, the model changed, or the engine was closed.
        failed: ended by an error, which is logged.
        mean_kl, max_kl: KL of the first token's distribution from full recompute's, nats.
        first_token_agreement: share of audits with the same likeliest first token.
        answer_agreement: share of the first tokens of greedy answers (up to 32 each) that full recompute would choose,
            too, behind the same text.
        repair_ratio: share of the approximate tokens of these requests that were recomputed.
        namespaces: by namespace; those used last, and all that use exact reuse only.
    """

    audits: int = 0
    pending: int = 0
    dropped: int = 0
    failed: int = 0
    mean_kl: float = 0.0
    max_kl: float = 0.0
    first_token_agreement: float = 1.0
    answer_agreement: float = 1.0
    repair_ratio: float = 0.0
    namespaces: Mapping[str, NamespaceAudits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals of an engine since it was made.

    Attributes:
        requests: finished prefills.
        prompt_tokens, exact_tokens, approximate_tokens, transferred_tokens, repaired_tokens, computed_tokens,
            completion_tokens, stored_tokens: sums of usage.
        fallbacks: requests by kind of fallback, see `Fallback`.
        warmed_documents, warmed_tokens, warm_s: what `warm` computed and stored, and the seconds of its calls.
        chunks, stored_bytes, budget_bytes, pinned_bytes: state of the RAM store.
        evictions, rejections: chunks pushed out of, or refused by, the RAM store.
        disk: state of the store on disk; None without one.
        audits: what audits found; None without `EngineConfig.audit_share`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    exact_tokens: int = 0
    approximate_tokens: int = 0
    transferred_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    stored_tokens: int = 0
    fallbacks: Mapping[FallbackKind, int] = field(default_factory=dict)
    warmed_documents: int = 0
    warmed_tokens: int = 0
    warm_s: float = 0.0
    chunks: int = 0
    stored_bytes: int = 0
    budget_bytes: int = 0
    pinned_bytes: int = 0
    evictions: int = 0
    rejections: int = 0
    disk: DiskStats | None = None
    audits: AuditStats | None = None


class Totals:
    """Sums over requests. Thread-safe, with a lock of its own: nobody waits for the model to be counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._fallbacks: Counter[FallbackKind] = Counter()
        self._warm_s = 0.0

    def add(self, usage: Usage, fallback: Fallback | None) -> None:
        """Count one request."""
        with self._lock:
            self._sums["requests"] += 1
            for part in fields(Usage):
                self._sums[part.name] += getattr(usage, part.name)
            if fallback is not None:
                self._fallbacks[fallback.kind] += 1

    def warmed(self, report: WarmReport) -> WarmReport:
        """Count a call of `warm`."""
        with self._lock:
            self._sums.update(warmed_documents=report.computed, warmed_tokens=report.tokens)
            self._warm_s += report.seconds
        return report

    def snapshot(self, **store: Any) -> EngineStats:
        """The sums so far, together with the state of the store."""
        with self._lock:
            sums: dict[str, Any] = dict(self._sums)
            return EngineStats(**sums, fallbacks=dict(self._fallbacks), warm_s=self._warm_s, **store)
