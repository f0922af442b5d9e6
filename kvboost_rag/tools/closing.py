"""The short way to the end: short documents of a schema, and short endings of an answer that has begun."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from ..errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 512  # tokens that a walk to the end takes beyond what was expected; a longer one has gone astray
FEW = 8  # so many ways to go on are a choice between names, more are the letters of a text
MAX_DOCUMENT = 32_768  # characters of the shortest document; no small model writes so much
SUFFIXES = 48  # endings of the last known ending that are tried
_ROUNDS = 16  # in which references are followed; more than one is for those that go in a circle
_PATTERNS = 32  # of a schema, for which a text is looked for beforehand
_UNKNOWN = 64  # bytes of a text whose pattern says nothing about its length
_LAST_ANCHOR = re.compile(r"(?<!\\)[$]$")
_COUNT = re.compile(r"\{(\d+)")
_SAMPLES = {
    "duration": "P1D",
    "email": "a@b.co",
    "hostname": "a.co",
    "ipv4": "1.1.1.1",
    "ipv6": "::1",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "http://a.co",
}


def shortest_json(schema: Mapping[str, Any]) -> str:
    """About the shortest document of a schema of `strict_schema`, as text.

    A guess: it ignores patterns and combinations, so check it before use.

    Raises:
        ConfigError: it would be longer than `MAX_DOCUMENT`.
    """
    short = _Short(schema)
    text = short.text(schema)
    if text is None and short.too_long:
        raise ConfigError(
            f"the shortest answer that fits the schema has more than {MAX_DOCUMENT} characters; lower its minItems, "
            "minLength or required properties"
        )
    return text or "null"


def reach_bytes(schema: Mapping[str, Any]) -> int:
    """About how many bytes one token of an answer can oblige it to: the largest of what can begin at one place."""
    short = _Short(schema)
    largest = 0
    for node in _nodes(schema):
        literals = [node["const"]] if "const" in node else node.get("enum", ())
        names = [*node.get("properties", ())]
        sizes = [len(_dumps(value)) for value in (*literals, *names)]
        largest = max(largest, len(short.text(node) or ""), *sizes, 0)
    return 2 * largest + 16  # a token may close one value and open two


def samples_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that fit the formats of a schema, each with its closing quote."""
    forms = dict.fromkeys(node["format"] for node in _nodes(schema) if isinstance(node.get("format"), str))
    return tuple(f'{_SAMPLES[form]}"' for form in forms if form in _SAMPLES)


def patterns_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns that match the whole of a text, one for each pattern that a schema asks a text to hold."""
    found = dict.fromkeys(node["pattern"] for node in _nodes(schema) if isinstance(node.get("pattern"), str))
    inner = [_LAST_ANCHOR.sub("", pattern.removeprefix("^")) for pattern in list(found)[:_PATTERNS]]
    return tuple(f"^(?:{pattern})$" for pattern in inner)


class _Short:
    """Short documents of the parts of a schema; each part is looked at a few times only, however often it is used.

    What references lead to is found in rounds, each with the documents of the round before, until no document gets
    shorter.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._found: dict[str, str | None] = {}
        self._made: dict[int, str | None] = {}
        self.too_long = False  # whether a document was left out because it would be too long
        targets = _targets(root)
        for _ in range(_ROUNDS):
            before = dict(self._found)
            self._made, self.too_long = {}, False
            for reference, node in targets.items():
                self._found[reference] = self.text(node)
            if self._found == before:
                break
        self._made = {}

    def text(self, node: Any) -> str | None:
        """A short document; None where only an endless one is left."""
        if not isinstance(node, Mapping):
            return None if node is False else "0"
        if id(node) not in self._made:
            self._made[id(node)] = self._fits(self._written(node))
        return self._made[id(node)]

    def _fits(self, text: str | None) -> str | None:
        if text is not None and len(text) > MAX_DOCUMENT:
            self.too_long = True
            return None
        return text

    def _written(self, node: Mapping[str, Any]) -> str | None:
        if "const" in node:
            return _dumps(node["const"])
        if "enum" in node:
            return min(map(_dumps, node["enum"]), key=len, default=None)
        if "$ref" in node:
            return self._found.get(node["$ref"])
        for key in ("anyOf", "oneOf"):
            if node.get(key):
                return min(filter(None, map(self.text, node[key])), key=len, default=None)
        if node.get("allOf"):
            return self.text(node["allOf"][0])
        kinds = node.get("type", ["object" if "properties" in node else "null"])
        found = [self._fits(self._typed(node, kind)) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        return min(filter(None, found), key=len, default=None)

    def _typed(self, node: Mapping[str, Any], kind: str) -> str | None:
        if kind == "object":
            required = dict.fromkeys(node.get("required", ()))
            wanted = [name for name in dict.fromkeys((*node.get("properties", ()), *required)) if name in required]
            values = [self.text(node.get("properties", {}).get(name, True)) for name in wanted]
            pairs = [f"{_dumps(name)}: {value}" for name, value in zip(wanted, values, strict=True)]
            return None if None in values else "{" + ", ".join(pairs) + "}"
        if kind == "array":
            return self._array(node)
        if kind == "string":
            return '"' + _filler(node) + '"'
        if kind in ("integer", "number"):
            return _number(node)
        return {"boolean": "true", "null": "null"}.get(kind)

    def _array(self, node: Mapping[str, Any]) -> str | None:
        least = int(node.get("minItems", 0))
        items = [self.text(one) for one in node.get("prefixItems", ())[:least]]
        if more := least - len(items):
            items += [self.text(node.get("items"))] * min(more, MAX_DOCUMENT)
        if None in items:
            return None
        if sum(map(len, filter(None, items))) > MAX_DOCUMENT:
            self.too_long = True
            return None
        return "[" + ", ".join(filter(None, items)) + "]"


def _targets(root: Mapping[str, Any]) -> dict[str, Any]:
    """What the references of a schema lead to, mostly those first that others need."""
    targets: dict[str, Any] = {}
    waiting = list(dict.fromkeys(_references(root)))
    left: set[str] = set()
    while waiting:
        reference = waiting[-1]
        if reference in targets or reference in left:
            targets.setdefault(waiting.pop(), _target(root, reference))
            continue
        left.add(reference)
        waiting += [one for one in dict.fromkeys(_references(_target(root, reference))) if one not in left]
    return targets


def _references(node: Any) -> Iterator[str]:
    return (one["$ref"] for one in _nodes(node) if isinstance(one.get("$ref"), str))


def _target(root: Any, reference: str) -> Any:
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        try:
            root = root[int(name)] if isinstance(root, list) else root[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return root


def _number(node: Mapping[str, Any]) -> str:
    limits = [node[key] for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if key in node]
    step = node.get("multipleOf", 1)
    tried = [0, 1, step, *limits, *(limit + by for limit in limits for by in (1, -1, step, -step))]
    least, most = node.get("minimum", float("-inf")), node.get("maximum", float("inf"))
    above, below = node.get("exclusiveMinimum", float("-inf")), node.get("exclusiveMaximum", float("inf"))
    fit = [value for value in tried if least <= value <= most and above < value < below]
    return min((_dumps(value) for value in fit), key=len, default="0")


def _filler(node: Mapping[str, Any]) -> str:
    pattern, form = node.get("pattern"), node.get("format")
    if pattern is not None:
        counts = sum(min(int(count[:9]), MAX_DOCUMENT) for count in _COUNT.findall(pattern))
        return "a" * min(_UNKNOWN + len(pattern) // 4 + counts, MAX_DOCUMENT + 1)
    if form is not None:
        return _SAMPLES.get(form, "a" * _UNKNOWN)
    return "a" * min(int(node.get("minLength", 0)), MAX_DOCUMENT + 1)


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for key, value in node.items():
            if key not in ("const", "enum"):
                yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_STRAY = re.compile(r"[\s,.]*[}\]]")


class Closer:
    """Finds short endings of answers that have begun, for one tokenizer. Thread-safe: it works on copies.

    Args:
        tokenizer: of llguidance.
        eos: an id that ends an answer.
        width: ids from here on do not exist for the model.
    """

    def __init__(self, tokenizer: LLTokenizer, eos: int, width: int) -> None:
        self._tokenizer, self._eos, self._width = tokenizer, eos, min(width, tokenizer.vocab_size)
        signs = ["".join(signs) for size in (4, 3, 2, 1) for signs in product('"}]', repeat=size)]
        values = ["0", " 0", '""', ' ""', "null", " null", "{}", " {}", "[]", " []", "true", " true", "1", " 1"]
        # Signs first: behind a sign, most patterns go on to their next part. An escape leads nowhere.
        order = '"}],:@./-_ \n<0123456789' + "".join(chr(code) for code in range(32, 127) if chr(code) != "\\")
        # A quote behind a bracket begins a key, or ends a string that the bracket would be a stray part of.
        self._closers = self._single([text for text in signs if not text.startswith('""') and '"' not in text[1:]])
        self._values = self._single(values)
        letters = self._single([*dict.fromkeys(order), "\\"])
        self._ranked = np.array(list(dict.fromkeys([*self._closers, *self._values, *letters])), dtype=np.int64)
        self._common = [*self._closers[-12:], *self._values[:4]]

    def sample(self, text: str) -> list[list[int]]:
        """Tokens of a text and of each of its endings, the shortest first."""
        return [self._tokenizer.greedy_tokenize(text[at:]) for at in range(len(text) - 1, -1, -1)]

    def ending(
        self,
        matcher: LLMatcher,
        known: Sequence[int] = (),
        *,
        samples: Sequence[Sequence[int]] = (),
        limit: int = LONGEST,
    ) -> list[int] | None:
        """A short way from here to where the answer may end, without the end-of-sequence token.

        Args:
            matcher: is not changed.
            known: the ending of a step ago.
            samples: endings of texts that are not easily found, as of `sample`.
            limit: tokens of the way, at most.

        Returns:
            None if none was found.
        """
        found = self.familiar(matcher, known)
        return self._walk(matcher.deep_copy(), list(known), samples, limit) if found is None else found

    def familiar(self, matcher: LLMatcher, known: Sequence[int]) -> list[int] | None:
        """The part of a known ending that is an ending here too; much faster than looking for another."""
        if matcher.is_accepting():
            return []
        known = list(known)
        for rest in (known[1:], known):  # the token took the place of one of them, or made no difference
            if rest and self.ends(matcher, rest):
                return rest
        for size in range(1, min(len(known) - 1, SUFFIXES)):
            if self.ends(matcher, known[-size:]):
                return known[-size:]
        return None

    def tidy(self, tokens: Sequence[int], ending: Sequence[int]) -> list[int]:
        """The tokens without those that would close a bracket inside a string, where it is a stray character.

        A model that wants to end prefers ``}",`` to ``",``, and both end the string.
        """
        if not ending or not self._tokenizer.decode_str(list(ending[:1])).startswith('"'):
            return list(tokens)
        return [token for token in tokens if not _STRAY.match(self._tokenizer.decode_str([token]))]

    def forced(self, matcher: LLMatcher) -> list[int]:
        """Tokens that must come next; none where there is a choice.

        llguidance spells a forced ``<|im_end|>`` inside a text with the special token, which the grammar then refuses:
        there, the text's ordinary tokens.
        """
        tokens: list[int] = matcher.compute_ff_tokens()
        if not tokens or (fit := matcher.validate_tokens(tokens)):
            return tokens[:fit] if tokens else []
        plain = self._tokenizer.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
        return plain[: matcher.validate_tokens(plain)]

    def spells(self, text: str) -> bool:
        """Whether ordinary tokens can write a text."""
        return bool(self._tokenizer.decode_str(self._tokenizer.greedy_tokenize(text)) == text)

    def ends(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        """Whether the answer is complete behind these tokens."""
        return matcher.validate_tokens([*tokens, self._eos]) == len(tokens) + 1

    def _walk(
        self, matcher: LLMatcher, known: list[int], samples: Sequence[Sequence[int]], limit: int
    ) -> list[int] | None:
        out: list[int] = []
        used: Counter[int] = Counter()
        while len(out) < limit:
            if matcher.is_accepting():
                return out
            for rest in (known[1:], known):
                if out and rest and self.ends(matcher, rest):
                    return out + rest
            step = self.forced(matcher) or self._step(matcher, used, samples)
            if not step or max(step) >= self._width or not matcher.consume_tokens(step):
                return None
            out += step
        return None

    def _step(self, matcher: LLMatcher, used: Counter[int], samples: Sequence[Sequence[int]]) -> list[int]:
        """What to write next; nothing if no token is allowed."""
        for token in self._common:
            if not used[token] and matcher.validate_tokens([token]) == 1:
                used[token] += 1
                return [token]
        for sample in samples:
            if matcher.validate_tokens(list(sample)) == len(sample):
                return list(sample)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        closing = [token for token in self._closers if bits[token]]
        allowed = closing[:1] or self._ranked[bits[self._ranked] > 0].tolist()
        allowed = allowed or np.flatnonzero(bits[: self._width]).tolist()
        # A token that was taken already comes last: "0" for ever, or an object in an object, is no way to the end.
        names = [token for token in allowed if not used[token]]
        if 1 < len(names) <= FEW:
            token = min(names, key=lambda token: self._forced_bytes(matcher, token))
        elif allowed:
            token = min(allowed, key=used.__getitem__)
        else:
            return []
        used[token] += 1
        return [token]

    @staticmethod
    def _forced_bytes(matcher: LLMatcher, token: int) -> int:
        ahead = matcher.deep_copy()
        return len(ahead.compute_ff_bytes()) if ahead.consume_token(token) else LONGEST

    def _single(self, texts: Sequence[str]) -> list[int]:
        """Ids of the texts that are one token."""
        ids = [self._tokenizer.greedy_tokenize(text) for text in texts]
        return [found[0] for found in ids if len(found) == 1 and found[0] < self._width]
