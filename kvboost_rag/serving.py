"""A request through the model: look up, plan, load, run, answer, keep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .chunks import ChunkHeader
from .decode import Answer
from .draws import draws_of
from .generating import Generator
from .hf import generation_settings, stop_strings
from .keeping import Keeper
from .kv import Cancelled, StoredRun
from .library import Library
from .planner import Fresh, Plan, fresh_of, make_plan
from .planning import Planned, Planning
from .prefill import Executed, Executor
from .repair import Recipe, expected
from .request import Request
from .runner import ModelRunner
from .scheduler import Turn
from .sharing import OnTheWay, Sharing
from .stats import Fallback, FinishReason, Generation, Prefill, Timing, Usage
from .transfer.bridge import Bridge

REPLANS = 3  # chunks may be evicted between lookup and pin; after so many tries the prompt is simply computed


@dataclass(slots=True, eq=False)
class Served:
    """A prompt whose cache is full.

    Attributes:
        plan: what was run.
        executed: cache and logits.
        fallback: why less was reused than was found.
        new: stretches of the prompt that nothing stored holds.
        fresh: what of its KV is not as it was moved, see `planner.fresh_of`.
        chained: see `Planned`.
        recipe: what repaired it.
        queue_s, lookup_s, prefill_s: seconds, see `Timing`.
        fetch_s: seconds until the chunks were at hand.
        stored_tokens: tokens added to the store so far.
    """

    plan: Plan
    executed: Executed
    fallback: Fallback | None
    new: tuple[tuple[int, int], ...]
    fresh: Fresh
    chained: bool
    recipe: Recipe
    queue_s: float
    lookup_s: float
    prefill_s: float
    fetch_s: float = 0.0
    stored_tokens: int = 0

    @property
    def fallback_reason(self) -> str | None:
        """`fallback` in a sentence."""
        return None if self.fallback is None else self.fallback.text

    def usage(self, completion_tokens: int = 0) -> Usage:
        """Tokens of the request."""
        return Usage(
            prompt_tokens=self.plan.prompt_tokens,
            exact_tokens=self.plan.tokens("exact"),
            approximate_tokens=self.plan.tokens("approximate"),
            transferred_tokens=self.plan.tokens("transferred"),
            repaired_tokens=len(self.executed.repaired),
            computed_tokens=math.ceil(self.executed.charged - 1e-6),
            completion_tokens=completion_tokens,
            stored_tokens=self.stored_tokens,
        )

    def timing(self, request: Request, *, ttft_s: float, total_s: float, store_s: float) -> Timing:
        """Seconds of the request."""
        return Timing(
            queue_s=self.queue_s,
            tokenize_s=request.tokenize_s,
            lookup_s=self.lookup_s,
            load_s=self.fetch_s + self.executed.load_s,
            transfer_s=self.executed.transfer_s,
            prefill_s=self.prefill_s,
            model_s=self.executed.model_s,
            store_s=store_s,
            ttft_s=ttft_s,
            total_s=total_s,
        )


class Serving:
    """Runs requests. Thread-safe: passes and steps of the model take turns, everything else runs at once."""

    def __init__(
        self,
        runner: ModelRunner,
        executor: Executor,
        library: Library,
        keeper: Keeper,
        tokenizer: Any,
        planning: Planning,
        *,
        recipe: Recipe,
        bridge: Bridge | None = None,
    ) -> None:
        self._runner, self._executor, self._library, self._keeper = runner, executor, library, keeper
        self._tokenizer, self.planning, self.recipe, self._bridge = tokenizer, planning, recipe, bridge
        self._generator, self._sharing = Generator(runner), Sharing()

    def prefill(self, request: Request) -> tuple[Prefill, Served]:
        """Fill a cache with the prompt, and keep what is new.

        Raises:
            Cancelled: the caller gave up.
        """
        with self._on_the_way(request) as way:
            served = self._fill(request, way)
            filled = time.perf_counter()
            self.keep(request, served)
        end = time.perf_counter()
        prefill = Prefill(
            logits=served.executed.logits,
            cache=served.executed.cache,
            token_ids=tuple(request.ids.tolist()),
            plan=served.plan,
            usage=served.usage(),
            timing=served.timing(
                request, ttft_s=filled - request.started, total_s=end - request.started, store_s=end - filled
            ),
            fallback_reason=served.fallback_reason,
        )
        return prefill, served

    def _on_the_way(self, request: Request) -> AbstractContextManager[OnTheWay | None]:
        if request.reuse == "off":
            return nullcontext()
        return self._sharing.enter(
            request.scope, request.ids, moves=request.reuse == "approximate", stores=request.store
        )

    def _fill(self, request: Request, way: OnTheWay | None, *, room: int = 0) -> Served:
        begun = time.perf_counter()
        recipe = self.recipe  # another may be set while this request runs
        for _ in range(REPLANS):
            how = self._plan(request, recipe)
            while way is not None and self._sharing.wait(
                way, how.new, prefix=how.plan.exact_end, cancel=request.cancel
            ):
                begun = time.perf_counter()  # what it waited for others is no lookup
                how = self._plan(request, recipe)
            planned = time.perf_counter()
            with self._pinned(how.plan) as chunks:
                if chunks is None:
                    continue
                fetched = time.perf_counter()
                executed, waited_s = self._execute(request, how.plan, chunks, room, recipe)
                self._library.used(how.plan, chunks)
                break
        else:
            gone = Fallback("evicted", "the chunks that were found are evicted by now")
            how = Planned(make_plan(len(request.ids), ()), gone, None)
            planned = fetched = time.perf_counter()
            executed, waited_s = self._execute(request, how.plan, {}, room, recipe)
        if way is not None:
            self._sharing.has_read(way)
        queue_s = begun - request.started - request.tokenize_s + waited_s
        prefill_s = time.perf_counter() - fetched - executed.load_s - waited_s
        times = (queue_s, planned - begun, prefill_s, fetched - planned)
        fresh = fresh_of(how.plan, executed.repaired, how.fresh)
        return Served(how.plan, executed, how.fallback, how.new, fresh, how.chained, recipe, *times)

    def _plan(self, request: Request, recipe: Recipe) -> Planned:
        return self.planning.plan(request.scope, request.ids, recipe, reuse=request.reuse, narrowed=request.narrowed)

    @contextmanager
    def _pinned(self, plan: Plan) -> Iterator[Mapping[str, StoredRun] | None]:
        """KV of every chunk of a plan; None if any of them is gone by now."""
        with self._library.pin(plan.keys) as chunks:
            if chunks is None or self._bridge is None or not plan.transferred_keys:
                yield chunks
                return
            with self._bridge.pin(plan.transferred_keys) as mapped:
                yield None if mapped is None else {**chunks, **mapped}

    def answer(self, request: Request, on_delta: Callable[[str, tuple[int, ...]], None]) -> tuple[Generation, Served]:
        """Fill the cache and continue the prompt.

        Raises:
            Cancelled: the caller gave up before the first token.
        """
        with self._on_the_way(request) as way:
            return self._answer(request, on_delta, way)

    def _answer(
        self, request: Request, on_delta: Callable[[str, tuple[int, ...]], None], way: OnTheWay | None
    ) -> tuple[Generation, Served]:
        stops = stop_strings(self._runner.model, self._tokenizer, request.sampling)
        n = len(request.ids)
        room = min(request.sampling.max_tokens, self._runner.spec.window_tokens - n + 1)
        served = self._fill(request, way, room=min(room, 512))
        first: list[float] = []
        settings = generation_settings(self._runner.model, self._tokenizer, request.sampling, room)
        answer = Answer(
            lambda ids: self._decode(ids, request.sampling.skip_special_tokens),
            prompt_tokens=n,
            eos=frozenset(settings.eos_token_id or ()),
            stops=stops,
            cancel=request.cancel,
            on_first=lambda: first.append(time.perf_counter()),
            on_delta=on_delta,
        )
        self._generate(request, served, settings, answer, way)
        text, reason = answer.finish()
        ended = time.perf_counter()
        self.keep(request, served, answer.ids)
        generation = self._generation(request, served, answer, text, reason, (first or [ended])[0], ended)
        return generation, served

    def keep(self, request: Request, served: Served, answer: Sequence[int] = ()) -> None:
        """Store new text of a served prompt, and its answer where the whole history is exact; trace the request."""
        if request.store:
            self._keep_new(request, served, answer)
        if (recorder := self._library.recorder) is not None:
            n, ran = len(request.ids), served.usage().computed_tokens
            recorder.served(request.scope.namespace, prompt_tokens=n, computed_tokens=ran, seconds=served.prefill_s)

    def _keep_new(self, request: Request, served: Served, answer: Sequence[int]) -> None:
        n = len(request.ids)
        kv = served.executed.kv
        pure = served.plan.pure_until == n
        goes_on = served.chained or request.reuse != "approximate"
        if not goes_on and not served.plan.transferred_keys:  # what was mapped is not kept, in no form
            self._keep_served(request, served, answer)
        if not served.new:
            return
        end = n
        new = list(served.new)
        if pure and new[-1][1] == n:
            end = min(*kv.lengths, n + len(answer))  # a cancelled step may have reached some layers only
            new[-1] = (new[-1][0], end)
            if new[-1][0] == end:
                return
        ids = np.concatenate([request.ids, np.asarray(answer[: end - n], dtype=np.int32)])
        exact_until = end if pure else served.plan.pure_until
        kept = self._keeper.keep_prompt(request.scope, ids, kv, new=new, exact_until=exact_until)
        served.stored_tokens += sum(map(len, kept))
        self._drop_forgotten(request, served, kept)

    def _keep_now(self, request: Request, served: Served, way: OnTheWay) -> None:
        """Keep the prompt in the middle of its answer: another request waits for it."""
        n, grows = len(request.ids), served.plan.pure_until == len(request.ids)
        if request.store:
            self._keep_new(request, served, ())
        served.new = ((n, n),) if grows and served.new and served.new[-1][1] == n else ()  # the answer is still to come
        self._sharing.has_stored(way)

    def _keep_served(self, request: Request, served: Served, answer: Sequence[int]) -> None:
        """Keep a prompt of moved documents as it was served, so that its continuation needs no repair again."""
        if served.recipe is not self.recipe:
            return
        kv, n = served.executed.kv, len(request.ids)
        ids = np.concatenate([request.ids, answer])[: min(*kv.lengths, n + len(answer))]
        kept = self._keeper.keep_served(request.scope, ids, kv, prompt_tokens=n, fresh=served.fresh)
        if not request.store or served.recipe is not self.recipe:  # forgotten, or repaired otherwise, in the meantime
            self._library.delete([kept.key])

    def _drop_forgotten(self, request: Request, served: Served, kept: Sequence[ChunkHeader]) -> None:
        """Undo what was kept if it was forgotten in the meantime, by somebody who cannot have seen all of it."""
        if not request.store:
            self._library.delete([header.key for header in kept])
            served.stored_tokens = 0

    def _execute(self, request: Request, plan: Plan, chunks: Any, room: int, recipe: Recipe) -> tuple[Executed, float]:
        turn = Turn(float(plan.tokens("compute") + expected(recipe, plan.runs, plan.asked)), request.cancel)
        with self._runner.scheduler.turn(turn):
            executed = self._executor.run(request.ids, plan, chunks, recipe, room=room, cancelled=request.cancel.is_set)
        # The passes were timed from outside; what they waited for others is no work of theirs.
        return replace(executed, model_s=executed.model_s - turn.waited_s), turn.waited_s

    def _generate(self, request: Request, served: Served, settings: Any, answer: Answer, way: OnTheWay | None) -> None:
        device, sampling = self._runner.spec.device, request.sampling

        def each_step() -> None:
            if way is not None and way.wanted and not way.stored:
                self._keep_now(request, served, way)

        try:
            self._generator.generate(
                torch.from_numpy(request.ids.astype(np.int64)).to(device)[None],
                served.executed.logits,
                served.executed.kv,
                served.executed.cache,
                settings,
                draws=draws_of(sampling.seed, sampling.temperature, device, request.cancel),
                cancel=request.cancel,
                each_step=each_step,
                stopping_criteria=[answer],
                logits_processor=list(sampling.logits_processors),
            )
        except Cancelled:
            pass  # what was generated so far stays the answer

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _generation(
        self,
        request: Request,
        served: Served,
        answer: Answer,
        text: str,
        reason: FinishReason,
        began: float,
        end: float,
    ) -> Generation:
        now = time.perf_counter()
        timing = served.timing(
            request, ttft_s=began - request.started, total_s=now - request.started, store_s=now - end
        )
        return Generation(
            text=text,
            token_ids=tuple(answer.ids),
            finish_reason=reason,
            usage=served.usage(len(answer.ids)),
            timing=timing,
            fallback_reason=served.fallback_reason,
        )
