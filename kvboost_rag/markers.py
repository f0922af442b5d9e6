"""Special tokens as text: which strings they are, and tokenising them as the text they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from secrets import token_hex
from typing import Any

from .chunks import as_ids
from .errors import ConfigError, PromptError

# Tags of reasoning and of tool calls: templates parse them in what the model wrote, and users write them on purpose.
_PARSED_BY_TEMPLATES = re.compile("think|thought|reason|call|response|result|function", re.IGNORECASE)
HARMLESS = "word"
_MARKUP = re.compile(r"[<\[{|#@]")  # some tokenizers add ordinary words, which templates write too


class Markers:
    """Strings that a tokenizer turns into a special token.

    Args:
        ids: marker text → token id; None for a string that is no token and can only be refused.
        written: tokens that the chat template writes by itself.
        opening: what it writes to begin an answer.
        unknown: tokens among them that stand for unknown characters.

    Attributes:
        tokens: tokens that no document holds: an honest text may hold only unknown ones. int32 ``(n,)``.
        written, opening: int32 ``(n,)``.
    """

    def __init__(
        self,
        ids: Mapping[str, int | None],
        *,
        written: Iterable[int] = (),
        opening: Sequence[int] = (),
        unknown: Collection[int] = (),
    ) -> None:
        self.ids = dict(ids)
        self.written, self.opening = as_ids(sorted(written)), as_ids(opening)
        self.tokens = as_ids(sorted({token for token in ids.values() if token is not None}.difference(unknown)))
        # As the tokenizer does: the leftmost match, and of those the longest.
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {text[:k] for text in self.ids for k in range(1, len(text))}
        self._tails = {text[k:] for text in self.ids for k in range(1, len(text))}
        self._all = "\0".join(self.ids)
        self._longest = len(longest_first[0]) if longest_first else 0

    def count(self, text: str) -> Counter[int]:
        """Tokens by id that the markers in a text stand for."""
        found = (self.ids[match.group()] for match in self.pattern.finditer(text))
        return Counter(token for token in found if token is not None)

    def refuse(self, text: str, at: str) -> None:
        """See that a text holds no marker.

        Raises:
            PromptError: it does.
        """
        if match := self.pattern.search(text):
            raise PromptError(
                f"{at} holds the marker {match.group()!r} at character {match.start()}; remove it, or use "
                "markers='text' to keep it as plain text"
            )

    def may_join(self, text: str) -> bool:
        """Whether a marker could be made of part of the text and of what a template puts next to it."""
        text = text.strip()
        if not text:
            return False
        reach = range(1, min(len(text), self._longest) + 1)
        return (
            any(text[-k:] in self._heads for k in reach)
            or any(text[:k] in self._tails for k in reach)
            or (len(text) < self._longest and text in self._all)
        )


class Codec:
    """Tokenises with private copies of a fast tokenizer's backend.

    The caller's tokenizer may be told to truncate or pad at any time, by any thread; the copies never are.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__} without a `tokenizers` backend; load a fast tokenizer"
            )
        self._copy = type(backend).from_str
        self._plain = self._copy(backend.to_str())
        self._plain.no_truncation()
        self._plain.no_padding()
        self._plain.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))

    @cached_property
    def added(self) -> dict[int, Any]:
        """Every added token by id."""
        return dict(self._plain.get_added_tokens_decoder())

    @cached_property
    def names(self) -> set[str]:
        """Text of every added token."""
        return {token.content for token in self.added.values()}

    @cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts in front of a text, such as BOS."""
        bare, full = self.encode("a"), self.encode("a", special=True)
        starts = range(len(full) - len(bare) + 1)
        return full[: next((k for k in starts if full[k : k + len(bare)] == bare), 0)]

    @cached_property
    def unknown(self) -> set[int]:
        """Added tokens that stand for unknown characters. Honest text may hold them."""
        return set(self.encode("\U0010fffe")) & self.added.keys()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text whose markers are honoured, ``special`` as `add_special_tokens`."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=special).ids
        return ids

    def piece(self, token: int) -> str:
        """Text of one token, with the space in front of it if it has one."""
        text: str = self._plain.decode([token], skip_special_tokens=False)
        name: str = self._plain.id_to_token(token) or ""
        # SentencePiece decoders drop the space in front of a text, which a single token then loses.
        return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text

    def literal(self, markers: Markers) -> Literal:
        """A tokeniser of texts in which only chosen markers are honoured."""
        return Literal(self._copy(self._plain.to_str()), self.added, markers)


class Literal:
    """Tokenises markers as text, except where their alias stands.

    Works on the whole text at once, so text around a marker is tokenised as in any other text. The aliases are extra
    tokens of this private tokenizer; their ids are turned back at once and never leave.

    Args:
        backend: a copy that belongs to this object.
        added: the added tokens by id.
        markers: what to take as text.
    """

    def __init__(self, backend: Any, added: Mapping[int, Any], markers: Markers) -> None:
        self._backend, self._markers = backend, markers
        self._nonce = f"kv{token_hex(8)}"
        self._real: dict[int, int] = {}
        self._aliases: dict[str, str] = {}
        for token, old in added.items():
            text = old.content
            if text not in markers.ids:
                continue
            kind, alias = type(old), f"{self._nonce}a{token}z"
            flags = {flag: getattr(old, flag) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
            # `encode_special_tokens` skips special tokens only, and turn markers need not be special.
            backend.add_special_tokens([kind(text, special=True, **flags)])
            backend.add_tokens([kind(alias, special=False, **flags)])
            self._aliases[text] = alias
            self._real[backend.token_to_id(alias)] = token
        backend.encode_special_tokens = True

    def alias(self, marker: str) -> str:
        """What to write for a marker that is to be honoured."""
        return self._aliases[marker]

    def trusted(self, text: str) -> str:
        """A text all of whose markers are to be honoured."""
        return self._markers.pattern.sub(lambda match: self.alias(match.group()), text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text with aliases.

        Raises:
            PromptError: an alias was not recognised.
        """
        raw = self._backend.encode(text, add_special_tokens=False).ids
        if sum(token in self._real for token in raw) != text.count(self._nonce):
            raise PromptError("a marker of the chat template cannot be told from text here; remove special-token text")
        return [self._real.get(token, token) for token in raw]

    def check(self, marker: str) -> None:
        """See that a marker survives as text.

        Raises:
            PromptError: it does not.
        """
        ids = self._backend.encode(marker, add_special_tokens=False).ids
        back = self._backend.decode(ids, skip_special_tokens=False)
        if self._markers.ids[marker] in ids or "".join(back.split()) != "".join(marker.split()):
            raise PromptError(
                f"this tokenizer cannot write the marker {marker!r} as plain text; remove it from the text"
            )


def find_markers(
    codec: Codec,
    *,
    named: Collection[str],
    rendered: Iterable[str],
    frame: str = "",
    opening: str = "",
    extra: Collection[str] = (),
) -> Markers:
    """The markers of a tokenizer and its chat template.

    These are its special tokens, and those other added tokens that the template itself writes.

    Args:
        codec: the tokenizer.
        named: BOS, EOS and other tokens the tokenizer has a name for.
        rendered: harmless conversations, rendered.
        frame: one of them in which a template says nothing of its own accord.
        opening: what the template writes to begin an answer.
        extra: further markers, which need not be tokens.
    """
    written = {token for text in rendered for token in codec.encode(text)}
    ids: dict[str, int | None] = dict.fromkeys(extra)
    for token, added in codec.added.items():
        text = added.content
        turn = token in written and _MARKUP.search(text) and not _PARSED_BY_TEMPLATES.search(text)
        # Some tokenizers add runs of spaces, and some name an ordinary character as padding.
        if text in ids or ((added.special or text in named or turn) and len(text.strip()) > 1):
            ids[text] = token
    begins = codec.encode(opening.rstrip())  # whitespace may merge with what follows
    around = {*codec.encode(frame), *begins}.difference(codec.encode(HARMLESS))
    return Markers(ids, written=around, opening=begins, unknown=codec.unknown)
