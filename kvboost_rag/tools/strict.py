"""JSON schemas as users write them → schemas whose every value can be generated, and ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError

MAX_STRING = 4096  # characters; about a thousand tokens, more than a field of an answer holds
MAX_ITEMS = 64  # of an array or a free map; a small model that repeats itself finds no end by itself
MAX_KEY = 64  # characters of a free key
MAX_NUMBER = 10**15  # a larger float has no exact whole digits left
LEAST_STEP = 1e-9  # decimals of a number; otherwise 1/3 is written for ever
MAX_DEPTH = 128  # dicts and lists in one another of a schema; a hand-written one has about ten
MAX_NODES = 20_000  # values of a schema, and parts of its strict copy
ANY_DEPTH = 6  # levels of a value that a schema says nothing about

_DATE = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|(?:0[13578]|1[02])-31)|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Tighter than RFC 3339: no leap seconds and no 29 February of an ordinary year, which `datetime` refuses.
_CALENDAR = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_FORMATS = frozenset({*_CALENDAR, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"})
# Formats that describe a value and forbid none.
_DESCRIBING = frozenset(
    "password binary byte path file-path directory-path float double int32 int64 multi-line textarea".split()
)
_UNSUPPORTED = (
    "not if then else contains minContains maxContains uniqueItems dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef $anchor"
).split()
_ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly discriminator nullable $schema $id "
    "$comment contentEncoding contentMediaType contentSchema".split()
)
_MERGED = frozenset({"type", "properties", "required", *_ANNOTATIONS})
_LOOKAROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")


def check_size(schema: Any, where: str = "$") -> None:
    """Refuse what would hold up a server, or has no end.

    Args:
        schema: any value.
        where: what errors call it.

    Raises:
        ConfigError: it is nested too deeply, as one that holds itself is, or has too many values.
    """
    levels = [iter([schema])]
    nodes = 0
    while levels:
        for value in levels[-1]:
            nodes += 1
            if nodes > MAX_NODES:
                raise ConfigError(f"{where} has more than {MAX_NODES} values; give a smaller schema")
            if isinstance(value, (Mapping, list, tuple)):
                levels.append(iter(value.values() if isinstance(value, Mapping) else value))
                break
        else:
            levels.pop()
        if len(levels) > MAX_DEPTH:
            raise ConfigError(
                f"{where} is nested more than {MAX_DEPTH} levels deep, or holds itself; flatten it, or write what "
                "recurs as a $ref"
            )


def strict_schema(schema: Mapping[str, Any], *, where: str = "$") -> dict[str, Any]:
    """A copy of a schema fit for generation: what fits the copy fits the schema, and every value ends.

    Objects are closed, strings, arrays and numbers bounded, where the user said nothing about it. The order of
    properties stays. Alternatives of an ``anyOf`` that cannot be enforced are left out as long as one remains.

    Args:
        schema: draft 2020-12 or 7, as pydantic writes it.
        where: what errors call its root.

    Raises:
        ConfigError: the schema asks for something that cannot be enforced; names the keyword and the place.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{where} is {schema!r}; a JSON schema must be a dict")
    check_size(schema, where)
    maker = _Strict(schema)
    strict = maker.node(schema, where)
    assert isinstance(strict, dict)
    if maker.any_used:
        strict.setdefault("$defs", {}).update(_any_values())
    return strict


class _Strict:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.any_used = False
        self._nodes = self._depth = 0

    def node(self, node: Any, where: str, *, closed: bool = True) -> dict[str, Any] | bool:
        """One schema; ``closed`` is false inside a combination, where properties of its siblings are allowed too."""
        if node is True or node == {}:
            return self._any()
        if node is False:
            return False
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES or self._depth > MAX_DEPTH:  # a merged allOf holds copies of what it refers to
            raise ConfigError(f"{where[:200]}: allOf merges too much, or itself; write it as one object")
        try:
            return self._made(node, where, closed)
        finally:
            self._depth -= 1

    def _made(self, node: Any, where: str, closed: bool) -> dict[str, Any]:
        out = _plain(node, where)
        if out.get("allOf"):
            out = self._all_of(out, where)
        self._typed(out)
        for key in ("$defs", "definitions"):
            if key in out:
                out[key] = {name: self.node(value, f"{where}.{key}.{name}") for name, value in out[key].items()}
        self._reference(out, where)
        combined = self._combinations(out, where, closed)
        if "const" in out or "enum" in out:
            return out
        if not set(out) - {"$defs", "definitions"}:
            return {**out, **self._any()}
        self._object(out, where, closed=closed and not combined)
        self._array(out, where)
        self._string(out, where)
        self._number(out)
        return out

    def _any(self) -> dict[str, Any]:
        self.any_used = True
        return {"$ref": f"#/$defs/any-value-{ANY_DEPTH}"}

    def _typed(self, out: dict[str, Any]) -> None:
        if "type" in out or any(key in out for key in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")):
            return
        if any(key in out for key in ("properties", "required", "additionalProperties", "patternProperties")):
            out["type"] = "object"
        elif "items" in out or "prefixItems" in out:
            out["type"] = "array"

    def _reference(self, out: dict[str, Any], where: str) -> None:
        if "$ref" in out:
            self._target(out["$ref"], where)

    def _target(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ConfigError(f"{where}: $ref is {reference!r}; only references into the same schema ('#/…') work")
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ConfigError(f"{where}: $ref is {reference!r}, but the schema has nothing there") from None
        return found

    def _combinations(self, out: dict[str, Any], where: str, closed: bool) -> bool:
        """Make the alternatives strict; says whether they name properties of their own."""
        named = False
        beside = "properties" in out
        for key in ("anyOf", "oneOf", "allOf"):
            if key not in out:
                continue
            kept: list[Any] = []
            first: ConfigError | None = None
            for at, part in enumerate(out[key]):
                named = named or (isinstance(part, Mapping) and "properties" in part)
                try:
                    kept.append(self.node(part, f"{where}.{key}[{at}]", closed=closed and not beside))
                except ConfigError as error:
                    if key == "allOf":
                        raise
                    first = first or error
            if first is not None and not kept:
                raise first
            out[key] = kept
        return named

    def _all_of(self, out: dict[str, Any], where: str) -> dict[str, Any]:
        """Objects joined by ``allOf`` as one object: each closed by itself would forbid the others' properties."""
        own = {key: value for key, value in out.items() if key != "allOf"}
        if len(out["allOf"]) == 1 and not set(own) - {"$defs", "definitions"}:
            (part,) = out["allOf"]
            return {**own, **part} if isinstance(part, Mapping) else out
        parts = [self._followed(part, where) for part in (*out["allOf"], own)]
        if not any("properties" in part for part in parts):
            return out
        merged: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in parts:
            kept = {key: value for key, value in part.items() if key not in ("$defs", "definitions")}
            clash = set(kept.get("properties", {})) & set(merged["properties"])
            if set(kept) - _MERGED or clash or kept.get("type", "object") != "object":
                why = sorted(map(str, clash or set(kept) - _MERGED or {"type"}))
                raise ConfigError(f"{where}: allOf cannot be merged because of {why}; write it as one object")
            merged["properties"].update(kept.get("properties", {}))
            merged["required"] += [name for name in kept.get("required", ()) if name not in merged["required"]]
        return {**merged, **{key: own[key] for key in ("$defs", "definitions") if key in own}}

    def _followed(self, part: Any, where: str) -> Mapping[str, Any]:
        seen: set[str] = set()
        while isinstance(part, Mapping) and "$ref" in part and not set(part) - {"$ref", *_ANNOTATIONS}:
            if part["$ref"] in seen:
                raise ConfigError(f"{where}: {part['$ref']!r} refers to itself")
            seen.add(part["$ref"])
            part = self._target(part["$ref"], where)
        return part if isinstance(part, Mapping) else {}

    def _object(self, out: dict[str, Any], where: str, *, closed: bool) -> None:
        if "object" not in _types(out) and "properties" not in out:
            return
        self._property_names(out, where)
        for key in ("properties", "patternProperties"):
            if key in out:
                out[key] = {name: self.node(value, f"{where}.{key}.{name}") for name, value in out[key].items()}
        if closed and "properties" in out and "patternProperties" not in out:
            out.setdefault("additionalProperties", False)
        extra = out.get("additionalProperties", True)
        if extra is False and "patternProperties" not in out:
            return
        if out.get("minProperties", 0) > 1:
            raise ConfigError(f"{where}: minProperties is {out['minProperties']}, but free keys may repeat; name them")
        if extra is not False:
            out["additionalProperties"] = self.node(extra, f"{where}.additionalProperties")
        if not out.get("properties") and "patternProperties" not in out:
            # Applies to the same keys, but bounds their length.
            out["patternProperties"] = {f"^.{{1,{MAX_KEY}}}$": out.pop("additionalProperties")}
            out["additionalProperties"] = False
        if set(out.get("properties", ())) <= set(out.get("required", ())):
            out.setdefault("maxProperties", MAX_ITEMS + len(out.get("properties", ())))

    def _property_names(self, out: dict[str, Any], where: str) -> None:
        """Keys that must match are properties by another name."""
        names = out.pop("propertyNames", None)
        if names is None or names is True:
            return
        names = self._followed(names, where)
        value = out.get("additionalProperties", True)
        allowed = names.get("enum", [names["const"]] if "const" in names else None)
        if out.get("properties") or out.get("patternProperties") or (allowed is None and "pattern" not in names):
            raise ConfigError(f"{where}: propertyNames works only with enum or pattern, and without properties")
        if allowed is not None:
            out["properties"] = dict.fromkeys(allowed, value)
        else:
            out["patternProperties"] = {names["pattern"]: value}
        out["additionalProperties"] = False

    def _array(self, out: dict[str, Any], where: str) -> None:
        if "array" not in _types(out):
            return
        if isinstance(out.get("items"), list):  # draft 7 wrote prefixItems so
            out["prefixItems"] = out.pop("items")
            if "additionalItems" in out:
                out["items"] = out.pop("additionalItems")
        prefix = out.get("prefixItems")
        if prefix is not None:
            out["prefixItems"] = [self.node(part, f"{where}.prefixItems[{at}]") for at, part in enumerate(prefix)]
        if out.get("items") is False or (prefix is not None and out.get("maxItems", len(prefix) + 1) <= len(prefix)):
            return
        out["items"] = self.node(out.get("items", True), f"{where}.items")
        out.setdefault("maxItems", max(MAX_ITEMS, out.get("minItems", 0), len(prefix or ())))

    def _string(self, out: dict[str, Any], where: str) -> None:
        form = out.get("format")
        if "string" not in _types(out):
            out.pop("format", None)
            return
        if form in _DESCRIBING:
            del out["format"]
        elif form is not None and form not in _FORMATS:
            raise ConfigError(
                f"{where}: format {form!r} cannot be enforced; use a pattern, or one of {', '.join(sorted(_FORMATS))}"
            )
        elif form in _CALENDAR and "pattern" not in out:
            out["pattern"] = _CALENDAR[out.pop("format")]
        pattern = out.get("pattern")
        if pattern is not None and _LOOKAROUND.search(pattern):
            raise ConfigError(f"{where}: the pattern {pattern!r} looks around or back; write one that does not")
        if pattern is None and "format" not in out:
            out.setdefault("maxLength", max(MAX_STRING, out.get("minLength", 0)))

    def _number(self, out: dict[str, Any]) -> None:
        kinds = _types(out) & {"number", "integer"}
        if not kinds:
            return
        limits = [out[key] for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if key in out]
        if all(isinstance(limit, (int, float)) and abs(limit) < MAX_NUMBER for limit in limits):
            if "minimum" not in out and "exclusiveMinimum" not in out:
                out["minimum"] = -MAX_NUMBER
            if "maximum" not in out and "exclusiveMaximum" not in out:
                out["maximum"] = MAX_NUMBER
        if "number" in kinds and all(limit == 0 or abs(limit) > 1e3 * LEAST_STEP for limit in limits):
            out.setdefault("multipleOf", LEAST_STEP)


def _plain(node: Any, where: str) -> dict[str, Any]:
    """A copy without what describes a value."""
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} is {node!r}; a JSON schema must be a dict or a boolean")
    mixed = any(key in node for key in ("anyOf", "oneOf", "allOf", "$ref"))
    harmless = ("uniqueItems",) if mixed else ("uniqueItems", "unevaluatedProperties")
    refused = [key for key in _UNSUPPORTED if key in node and not (node[key] is False and key in harmless)]
    if refused:
        remedy = "use a list instead of a set" if refused[0] == "uniqueItems" else "leave it out"
        raise ConfigError(f"{where}: {refused[0]!r} cannot be enforced while an answer is generated; {remedy}")
    if "unevaluatedProperties" in node:  # no more than what closing does, but also where nothing is named
        node = {"properties": {}, **node}
    dropped = (*_ANNOTATIONS, *_UNSUPPORTED)
    return {key: value for key, value in node.items() if key not in dropped and not key.startswith("x-")}


def _types(out: Mapping[str, Any]) -> set[str]:
    kinds = out.get("type", ())
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _any_values() -> dict[str, Any]:
    """Definitions of a value that a schema says nothing about, so many levels deep."""
    number = {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, "multipleOf": LEAST_STEP}
    plain = [{"type": "string", "maxLength": MAX_STRING}, number, {"type": "boolean"}, {"type": "null"}]
    values: dict[str, Any] = {"any-value-0": {"anyOf": plain}}
    for level in range(1, ANY_DEPTH + 1):
        inner = {"$ref": f"#/$defs/any-value-{level - 1}"}
        keys = {"patternProperties": {f"^.{{1,{MAX_KEY}}}$": inner}, "additionalProperties": False}
        deep = [{"type": "object", **keys, "maxProperties": MAX_ITEMS}]
        deep.append({"type": "array", "items": inner, "maxItems": MAX_ITEMS})
        values[f"any-value-{level}"] = {"anyOf": [*plain, *deep]}
    return values
