"""Configuration: one frozen object for the engine, one for sampling. Every field takes effect or raises."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import ConfigError

Reuse = Literal["off", "exact", "approximate"]
Repair = Literal["none", "selective", "cacheblend"]
SelectorName = Literal["auto", "deviation", "query"]
Chunking = Literal["fixed", "semantic", "document"]
Markers = Literal["text", "refuse"]
KVBits = Literal[16, 8, 4, "8/4"]
Eviction = Literal["gdsf", "lru", "s3fifo", "importance"]

PACK_SEPARATOR = "\n\n"  # between two documents of a pack: what most prompt templates put there
LEAD_TOKENS = 64  # end of another document in front of a pack, so that its first document has seen something, too
AUDIT_WINDOW = 16  # audits whose mean tells drift from chance
ANCHOR_TOKENS = 16  # window length of the index; shorter runs cannot be found away from the exact chain


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine reuses, repairs, cuts and stores KV.

    Attributes:
        reuse: "off" computes everything, "exact" uses only what a full prefill would give,
            "approximate" also moves and repairs documents found anywhere.
        repair: strategy for approximate hits.
        selector: how "cacheblend" chooses tokens; "auto" uses what the calibration at load found best.
        repair_ratio: share of the approximate tokens that "cacheblend" recomputes beyond `floor_tokens`, 0..1. At 1
            everything is recomputed, which equals a full prefill. None is 0.05, but 0.03 for documents that were warmed
            in several orders, and 0.2 for KV that was mapped from another model. Of documents warmed in several orders,
            0.03 are first tokens, half of them the first document's; what is beyond goes to what the question attends
            to, near the beginnings (docs/accuracy.md).
        repair_least_tokens: least tokens of each moved run of fewer than 128 that "cacheblend" recomputes beyond the
            floor, whatever the ratio.
        repair_whole_passages: so many moved runs of fewer than 128 tokens "cacheblend" recomputes whole, whatever the
            ratio: those that the question is about, each with the short one right behind it if that has words of the
            question which it lacks (docs/accuracy.md).
        repair_spot_tokens: of moved runs of 128 tokens and more, "cacheblend" recomputes so many tokens where they
            repeat most of the question, at most at two places: the line that it quotes, the name that it asks about. 0
            recomputes none.
        floor_tokens: first tokens of each moved run that are always recomputed.
        window_tokens: width of the seam window of "selective".
        chunking: where stored runs are cut: every `chunk_tokens` ("fixed"), at the sentence or paragraph end
            nearest to `chunk_tokens` ("semantic"), or nowhere inside a document ("document").
        chunk_tokens: target length for "fixed" and "semantic", tokens.
        overlap_tokens: tokens of the previous chunk encoded in front of each further chunk of a document, and not
            stored with it (KVBoost). With it or `sink_tokens`, chunks are encoded separately; with neither, in one pass
            over the document.
        sink_tokens: leading tokens of the document (or of `warm(context=…)`) kept in front of each separately
            encoded chunk as attention sink, and not stored with it (KVBoost).
        pack_tokens: in approximate mode, documents warmed in one call without a context are encoded one behind another
            in packs of about so many tokens, so that their KV has seen neighbours, as it will in a prompt; 0 encodes
            each alone.
        pack_orders: in so many orders every pack is encoded, and the mean of what they give is kept, so that no one
            neighbour leaves its mark on a document: at no cost to a prompt, but warming takes so many times as long. 2
            keep neighbours side by side, for documents that refer to them; more also reverse the pack, which is nearer
            for all others; 1 keeps the KV of one order as it is.
        ram_budget_bytes: hard limit of stored KV in RAM, including what is being written.
        disk_path: folder that keeps stored KV beyond the life of the process, shared by processes; None keeps it in RAM
            only. Prompts as they were served always stay in RAM. See docs/store.md.
        disk_budget_bytes: hard limit of that folder, over all processes, including what is being written.
        disk_read_only: use what is stored there, and write nothing.
        write_behind_bytes: most bytes of KV that may wait to be written, beside `ram_budget_bytes`. A document that is
            warmed waits for room; text seen in a prompt is not written then.
        ttl_s: seconds after which a stored chunk is used no more; None keeps it as long as there is room.
        eviction: which stored chunk leaves first when the budget is full: the one that saves the least seconds per
            byte, weighed by its uses and how long ago they were ("gdsf"); the one used longest ago ("lru"); one that
            was never used again ("s3fifo"); the one whose keys have the least norm ("importance", of the KVBoost
            paper).
        kv_bits: bits of a stored number (docs/store.md): 16 keeps KV as the model produced it, bit for bit; 8, 4 and
            "8/4" (8-bit keys, 4-bit values) lose a little, which is measured at load, and a model that loses too much
            is refused. They need `reuse="approximate"`: what they store is never an exact hit.
        max_num_seqs: most requests of this engine that hold KV and compute at once; others wait in the order in which
            they came. Their answers are decoded in one batch.
        namespace: tenant used when a call names none.
        markers: what to do with special-token text inside message content: keep it as plain text, or refuse.
        fallback: use a full prefill when the cost model predicts it to be cheaper.
        store_prompts: keep KV of new text first seen inside a prompt.
        served_share: share of `ram_budget_bytes`, 0..1, for prompts made of moved documents, kept as they were served,
            so that the same prompt again, or the next turn of its conversation, needs no repair again; 0 keeps none.
        audit_share: share of the requests that reuse something, 0..1, that are also computed in full when no request
            wants the model, to see how far the two are apart: `Engine.stats().audits`, docs/accuracy.md. 0 audits none.
        audit_bound: mean KL from full recompute, nats at the first token, over the last `audit_window` audits of a
            namespace, beyond which it uses exact reuse only until `Engine.resume`; None only counts.
        audit_window: audits that are averaged, per namespace.
        trace_path: file to which the sizes and times of every request are appended, without text or token ids, for
            `kvboost-rag trace simulate`; None records nothing.
        calibration_dir: folder where the choice of `selector="auto"` is remembered per model, so that only the first
            load measures it; None measures at every load.
    """

    reuse: Reuse = "approximate"
    repair: Repair = "cacheblend"
    selector: SelectorName = "auto"
    repair_ratio: float | None = None
    repair_least_tokens: int = 0
    repair_whole_passages: int = 1
    repair_spot_tokens: int = 16
    floor_tokens: int = 4
    window_tokens: int = 16
    chunking: Chunking = "document"
    chunk_tokens: int = 128
    overlap_tokens: int = 0
    sink_tokens: int = 0
    pack_tokens: int = 1536
    pack_orders: int = 3
    ram_budget_bytes: int = 2 << 30
    disk_path: Path | str | None = None
    disk_budget_bytes: int = 16 << 30
    disk_read_only: bool = False
    write_behind_bytes: int = 256 << 20
    ttl_s: float | None = None
    eviction: Eviction = "gdsf"
    kv_bits: KVBits = 16
    max_num_seqs: int = 8
    namespace: str = "default"
    markers: Markers = "text"
    fallback: bool = True
    store_prompts: bool = True
    served_share: float = 0.25
    audit_share: float = 0.0
    audit_bound: float | None = None
    audit_window: int = AUDIT_WINDOW
    trace_path: Path | str | None = None
    calibration_dir: Path | str | None = "~/.cache/kvboost-rag/calibration"

    def __post_init__(self) -> None:
        _one_of("reuse", self.reuse, Reuse)
        _one_of("repair", self.repair, Repair)
        _one_of("selector", self.selector, SelectorName)
        _one_of("chunking", self.chunking, Chunking)
        _one_of("markers", self.markers, Markers)
        _one_of("kv_bits", self.kv_bits, KVBits)
        _one_of("eviction", self.eviction, Eviction)
        if self.repair_ratio is not None:
            _in_range("repair_ratio", self.repair_ratio, 0.0, 1.0)
        _in_range("repair_least_tokens", self.repair_least_tokens, 0, 4096)
        _in_range("repair_whole_passages", self.repair_whole_passages, 0, 4096)
        _in_range("repair_spot_tokens", self.repair_spot_tokens, 0, 128)
        _in_range("floor_tokens", self.floor_tokens, 0, 4096)
        _in_range("window_tokens", self.window_tokens, 1, 4096)
        _in_range("chunk_tokens", self.chunk_tokens, ANCHOR_TOKENS, 1 << 20)
        _in_range("overlap_tokens", self.overlap_tokens, 0, self.chunk_tokens - 1)
        _in_range("sink_tokens", self.sink_tokens, 0, 4096)
        _in_range("ram_budget_bytes", self.ram_budget_bytes, 0, 1 << 60)
        _in_range("served_share", self.served_share, 0.0, 1.0)
        _in_range("pack_tokens", self.pack_tokens, 0, 1 << 20)
        _in_range("pack_orders", self.pack_orders, 1, 64)
        _in_range("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        check_namespace(self.namespace)
        self._check_disk()
        self._check_audits()
        if self.kv_bits != 16 and self.reuse != "approximate":
            raise ConfigError(
                f"kv_bits is {self.kv_bits!r} but reuse is {self.reuse!r}; KV in fewer bits is never what a full "
                "prefill gives; use kv_bits=16, or reuse='approximate'"
            )
        if self.chunking == "document" and (self.overlap_tokens or self.sink_tokens):
            raise ConfigError(
                f"overlap_tokens is {self.overlap_tokens} and sink_tokens is {self.sink_tokens}, but "
                "chunking='document' encodes no document in pieces, so they have no effect; use chunking='fixed' or "
                "'semantic'"
            )

    def _check_audits(self) -> None:
        _in_range("audit_share", self.audit_share, 0.0, 1.0)
        _in_range("audit_window", self.audit_window, 1, 1 << 20)
        if self.audit_share and self.reuse == "off":
            raise ConfigError(
                f"audit_share is {self.audit_share!r} but reuse is 'off', which reuses nothing that could be audited; "
                "use audit_share=0, or reuse='exact' or 'approximate'"
            )
        if self.audit_window != AUDIT_WINDOW and not self.audit_share:
            raise ConfigError(
                f"audit_window is {self.audit_window} but audit_share is 0, so nothing is audited; set audit_share too"
            )
        if self.audit_bound is None:
            return
        _in_range("audit_bound", self.audit_bound, 0.0, math.inf)
        if not self.audit_share or self.reuse != "approximate":
            raise ConfigError(
                f"audit_bound is {self.audit_bound!r} but audit_share is {self.audit_share!r} and reuse is "
                f"{self.reuse!r}; it takes effect with audit_share above 0 and reuse='approximate'"
            )

    def _check_disk(self) -> None:
        _in_range("disk_budget_bytes", self.disk_budget_bytes, 0, 1 << 60)
        _in_range("write_behind_bytes", self.write_behind_bytes, 0, 1 << 60)
        if self.ttl_s is not None:
            _in_range("ttl_s", self.ttl_s, 0.0, math.inf)
            if self.ttl_s == 0:
                raise ConfigError("ttl_s is 0, so that nothing stored could ever be used; give seconds, or None")
        if not isinstance(self.disk_read_only, bool):
            raise ConfigError(f"disk_read_only is {self.disk_read_only!r}; it must be True or False")
        if self.disk_path is None:
            if self.disk_read_only:
                raise ConfigError("disk_read_only is True but disk_path is None; name the folder to read from")
        elif self.reuse == "off":
            raise ConfigError(
                f"disk_path is {str(self.disk_path)!r} but reuse is 'off', which stores nothing and looks nothing up; "
                "use disk_path=None, or reuse='exact' or 'approximate'"
            )
        for name, kind in (("disk_path", "folder"), ("trace_path", "file"), ("calibration_dir", "folder")):
            path = getattr(self, name)
            if path is not None and (not isinstance(path, str | Path) or not str(path) or "\0" in str(path)):
                raise ConfigError(f"{name} is {path!r}; it must name a {kind}, or be None")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. `None` means: what the model's own generation config says.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; then top_p, top_k, min_p and seed have nothing to choose from.
        top_p, top_k, min_p, repetition_penalty: as in Hugging Face `generate`.
        stop: strings that end the answer; never part of it.
        seed: makes sampling repeatable.
        model_stops: also stop at the strings that the model's own generation config names.
        skip_special_tokens: leave special tokens out of the text. Some families mark tool calls with them.
        logits_processors: extra Hugging Face logits processors (constrained decoding and the like).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    model_stops: bool = True
    skip_special_tokens: bool = True
    logits_processors: tuple[Callable[..., Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stops(self.stop))
        _in_range("max_tokens", self.max_tokens, 1, 1 << 31)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        if self.min_p is not None:
            _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k is not None:
            _in_range("top_k", self.top_k, 0, 1 << 31)
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty!r}; it must be above 0")
        for name in ("model_stops", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.seed is not None:
            _in_range("seed", self.seed, 0, (1 << 64) - 1)


def check_reuse(reuse: Any) -> Reuse:
    """The mode, if there is one of that name.

    Raises:
        ConfigError: there is none.
    """
    _one_of("reuse", reuse, Reuse)
    return reuse  # type: ignore[no-any-return]


def check_is(value: object, kind: type, name: str) -> None:
    """Refuse a value of another type than asked for; None passes.

    Raises:
        ConfigError: names the argument, what it is and what it must be.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}, as in {kind.__name__}(…)")


def check_namespace(namespace: object) -> str:
    """The namespace, if it can name a tenant.

    Raises:
        ConfigError: not a non-empty string.
    """
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"namespace is {namespace!r}; it must be a non-empty string")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"namespace is {namespace!r}, which holds a lone surrogate; use whole characters") from error
    return namespace


def check_timeout(timeout_s: Any) -> float:
    """The seconds, if that is a time one can wait.

    Raises:
        ConfigError: not a positive number.
    """
    _in_range("timeout_s", timeout_s, 0.0, threading.TIMEOUT_MAX)
    if timeout_s == 0:
        raise ConfigError("timeout_s is 0, which leaves no time to answer; give seconds, or None to wait")
    return float(timeout_s)


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    items = (stop,) if isinstance(stop, str) else tuple(stop)  # type: ignore[arg-type]
    for item in items:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"stop holds {item!r}; every stop must be a non-empty string")
    return items


def _one_of(name: str, value: object, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed or type(value) not in map(type, allowed):  # 8.0 and True equal whole numbers
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")


def _in_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number from {low} to {high}")
    if isinstance(low, int) and not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be from {low} to {high}")
