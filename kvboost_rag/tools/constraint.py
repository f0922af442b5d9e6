"""Constrained decoding: a logits processor that keeps an answer to a grammar, and ends it within its tokens."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..errors import ConfigError, KVBoostError
from .closing import LONGEST, Closer
from .grammar import Grammar, text_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT_GRAMMARS = 32  # compiled ones that are kept per tokenizer
CANDIDATES = 8  # most likely tokens that are tried when the tokens run short
WALKS = 3  # of these, so many are followed to an end that was not known before


class ConstraintError(KVBoostError, RuntimeError):
    """An answer could not be kept to its grammar."""


class _Shelf:
    """Constraints of one tokenizer; its own lock, since one is long in the making."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: dict[Any, Constraint] = {}


_MADE: WeakKeyDictionary[Any, _Shelf] = WeakKeyDictionary()
_MADE_LOCK = threading.Lock()


def constraint_for(tokenizer: Any, eos_ids: Iterable[int], vocab: int) -> Constraint:
    """The constraint of a tokenizer; made once, since that takes about a second, and dropped with the tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        eos_ids: all ids that end an answer of the engine.
        vocab: width of the model's logits.

    Raises:
        ConfigError: llguidance is missing, the tokenizer is a slow one, or no id ends an answer.
    """
    key = (tuple(dict.fromkeys(eos_ids)), vocab, len(tokenizer))
    with _MADE_LOCK:
        shelf = _MADE.setdefault(tokenizer, _Shelf())
    with shelf.lock:
        if key not in shelf.made:
            shelf.made[key] = Constraint(tokenizer, key[0], vocab)
        return shelf.made[key]


class Constraint:
    """Makes logits processors for one tokenizer. Thread-safe.

    Args:
        tokenizer: a fast Hugging Face tokenizer; not kept.
        eos_ids: all ids that end an answer.
        vocab: width of the model's logits.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], vocab: int) -> None:
        llguidance = _llguidance()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "to_str"):
            raise ConfigError(
                f"{type(tokenizer).__name__} is a slow tokenizer; forced tool calls and structured output need a fast "
                "one (a tokenizer.json), as AutoTokenizer loads by default"
            )
        if not eos_ids:
            raise ConfigError("no token ends an answer of this model; set eos_token_id in its generation config")
        own: Any = copy.copy(backend)  # the user's keeps its padding and truncation
        own.no_padding()
        own.no_truncation()
        self._llguidance = llguidance
        self.eos_ids = tuple(eos_ids)
        self.vocab = vocab
        size = own.get_vocab_size(with_added_tokens=True)
        known = [token for token in self.eos_ids if token < size] or None
        self._tokenizer = llguidance.LLTokenizer(own.to_str(), eos_token=known)
        self._closer = Closer(self._tokenizer, (known or self._tokenizer.eos_tokens)[0], vocab)
        self._apart = {
            str(token.content): number
            for number, token in own.get_added_tokens_decoder().items()
            if number < min(vocab, self._tokenizer.vocab_size) and self._tokenizer.is_special_token(number)
        }
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, _Start] = OrderedDict()

    def processor(self, grammar: Grammar, max_tokens: int) -> ConstraintProcessor:
        """A logits processor for one request, for `SamplingParams.logits_processors`.

        Args:
            grammar: what the answer may be.
            max_tokens: of the request, and no more than fit the model's window behind the prompt.

        Raises:
            ConfigError: the grammar cannot be compiled, or no answer of it fits ``max_tokens``.
        """
        start = self._start(grammar)
        least = None if start.ending is None else len(start.ending) + (not grammar.free)
        if least is not None and least > max_tokens:
            raise ConfigError(
                f"max_tokens is {max_tokens}, but the shortest answer that fits the schema needs about {least} tokens; "
                "raise max_tokens"
            )
        return ConstraintProcessor(self, start, max_tokens)

    def _start(self, grammar: Grammar) -> _Start:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        if unwritable := [text for text in self._apart if text in grammar.texts and not self._closer.spells(text)]:
            raise ConfigError(
                f"the schema holds {unwritable[0]!r}, which this tokenizer can only write as a special token; leave it "
                "out"
            )
        matcher = self._matcher(grammar)
        texts = [*grammar.samples, *filter(None, map(self._sample, grammar.patterns))]
        samples = [tokens for text in texts for tokens in self._closer.sample(text)]
        limit = LONGEST + 2 * (len(grammar.shortest) + grammar.reach_bytes)
        ending = self._closer.ending(matcher, samples=samples, limit=limit)
        hint = self._tokenizer.tokenize_str(grammar.shortest, parse_special=True)
        if self._closer.ends(matcher, hint) and (ending is None or len(hint) < len(ending)):
            ending = hint
        start = _Start(grammar, matcher, ending, samples, limit)
        with self._lock:
            self._compiled[grammar] = start
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return start

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        in_text = [token for token in self._apart.values() if token not in self.eos_ids]
        rules = self._llguidance.LLMatcher.grammar_from_lark(grammar.lark(self._apart.get, in_text))
        matcher: LLMatcher = self._llguidance.LLMatcher(self._tokenizer, rules, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the schema cannot be enforced: {_said(matcher)}")
        return matcher

    def _sample(self, pattern: str) -> str | None:
        """A short text that matches, with its closing quote."""
        try:
            tokens = self._closer.ending(self._matcher(text_grammar(pattern)))
        except ConfigError:
            return None
        return None if tokens is None else self._tokenizer.decode_str(tokens)[1:]


@dataclass(frozen=True, slots=True)
class _Start:
    """A compiled grammar.

    Attributes:
        matcher: before the first token; copied for each answer.
        ending: a short answer; None if none was found.
        samples, limit: for `Closer.ending`.
    """

    grammar: Grammar
    matcher: LLMatcher
    ending: list[int] | None
    samples: list[list[int]]
    limit: int


class ConstraintProcessor:
    """Keeps one answer to a grammar; made by `Constraint.processor`.

    Where the tokens left come near to what the shortest known ending needs, only tokens are allowed from which an
    ending still fits. So the answer is complete whatever the model prefers.
    """

    def __init__(self, made_by: Constraint, start: _Start, max_tokens: int) -> None:
        self._closer, self._eos, self._start = made_by._closer, made_by.eos_ids, start
        self._grammar, self._matcher, self._ending = start.grammar, start.matcher.deep_copy(), start.ending
        self._left = max_tokens
        self._read: int | None = None  # ids seen, prompt and answer
        self._tried: dict[int, list[int] | None] = {}
        self.complete = False
        self.hurried = False  # whether the model would have gone on, had there been more tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid what the grammar does not allow.

        Args:
            input_ids: prompt and answer so far, ``(1, n)``.
            scores: of the next token, ``(1, vocab)``; not changed.

        Raises:
            ConstraintError: the answer left the grammar, or the grammar turned out too complex.
        """
        if input_ids.shape[0] != 1:
            raise ConstraintError(f"the batch holds {input_ids.shape[0]} answers; a processor keeps one")
        length = input_ids.shape[1]
        if self._read is None:
            self._read = length
        if length < self._read:
            raise ConstraintError("this processor has already followed another answer; make one for each request")
        for token in input_ids[0, self._read :].tolist():
            self._follow(token)
        self._read = length
        allowed = self._allowed(scores)
        if isinstance(allowed, torch.Tensor):
            out = scores.masked_fill(~allowed, float("-inf"))
            if out.max() == float("-inf"):  # another processor forbids all that is left
                out = out.masked_fill(allowed, 0.0)
            return out
        few = torch.tensor([token for token in allowed if token < scores.shape[1]], device=scores.device)
        kept = scores[0, few]
        out = torch.full_like(scores, float("-inf"))
        out[0, few] = kept if kept.max() > float("-inf") else torch.zeros_like(kept)
        return out

    def _follow(self, token: int) -> None:
        self._left -= 1
        if self.complete or token in self._eos:
            self.complete = True
            return
        if not self._matcher.consume_token(token):
            raise ConstraintError(f"token {token} does not fit the grammar: {_said(self._matcher)}")
        if self._ending and self._ending[0] == token:
            self._ending = self._ending[1:]
        elif token in self._tried:
            self._ending = self._tried[token]
        else:
            self._ending = self._end_of(self._matcher)

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor | Sequence[int]:
        """Which tokens may come next: few ids, or bool ``(vocab,)``."""
        self._tried = {}
        if self.complete or self._matcher.is_stopped():
            self._check()
            return self._eos
        forced = [token for token in self._closer.forced(self._matcher)[:1] if token < scores.shape[1]]
        if not self._scarce():
            return forced or self._mask(scores)
        assert self._ending is not None
        likely = forced or self._closer.tidy(self._likeliest(scores), self._ending)
        fitting = self._fitting(likely)
        self.hurried |= bool(likely) and likely[0] not in fitting
        return fitting or self._ending[:1] or self._eos

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the answer cannot be followed: {_said(self._matcher)}")

    def _mask(self, scores: torch.Tensor) -> torch.Tensor:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._check()
        width = scores.shape[1]
        keep = np.zeros(width, dtype=np.bool_)
        common = min(width, len(bits))
        keep[:common] = bits[:common]
        keep[[token for token in self._eos if token < width]] = self._matcher.is_accepting()
        if not keep.any():
            raise ConstraintError("the grammar allows no token that the model has")
        return torch.from_numpy(keep).to(scores.device)

    def _scarce(self) -> bool:
        """Whether one more token might oblige the answer to more than fits."""
        return self._ending is not None and self._needs(self._ending) + self._grammar.reach_bytes >= self._left

    def _end_of(self, matcher: LLMatcher) -> list[int] | None:
        start = self._start
        return self._closer.ending(matcher, self._ending or (), samples=start.samples, limit=start.limit)

    def _needs(self, ending: Sequence[int]) -> int:
        return len(ending) + (not self._grammar.free)

    def _likeliest(self, scores: torch.Tensor) -> list[int]:
        keep = self._mask(scores)
        best = scores[0].masked_fill(~keep, float("-inf")).topk(min(CANDIDATES, int(keep.sum())))
        tokens: list[int] = best.indices.tolist()
        return tokens

    def _fitting(self, tokens: Sequence[int]) -> list[int]:
        """Those behind which an ending still fits."""
        fitting: list[int] = []
        walks = 0
        for token in tokens:
            if token in self._eos:
                fitting.append(token)
                continue
            ahead = self._matcher.deep_copy()
            if not ahead.consume_token(token):
                continue
            ending = self._closer.familiar(ahead, self._ending or ())
            if ending is None:
                if walks >= WALKS and fitting:
                    continue
                walks += 1
                ending = self._end_of(ahead)
            self._tried[token] = ending
            if ending is not None and self._needs(ending) < self._left:
                fitting.append(token)
        return fitting


def _said(matcher: LLMatcher) -> str:
    """What llguidance says, without the grammar that it repeats."""
    return (matcher.get_error().strip().splitlines() or ["no reason given"])[0][:300]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "forced tool calls and structured output need llguidance; pip install 'kvboost-rag[langchain]' "
            "(or 'kvboost-rag[llama-index]')"
        ) from error
    return llguidance
