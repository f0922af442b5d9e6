"""From a log to a report: every request in turn through an engine in exact and one in approximate mode."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..chunking import BreakFinder
from ..chunks import IntArray, Scope, as_ids
from ..costs import CostModel
from ..errors import PromptError, TraceError
from .encoding import Encoding
from .formats import Format, Logged, NoModelCall, Unusable, read_requests, records_in
from .lines import Bad, Found, read_values
from .replay import Replay, Rules, covered, prefix_seconds
from .tally import Row, Tally
from .verdict import Verdict, judge

NAMED = 10  # bad places that a report names; the others are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Where the requests come from.

    Attributes:
        path: the file.
        format: of its values.
        namespace_field, time_field: see `read_requests`.
        by_time: replay in the order of the times in the log rather than as it stands there.
    """

    path: Path
    format: Format = "auto"
    namespace_field: str | None = None
    time_field: str | None = None
    by_time: bool = False


@dataclass(slots=True)
class Skipped:
    """What of a log was left out.

    Attributes:
        bad: places that hold nothing that could be run; the first few by name.
        bad_count: of them all.
        too_long: prompts beyond the context window.
        not_models: runs of something else than a model.
        parts: of messages that are no text.
    """

    bad: list[Bad] = field(default_factory=list)
    bad_count: int = 0
    too_long: int = 0
    not_models: int = 0
    parts: int = 0

    def add(self, bad: Bad) -> None:
        """Note a bad place."""
        self.bad_count += 1
        if len(self.bad) < NAMED:
            self.bad.append(bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Outcome for one log.

    Attributes:
        tally: of its requests.
        verdict: go or no-go.
        skipped: what was left out.
        namespaces: tenants.
        kept_tokens: whose KV was stored, by mode; in exact mode the same text counts behind every history.
        evictions: chunks that left the store to make room, by mode.
        newest_first: whether most requests stand in front of earlier ones.
    """

    tally: Tally
    verdict: Verdict
    skipped: Skipped
    namespaces: int
    kept_tokens: dict[str, int]
    evictions: dict[str, int]
    newest_first: bool


def analyze(log: Log, encoding: Encoding, rules: Rules) -> Analysis:
    """Replay a log.

    Raises:
        TraceError: it cannot be read, or holds no request that could be run.
    """
    skipped, tally = Skipped(), Tally()
    breaks = BreakFinder(encoding.piece)
    exact, approximate = (Replay(mode, rules, breaks, encoding.tokens) for mode in ("exact", "approximate"))
    tenants, order = set[str](), Counter[bool]()
    last: float | None = None
    try:
        for where, logged in _requests(log, skipped):
            try:
                ids, answer = encoding.prompt(logged), _answer(logged, encoding)
            except PromptError as error:
                skipped.add(Bad(where, str(error)))
                continue
            if len(ids) > rules.window_tokens:
                skipped.too_long += 1
                continue
            if last is not None and logged.time is not None and logged.time != last:
                order[logged.time > last] += 1
            last = logged.time if logged.time is not None else last
            skipped.parts += logged.left_out
            tenants.add(logged.namespace)
            tally.add(_row(logged, ids, answer, exact, approximate, rules.costs))
        kept = {"exact": exact.kept_tokens, "approximate": approximate.kept_tokens}
        evictions = {"exact": exact.library.evictions, "approximate": approximate.library.evictions}
    finally:
        exact.library.close()
        approximate.library.close()
    if not len(tally):
        raise TraceError(_nothing(log, skipped))
    return Analysis(
        tally=tally,
        verdict=judge(tally),
        skipped=skipped,
        namespaces=len(tenants),
        kept_tokens=kept,
        evictions=evictions,
        newest_first=order[False] > order[True],
    )


def _row(logged: Logged, ids: IntArray, answer: IntArray, exact: Replay, approximate: Replay, costs: CostModel) -> Row:
    scope, n = Scope("log", logged.namespace), len(ids)
    strict, loose = exact.step(scope, ids, answer), approximate.step(scope, ids, answer)
    leading = strict.hits[-1].end if strict.hits else 0
    answered = logged.answer_tokens
    if answered is None and logged.answer is not None:
        answered = len(answer)
    reused = [n - step.plan.tokens("compute") for step in (strict, loose)]
    return Row(
        prompt_tokens=n,
        leading_tokens=leading,
        moved_tokens=covered(loose.hits, leading),
        reused_tokens=(0, min(leading, n - 1), reused[0], reused[1]),
        seconds=(costs.pass_cost(n, n / 2), prefix_seconds(costs, n, leading), strict.seconds, loose.seconds),
        answer_tokens=answered,
        answer_s=(answered or 0) * costs.pass_cost(1, n),
        fell_back=loose.fell_back,
    )


def _answer(logged: Logged, encoding: Encoding) -> IntArray:
    return encoding.text(logged.answer) if logged.answer else as_ids([])


def _requests(log: Log, skipped: Skipped) -> Iterator[tuple[str, Logged]]:
    found = _read(log, read_values(log.path), skipped)
    if not log.by_time:
        yield from found
        return
    yield from _sorted(found, log, skipped)


def _read(log: Log, values: Iterable[Found | Bad], skipped: Skipped) -> Iterator[tuple[str, Logged]]:
    for value in values:
        if isinstance(value, Bad):
            skipped.add(value)
            continue
        for where, record in records_in(value.where, value.value):
            try:
                for logged in read_requests(
                    record, format=log.format, namespace_field=log.namespace_field, time_field=log.time_field
                ):
                    yield where, logged
            except Unusable as error:
                skipped.add(Bad(where, str(error)))
            except NoModelCall:
                skipped.not_models += 1
            except RecursionError:
                skipped.add(Bad(where, "it is nested too deeply"))


def _sorted(found: Iterable[tuple[str, Logged]], log: Log, skipped: Skipped) -> Iterator[tuple[str, Logged]]:
    """In order of time. What waits for its turn lies in an unnamed file, and only times and places in memory."""
    places: list[tuple[float, int]] = []
    with tempfile.TemporaryFile() as spool:
        for where, logged in found:
            if logged.time is None:
                at = "any of the usual fields" if log.time_field is None else repr(log.time_field)
                skipped.add(Bad(where, f"there is no time at {at}; name its field, or leave out --by-time"))
                continue
            places.append((logged.time, spool.tell()))
            fields = {name: getattr(logged, name) for name in Logged.__dataclass_fields__}
            spool.write(json.dumps([where, fields]).encode() + b"\n")
        places.sort()
        for _, place in places:
            spool.seek(place)
            where, fields = json.loads(spool.readline())
            yield where, Logged(**{**fields, "tools": tuple(fields["tools"])})


def _nothing(log: Log, skipped: Skipped) -> str:
    reasons = [f"{bad.where}: {bad.reason}" for bad in skipped.bad[:3]]
    if skipped.too_long:
        reasons.append(f"{skipped.too_long} prompts are longer than the context window")
    if skipped.not_models:
        reasons.append(f"{skipped.not_models} LangSmith runs are no model calls; export those of type 'llm'")
    why = "; ".join(reasons) or "it is empty"
    return (
        f"{log.path} holds no request that could be run ({why}); give prompts, chat messages, OpenAI requests or "
        "LangSmith runs, one JSON value in each line, or name the --format"
    )
