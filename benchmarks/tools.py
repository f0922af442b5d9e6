"""Tool descriptions: time to first token against full recompute, and the share of tool tokens that is found.

The tools are warmed once, without a system prompt. Then they are asked for in other orders, with some left out, with
some never seen, and behind other system prompts, as agents do. Arms of a prompt run one after the other in CPU seconds
of one thread: ours, exact prefix only, and full recompute (the same chat model with `reuse="off"`).

    python benchmarks/tools.py --counts 5 20 60 --prompts 8 --json results/tools.json

With `--steps`, two agents call four tools each instead: what a step computes when it goes on from the step before as
that was served, and when it is repaired anew because it is about another tool.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import bar, cpu_seconds, default_model, load_engine, machine, markdown, reused_in, write

from kvboost_rag import Engine
from kvboost_rag.tools import Dialect, canonical_tool
from langchain_kvboost import ChatKVBoost

DOMAINS = {
    "calendar": ("events of the user's calendar", "title", "start time in ISO 8601"),
    "mail": ("messages of the user's mailbox", "subject", "address of the recipient"),
    "files": ("files of the shared drive", "path", "media type"),
    "tickets": ("tickets of the support desk", "summary", "priority from 1 (urgent) to 5"),
    "orders": ("orders of the web shop", "order number", "state: open, shipped or returned"),
    "customers": ("customers in the CRM", "full name", "country code"),
    "invoices": ("invoices of the accounting system", "invoice number", "amount in cents"),
    "servers": ("virtual machines of the data centre", "host name", "region"),
    "experiments": ("training runs of the research group", "name of the run", "metric to sort by"),
    "recipes": ("recipes of the kitchen's collection", "name of the dish", "number of servings"),
    "flights": ("flights of the booking system", "flight number", "day of departure"),
    "contracts": ("contracts of the legal department", "party to the contract", "day on which it ends"),
    "sensors": ("readings of the building's sensors", "name of the sensor", "quantity that is measured"),
}
VERBS = {
    "search": "Find {what} by text. Use this first when the user does not give an exact {key}.",
    "create": "Add a new entry to the {what}; fails if the {key} exists already.",
    "update": "Change fields of one of the {what}. Leave out what stays as it is.",
    "delete": "Remove one of the {what} for good. Ask the user before calling this.",
    "list": "List the {what}, newest first, a page at a time.",
}
SYSTEMS = (
    "You are the assistant of an office. Use the tools when they help.",
    "You help the staff of a small company. Be brief.",
    "You are an agent that works through a list of tasks. Think about which function fits before you call one.",
    "Answer the user. Today is Monday, 30 November.",
)
QUESTIONS = (
    "Which of them were changed last week?",
    "Please find the entry of Mrs Miller and tell me its state.",
    "Add one for tomorrow at nine, called planning.",
    "How many are there in all?",
)
TASKS = {  # what is asked, and the calls with their results
    "Move my flight to Friday, put it into the calendar and tell Mrs Miller by mail.": (
        ("search_flights", '{"flights": [{"key": "LH 455", "day": "2026-12-03", "state": "booked"}]}'),
        ("update_flights", '{"ok": true}'),
        ("create_calendar", '{"ok": true, "id": 17}'),
        ("create_mail", '{"sent": true}'),
    ),
    "Have a look at the open tickets, and see whether a server is the reason.": (
        (
            "list_tickets",
            '{"tickets": [{"key": "printer is broken", "priority": 2}, {"key": "no VPN", "priority": 1}]}',
        ),
        ("update_tickets", '{"ok": true}'),
        ("search_servers", '{"servers": [{"host": "vpn-3", "region": "eu"}]}'),
        ("list_servers", '{"servers": ["vpn-1", "vpn-2", "vpn-3"]}'),
    ),
}
STEP_COLUMNS = ("tools", "steps", "repaired anew", "run by these", "run by the others", "prompt tokens")
COLUMNS = (
    "tools",
    "prompt tokens",
    "tool tokens found",
    "run by ours",
    "full s",
    "exact prefix s",
    "ours s",
    "speedup",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--counts", type=int, nargs="+", default=[5, 20, 60])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", action="store_true", help="the steps of agents instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.model, args.dtype, fallback=True, store_prompts=args.steps)
    chat = ChatKVBoost(engine=engine, max_tokens=1)
    tools = all_tools()
    known, strangers = tools[:60], tools[60:]
    chat.warm_tools(known)
    if args.steps:
        rows = [step_row(engine, random.Random(args.seed).sample(known, count)) for count in args.counts]
        print(markdown(STEP_COLUMNS, rows))
        print(f"\n`{' '.join(sys.argv)}` on {machine()}")
        write(args.json, vars(args), steps=rows)
        return
    found = []
    for count in args.counts:
        rng = random.Random(args.seed)
        for number in bar(range(-1, args.prompts), f"{count} tools"):
            chosen = rng.sample(known, count)
            if number % 2:  # every other prompt has a tool that nobody has seen
                chosen[rng.randrange(count)] = strangers[number % len(strangers)]
            row = ask(engine, chat, chosen, strangers, number, rng)
            if number >= 0:
                found.append({"tools": count, **row})
    rows = [summary([row for row in found if row["tools"] == count]) for count in args.counts]
    print(markdown(COLUMNS, rows))
    print(f"\n`{' '.join(sys.argv)}` on {machine()}")
    write(args.json, vars(args), summary=rows, prompts=found)


def step_row(engine: Engine, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps of all tasks behind their first ones."""
    dialect = Dialect(engine.model, engine.tokenizer)
    steps = []
    for task, calls in TASKS.items():
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEMS[0]}, {"role": "user", "content": task}]
        for number, (name, result) in enumerate([("", ""), *calls]):
            if number:
                call = {"id": str(number), "type": "function", "function": {"name": name, "arguments": {"key": "x"}}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": result, "name": name, "tool_call_id": str(number)})
            turn = dialect.turn(messages, tools=tools, strict=False, max_tokens=1)
            prefill = engine.prefill(turn.messages, tools=turn.tools, namespace="default")
            if number:
                anew = not any(segment.settled for segment in prefill.plan.segments)
                steps.append((anew, prefill.usage.computed_tokens, prefill.usage.prompt_tokens))
    parts = [[run for anew, run, _ in steps if anew == wanted] for wanted in (True, False)]
    return {
        "tools": len(tools),
        "steps": len(steps),
        "repaired anew": len(parts[0]),
        "run by these": statistics.mean(parts[0]) if parts[0] else "–",
        "run by the others": statistics.mean(parts[1]) if parts[1] else "–",
        "prompt tokens": statistics.mean(n for *_, n in steps),
    }


def all_tools() -> list[dict[str, Any]]:
    """65 descriptions of 70 to 110 tokens."""
    made = []
    for domain, (what, key, extra) in DOMAINS.items():
        for verb, text in VERBS.items():
            properties = {
                "key": {"type": "string", "description": f"The {key}."},
                "extra": {"type": "string", "description": f"The {extra}."},
            }
            if verb in ("search", "list"):
                properties["limit"] = {"type": "integer", "description": "Most entries to return."}
            function = {
                "name": f"{verb}_{domain}",
                "description": text.format(what=what, key=key),
                "parameters": {"type": "object", "properties": properties, "required": ["key"]},
            }
            made.append({"type": "function", "function": function})
    return made


def ask(
    engine: Engine,
    chat: ChatKVBoost,
    tools: list[dict[str, Any]],
    strangers: list[Any],
    number: int,
    rng: random.Random,
) -> dict[str, float]:
    """One prompt through all arms."""
    messages = [("system", SYSTEMS[number % len(SYSTEMS)]), ("human", QUESTIONS[number // 2 % len(QUESTIONS)])]
    bound = chat.bind_tools(tools, strict=False)
    arms: dict[str, Callable[[], Any]] = {
        "ours": lambda: next(iter(bound.stream(messages))),
        "exact": lambda: next(iter(bound.stream(messages, reuse="exact"))),
        "full": lambda: next(iter(bound.stream(messages, reuse="off"))),
    }
    row: dict[str, float] = {}
    for arm in rng.sample(sorted(arms), len(arms)):
        row[arm], _ = cpu_seconds(arms[arm])
    roles = {"human": "user"}
    given = [{"role": roles.get(role, role), "content": text} for role, text in messages]
    turn = Dialect(engine.model, engine.tokenizer).turn(given, tools=tools, strict=False, max_tokens=1)
    prefill = engine.prefill(turn.messages, tools=turn.tools, store=False)
    seen = [tool for tool in tools if tool not in strangers]
    covered, total = tool_tokens(engine, prefill, seen)
    return {
        **row, "covered": covered, "tool_tokens": total, "prompt_tokens": prefill.usage.prompt_tokens,
        "computed_tokens": prefill.usage.computed_tokens, "fallback": float(prefill.fallback_reason is not None),
    }  # fmt: skip


def tool_tokens(engine: Engine, prefill: Any, tools: list[dict[str, Any]]) -> tuple[int, int]:
    """How many tokens of these tools were reused, and how many there are."""
    text, count = reused_in(engine, prefill)
    covered = total = 0
    for tool in tools:
        name = canonical_tool(tool)["function"]["name"]
        middle = text.index(f'"name": "{name}"')
        begin = text.rindex("\n", 0, middle) + 1
        end = text.index("\n", middle)
        found, there = count(begin, end)
        covered += found
        total += there
    return covered, total


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and means of one number of tools."""
    return {
        "tools": int(rows[0]["tools"]),
        "prompt tokens": statistics.mean(r["prompt_tokens"] for r in rows),
        "tool tokens found": sum(r["covered"] for r in rows) / sum(r["tool_tokens"] for r in rows),
        "run by ours": statistics.mean(r["computed_tokens"] for r in rows),
        "full s": statistics.median(r["full"] for r in rows),
        "exact prefix s": statistics.median(r["exact"] for r in rows),
        "ours s": statistics.median(r["ours"] for r in rows),
        "speedup": statistics.median(r["full"] / r["ours"] for r in rows),
    }


if __name__ == "__main__":
    main()
