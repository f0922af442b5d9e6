"""`model.generate` from a finished prefill, one decode step at a time, alone or together with other requests."""

from __future__ import annotations

import copy
import inspect as pyinspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch

from .draws import Drawing
from .hf import cache_over, decoding_experts, step_output
from .kv import RequestKV
from .runner import ModelRunner
from .scheduler import Decoding

# Largest accepted relative error of a batched step by dtype: rounding is well below, a wrong key well above.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03}
_CANNOT_BATCH = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


@dataclass(slots=True, eq=False)
class _Job:
    """A decode step of one request: what `generate` would hand to the model."""

    kv: RequestKV
    cache: Any
    args: tuple[Any, ...]
    inputs: dict[str, Any]

    @property
    def ids(self) -> torch.Tensor:
        ids: torch.Tensor = self.inputs["input_ids"]
        return ids


class Generator:
    """Continues prompts. Thread-safe: every answer runs in its caller's thread, and steps are run by one of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._batches: bool | None = None  # whether several requests may share a step; None until that was tried

    def generate(
        self,
        ids: torch.Tensor,
        prefill: Any,
        kv: RequestKV,
        cache: Any,
        generation_config: Any,
        *,
        draws: Drawing,
        cancel: Event | None = None,
        each_step: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`model.generate` from a finished prefill: its first step returns the logits that are already there.

        Its other steps may run together with those of other requests.

        Args:
            ids: prompt, int64 ``(1, n)``.
            prefill: logits of the last prompt token, float32 ``(vocab,)``.
            kv: holds all ``n`` prompt tokens.
            cache: view of it.
            generation_config: transformers `GenerationConfig`.
            draws: random state that tokens are chosen with.
            cancel: set by whoever gives up.
            each_step: called before each further step, while nobody computes with ``kv``.
            kwargs: streamer, stopping criteria, logits processors.

        Raises:
            Cancelled: ``cancel`` was set while the model was somebody else's.
        """
        view = copy.copy(self._runner.model)
        forward = self._runner.model.forward
        pending = [prefill]
        decoding = Decoding(None if self._batches is False else id(self._runner.model), cancel)
        for layer in cache.layers:  # generate must see the last prompt token as not yet run
            layer.crop(1)

        def step(*args: Any, **inputs: Any) -> Any:
            draws.end()
            if pending:
                kv.lengths = [length + 1 for length in kv.lengths]
                out = step_output(pending.pop()[None, None], self._runner.cache_argument, cache)
            else:
                if each_step is not None:
                    each_step()
                out = self._runner.scheduler.step(decoding, _Job(kv, cache, args, inputs), self._run_steps)
            draws.begin()
            return out

        # The view shares every weight; only its own forward differs, so the user's model is never touched.
        step.__signature__ = pyinspect.signature(forward)  # type: ignore[attr-defined]
        view.forward = step
        view._optimize_model_for_decode = nullcontext  # changes the shared config, see `decoding_experts`
        view.generation_config = generation_config  # what is None there would be filled from the model's own
        try:
            return view.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=generation_config,
                **{self._runner.cache_argument: cache},
                **kwargs,
            )
        finally:
            draws.end()
            self._runner.scheduler.leave(decoding)

    def _run_steps(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        """Outputs of one decode step of each request, or the error that its forward raised."""
        with decoding_experts(self._runner.model):
            if len(jobs) > 1 and self._can_batch() and all(job.ids.shape == (1, 1) for job in jobs):
                with suppress(*_CANNOT_BATCH):  # one of them is to blame: each alone then
                    return self._together(jobs)
            before = [list(job.kv.lengths) for job in jobs]
            try:
                return [self._alone(job) for job in jobs]
            except BaseException:  # this thread was interrupted: the others try again, all from where they were
                for job, lengths in zip(jobs, before, strict=True):
                    job.kv.lengths = lengths
                raise

    def _alone(self, job: _Job) -> Any:
        try:
            return self._runner.model.forward(*job.args, **job.inputs)
        except Exception as error:  # raised again in the thread that asked for it
            return error

    def _together(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        logits = self._runner.step(torch.cat([job.ids for job in jobs]), [job.kv for job in jobs])
        for job in jobs:
            for layer in job.cache.layers:
                layer.renew()
        name = self._runner.cache_argument
        return [step_output(logits[row : row + 1], name, job.cache) for row, job in enumerate(jobs)]

    def _can_batch(self) -> bool:
        """Whether several requests may share a step. Tried once, when it first matters: no family is on a list."""
        if self._batches is None:
            self._batches = self._try_batch()
        return self._batches

    @torch.inference_mode()
    def _try_batch(self) -> bool:
        jobs, alone = [], []
        vocab = min(self._runner.spec.vocab, self._runner.model.get_input_embeddings().weight.shape[0])
        for count in (5, 12):
            ids = ((torch.arange(count + 1) * 7919 + 11 * count) % vocab).to(self._runner.spec.device)
            kv = self._runner.new_kv(count, count + 1)
            cache = cache_over(kv)
            self._runner.run(kv, cache, ids[:-1], torch.arange(count, device=ids.device))
            jobs.append(_Job(kv, cache, (), {"input_ids": ids[None, -1:]}))
            position = torch.tensor([count], device=ids.device)
            kv.lengths = [count + 1] * len(kv.lengths)
            logits = self._runner.run(kv, cache, ids[-1:], position)
            assert logits is not None
            alone.append(logits)
            kv.lengths = [count] * len(kv.lengths)
        try:
            together = self._together(jobs)
        except _CANNOT_BATCH:
            return False
        tolerance = _TOLERANCE.get(self._runner.spec.dtype, 0.12)
        errors = [
            float((out.logits[0, -1].float() - logits).abs().max() / logits.abs().max().clamp_min(1e-6))
            for out, logits in zip(together, alone, strict=True)
        ]
        return max(errors) <= tolerance
