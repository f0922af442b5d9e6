"""The engine: a local Hugging Face model that reads every document once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from .assembly import Parts
from .audit import Auditor
from .chunks import IntArray, Scope
from .config import (
    ANCHOR_TOKENS,
    EngineConfig,
    Reuse,
    SamplingParams,
    check_is,
    check_namespace,
    check_timeout,
)
from .errors import ConfigError, ContextOverflowError
from .forgetting import chunks_holding
from .hf import load_pretrained, stop_strings
from .kv import Cancelled
from .live import LiveModel
from .observing import Observers
from .options import Options, mode_of
from .prompts import as_texts
from .repair import Recipe
from .request import Call, Doors, Live, Method, Request, cancelled, deadline, is_chat
from .scheduler import scheduler_of
from .stats import Delta, EngineStats, Generation, Prefill, Totals, WarmReport
from .streaming import Deltas, astream, in_thread
from .transfer.bridge import transfer_of
from .transfer.mapping import TransferMap

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Engine(LiveModel):
    """Runs one model and keeps the KV of what it read, per namespace.

    Thread-safe: requests of several threads run together, also those of other engines on the same model: their answers
    are decoded in one batch, and a long prompt keeps nobody waiting. Results do not depend on who else asks. While a
    request runs, nothing else may use the model.

    Args:
        model: a Hugging Face causal language model with rotary positions.
        tokenizer: its tokenizer; None if prompts are always token ids.
        config: see `EngineConfig`.
        transfer: a map, or its file (`kvboost-rag transfer fit`): what its source has read, and this model has not, is
            mapped instead of computed. A map that its gate refused is not used.
        source: engine of that source; without it the source's KV is taken from ``config.disk_path``.

    Raises:
        UnsupportedModelError: the model cannot be served in ``config.reuse``; says which layer and which mode can.
        TransferError: the map is damaged, or is not for these models.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        transfer: TransferMap | Path | str | None = None,
        source: Engine | None = None,
    ) -> None:
        check_is(config, EngineConfig, "config")
        check_is(source, Engine, "source")
        config = config or EngineConfig()
        self._scheduler = scheduler_of(model)
        self._doors = Doors(config.max_num_seqs, self._scheduler, lambda: self._library.clear())
        self._auditor = Auditor(config, self._current_fingerprint)
        super().__init__(model, tokenizer, config, transfer_of(transfer, config, source))
        self._totals, self._observers = Totals(), Observers()
        self._live = Live()

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        gguf_file: str | None = None,
        dtype: Any = "auto",
        device: Any = "auto",
        config: EngineConfig | None = None,
        transfer: TransferMap | Path | str | None = None,
        source: Engine | None = None,
        show_progress: bool = False,
        **hf_options: Any,
    ) -> Engine:
        """Load a model by hub id or folder and build an engine on it.

        Args:
            model: hub id or folder.
            gguf_file: name of a GGUF file in it.
            dtype: torch dtype or "auto" for the checkpoint's own.
            device: torch device or "auto" for CUDA where there is one.
            config: see `EngineConfig`.
            transfer: see `Engine`, also for ``source``.
            source: see there.
            show_progress: draw a progress bar, in a terminal or notebook.
            hf_options: for `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ModelLoadError: there is no such model, it is damaged, or it does not fit the memory.
        """
        check_is(config, EngineConfig, "config")
        if ours := sorted(EngineConfig.__dataclass_fields__.keys() & hf_options.keys()):
            raise ConfigError(f"{ours[0]} is no option of transformers; give it as config=EngineConfig({ours[0]}=…)")
        options = {"gguf_file": gguf_file, "dtype": dtype, "device": device, "show_progress": show_progress}
        return cls(*load_pretrained(model, **options, **hf_options), config, transfer=transfer, source=source)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._doors.closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tokenize(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The ids that will run for a prompt.

        Raises:
            PromptError: the prompt cannot be tokenised as it stands.
        """
        return self._encoder.encode(prompt, tools=tools).tolist()  # type: ignore[no-any-return]

    def prefill(
        self,
        prompt: Prompt,
        *,
        namespace: str | None = None,
        reuse: Reuse | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        store: bool | None = None,
    ) -> Prefill:
        """Compute everything before the first answer token; the cache is the caller's."""
        request = self._request("prefill", prompt, namespace=namespace, reuse=reuse, tools=tools, store=store)
        with self._observers.following(request) as ending:
            with self._doors.request(request.cancel):
                prefill, served = self._serving.prefill(request)
            self._totals.add(prefill.usage, served.fallback)
            self._auditor.offer(request, served)
            return ending.note(prefill, served.plan, served.fallback)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Answer a prompt: text (tokenised as Hugging Face would), chat messages, or token ids.

        Raises:
            PromptError: the prompt cannot be run; ContextOverflowError if it is too long.
            ConfigError: a bad namespace or mode.
            RequestTimeoutError: no answer within ``timeout_s``.
        """
        return self._answer(self._request("generate", prompt, **options), _ignore)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Deltas:
        """Answer a prompt piece by piece; the last delta carries the `Generation`. Options are those of `generate`.

        Bad input raises here, not at the first step. Closing the iterator stops the computation.
        """
        request = self._request("stream", prompt, **options)
        return Deltas(lambda put: self._feed(request, put), request.cancel)

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """`generate` off the event loop; cancelling the task stops the computation."""
        request = await asyncio.to_thread(self._request, "generate", prompt, **options)
        return await in_thread(lambda: self._answer(request, _ignore), request.cancel)

    async def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Delta, None]:
        """`stream` off the event loop; leaving the iterator or cancelling the task stops the computation."""
        request = await asyncio.to_thread(self._request, "stream", prompt, **options)
        async with contextlib.aclosing(astream(lambda put: self._feed(request, put), request.cancel)) as deltas:
            async for delta in deltas:
                yield delta

    def warm(
        self,
        texts: str | Sequence[str],
        *,
        namespace: str | None = None,
        context: str = "",
        show_progress: bool = False,
    ) -> WarmReport:
        """Compute and keep the KV of documents before they are asked for.

        Args:
            texts: documents, as they will be rendered into prompts.
            namespace: tenant that may use them.
            context: text that prompts have in front of their first document (rendered, special tokens and all).
                Documents encoded behind it are an exact hit as first document. Without one, in approximate mode,
                the documents of a call are encoded one behind another (see `EngineConfig.pack_tokens`), so give many
                at once: one in a call of its own costs the one before it again. In exact mode each is encoded alone.
            show_progress: draw a progress bar, in a terminal or notebook.

        Raises:
            PromptError: a document is not text. Nothing of this call is stored then.
        """
        started = time.perf_counter()
        scope = self._scope(namespace)
        documents = as_texts(texts)
        if self.config.reuse == "off":
            raise ConfigError("reuse is 'off', so warming has no effect; use reuse='exact' or 'approximate'")
        before, encoded = self._encoder.encode_documents(context, documents)
        if len(before) + ANCHOR_TOKENS > self._window_tokens:
            raise ContextOverflowError(len(before), self._window_tokens, extra=" (the context, without a document)")
        report = self._warmer.warm(
            scope,
            before,
            encoded,
            named=bool(context),
            running=self._doors.warming,
            show_progress=show_progress,
            started=started,
        )
        return self._totals.warmed(report)

    def forget(self, texts: str | Sequence[str], *, namespace: str | None = None) -> int:
        """Drop every chunk that holds a document, warmed or seen inside prompts; returns how many.

        KV has seen what stood in front of it, so documents that were encoded in one pack with a forgotten one go too.
        Chunks of other documents that share only a passage with it stay. A request that is running now keeps nothing.
        """
        name = self._scope(namespace).namespace
        documents = as_texts(texts)
        encoded = [self._encoder.encode_text(text) for text in documents]
        self._keep_nothing_of(name, encoded)
        # The first token of a short text, which is searched as a whole, has a space in it inside a sentence.
        short = [text for text, ids in zip(documents, encoded, strict=True) if len(ids) < ANCHOR_TOKENS]
        encoded += [self._encoder.encode_text(f" {text}") for text in short]
        return self._library.delete(chunks_holding(self._library.headers_in(name), encoded))

    def clear(self, namespace: str | None = None) -> int:
        """Drop every chunk of a namespace (the configured one by default); returns how many.

        A request that is running now keeps nothing. Its audits begin anew (see `resume`).
        """
        name = self._scope(namespace).namespace
        self._keep_nothing_of(name)
        self._auditor.resume(name)
        return self._library.delete([header.key for header in self._library.headers_in(name)])

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        store = self._library.stats()
        return self._totals.snapshot(
            chunks=store.chunks,
            stored_bytes=store.stored_bytes,
            budget_bytes=store.budget_bytes,
            pinned_bytes=store.pinned_bytes,
            evictions=store.evictions,
            rejections=store.rejections,
            disk=self._library.disk_stats(),
            audits=self._auditor.stats(),
        )

    def resume(self, namespace: str | None = None) -> bool:
        """Use approximate reuse again where audits found too much drift; whether it was not used. Audits begin anew."""
        return self._auditor.resume(self._scope(namespace).namespace)

    @property
    def observers(self) -> Observers:
        """Who is told of every request that ends: ``engine.observers.add(observer)``, see docs/observability.md."""
        return self._observers

    @property
    def recipe(self) -> Recipe:
        """How approximate hits are repaired now. Set it to try another recipe on the same store."""
        return self._serving.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        check_is(recipe, Recipe, "recipe")
        self._serving.recipe = recipe
        self._library.clear_served()  # they were repaired by another recipe

    def close(self) -> None:
        """Free all stored KV in RAM; further calls raise `EngineClosedError`. The model stays the caller's.

        What waits to be written to `disk_path` is written first.
        """
        self._doors.close()
        self._auditor.close()
        self._library.close()

    def _request(self, method: Method, prompt: Prompt, **options: Unpack[Options]) -> Request:
        call = Call(method, is_chat(prompt))
        with self._observers.refusing(call):
            return self._checked(call, prompt, **options)

    def _checked(
        self,
        call: Call,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        namespace: str | None = None,
        reuse: Reuse | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        store: bool | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        scope = self._scope(namespace)
        check_is(sampling, SamplingParams, "sampling")
        mode, narrowed = self._auditor.narrow(scope.namespace, mode_of(self.config, reuse))
        if sampling is not None:
            stop_strings(self.model, self.tokenizer, sampling)  # raises here, and not at the first step of a stream
        ids = self._encoder.encode(prompt, tools=tools)
        if len(ids) > self._window_tokens:
            raise ContextOverflowError(len(ids), self._window_tokens)
        request = Request(
            call,
            ids,
            scope,
            mode,
            sampling or SamplingParams(),
            self.config.store_prompts if store is None else store,
            time.perf_counter() - call.started,
            None if timeout_s is None else check_timeout(timeout_s),
            narrowed,
        )
        self._live.add(request)
        return request

    def _keep_nothing_of(self, namespace: str, forgotten: Sequence[IntArray] = ()) -> None:
        """What runs now has seen what is being forgotten, and what is warmed next must not."""
        self._warmer.part_company(namespace, forgotten)
        self._live.keep_nothing_of(namespace)
        self._auditor.drop(namespace)

    def _assembled(self, parts: Parts) -> None:
        self._auditor.executor = parts.executor

    def _scope(self, namespace: str | None) -> Scope:
        self._doors.must_be_open()
        name = self.config.namespace if namespace is None else check_namespace(namespace)
        return Scope(self._current_fingerprint(), name)

    def _answer(self, request: Request, on_delta: Callable[[str, tuple[int, ...]], None]) -> Generation:
        with self._observers.following(request) as ending:
            try:
                with deadline(request), self._doors.request(request.cancel):
                    generation, served = self._serving.answer(request, on_delta)
            except Cancelled:
                return ending.note(cancelled(request))
            self._totals.add(generation.usage, served.fallback)
            self._auditor.offer(request, served, generation.token_ids)
            return ending.note(generation, served.plan, served.fallback)

    def _feed(self, request: Request, put: Callable[[Delta], None]) -> Generation:
        return self._answer(request, lambda text, ids: put(Delta(text=text, token_ids=ids)))


def _ignore(text: str, ids: tuple[int, ...]) -> None:
    """Deltas nobody asked for."""
