"""Peers in the same run: time to the first token of kvboost-rag and of what else a user could take, same weights.

    python benchmarks/peers.py --prompts 8 --json results/peers.json --markdown results/peers.md
    make bench-peers

Every arm is a process of its own with one thread (`peers_arms/`). The driver sends every timed prompt to one arm after
the other, in a random order, and waits for each, so that one arm at a time runs and a busy machine slows all alike.
Seconds are the CPU seconds of the arm's process (all its threads) from the call to the first token that it really
emits. Documents that prompts show again are warmed by the peer's own means where it has such; peers that learn from
prompts only are first given a prompt with the same documents in another order, which is not timed.

A peer that cannot be installed or started is listed with the reason. `--arms` runs some of them; `ours` and
`plain Hugging Face` are what the ratios and the equality of first tokens refer to.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))  # so that tests can import it, too
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from common import default_model, machine, write
from peers_child import ArmError, Child
from peers_gguf import ConversionError
from peers_install import NotInstalled
from peers_list import PEERS
from peers_report import REFERENCE, Timed, other_tokens, prefill_speeds, rows, text
from peers_schedule import SCENARIOS, Messages, Schedule, plan
from transformers import AutoTokenizer
from workload import passages

from fetch_assets import cache_root


@dataclass
class Run:
    """Arms that run, what they answered, and those that are missing with the reason."""

    children: dict[str, Child]
    missing: dict[str, str]
    results: list[Timed]

    @classmethod
    def start(cls, arms: Sequence[str], model: Path, cache: Path) -> Run:
        """Start the named arms, one after the other."""
        run = cls({}, {}, [])
        for arm in arms:
            say(f"starting {arm}")
            try:
                run.children[arm] = Child(arm, PEERS[arm].command(model, cache))
            except (NotInstalled, ConversionError, ArmError) as error:
                run.missing[arm] = str(error)
        return run

    def warm(self, texts: Sequence[str]) -> None:
        """Every arm learns the documents by its own means."""
        for arm in list(self.children):
            say(f"warming {arm}")
            done = self._try(arm, lambda child: child.warm(texts))
            if done is not None:
                self.children[arm].about |= done

    def ask(self, prompt: dict[str, Any], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The replies of these arms, one after the other; those that failed are missing from now on."""
        replies = {arm: self._try(arm, lambda child: child.ask(prompt)) for arm in arms if arm in self.children}
        return {arm: reply for arm, reply in replies.items() if reply is not None}

    def close(self) -> None:
        """End every arm."""
        for child in self.children.values():
            child.close()

    def _try(self, arm: str, work: Callable[[Child], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return work(self.children[arm])
        except ArmError as error:
            self.missing[arm] = f"stopped after {sum(r.arm == arm for r in self.results)} timed prompts: {error}"
            self.children.pop(arm).close()
            return None


def measure(run: Run, schedule: Schedule, render: Callable[[Messages], dict[str, Any]], seed: int) -> None:
    """All steps through all arms."""
    run.warm([passage.text for passage in schedule.collection])
    run.ask(render(schedule.first), list(run.children))
    for step in schedule.steps:
        arms = sorted(run.children)
        random.Random(f"{seed} {step.scenario} {step.number}").shuffle(arms)
        for arm in arms:
            if step.before is not None and (PEERS[arm].learns or (step.everyone and arm != REFERENCE)):
                run.ask(render(step.before), [arm])
            for name, reply in run.ask(render(step.messages), [arm]).items():
                run.results.append(Timed(step.scenario, step.number, name, **reply))
        seconds = {
            r.arm: round(r.cpu_s, 2) for r in run.results if (r.scenario, r.number) == (step.scenario, step.number)
        }
        say(f"{step.number + 1} {step.scenario}: {seconds}")


def renderer(tokenizer: Any) -> Callable[[Messages], dict[str, Any]]:
    """Messages → what arms are sent: the messages, the rendered text, its ids."""

    def render(messages: Messages) -> dict[str, Any]:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        return {"messages": messages, "text": rendered, "ids": ids}

    return render


def report(run: Run, arms: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Rows of the main table, and the whole report."""
    speeds, other = prefill_speeds(run.results), other_tokens(run.results)
    table = rows(run.results, arms)
    about = []
    for arm in arms:
        facts = run.children[arm].about if arm in run.children else {}
        differs = PEERS[arm].differs + (f"; {facts['warmed']}" if "warmed" in facts else "")
        if arm in other:
            differs += f"; ran another number of tokens on {other[arm]} prompts"
        version = " · ".join(str(facts[key]) for key in ("version", "build") if key in facts)
        row = {"arm": arm, "version": version or "–", "what differs": differs, "what it promises": PEERS[arm].promises}
        about.append(row | ({"prefill tokens per CPU s": speeds[arm]} if arm in speeds else {}))
    return table, text(table, about, run.missing)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(default_model()), help="folder with safetensors")
    parser.add_argument("--prompts", type=int, default=8, help="of each scenario")
    parser.add_argument("--docs", type=int, default=6, help="of each prompt")
    parser.add_argument("--collection", type=int, default=96, help="documents that are warmed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(arguments)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no folder of a model; `make bench-peers` fetches the default one")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pool = passages(lambda words: len(tokenizer(words, add_special_tokens=False).input_ids))
    schedule = plan(
        pool,
        prompts=args.prompts,
        docs=args.docs,
        collection=args.collection,
        seed=args.seed,
        scenarios=args.scenarios,
    )
    arms = [arm for arm in PEERS if arm in args.arms]
    run = Run.start(arms, args.model.resolve(), cache_root() / "peers")
    try:
        try:
            measure(run, schedule, renderer(tokenizer), args.seed)
        except KeyboardInterrupt:
            say("interrupted: this reports what was measured so far")
        table, whole = report(run, arms)
        about = {arm: child.about for arm, child in run.children.items()}
    finally:
        run.close()
    head = f"`{' '.join(sys.argv)}` on {machine()}"
    print(f"{head}\n\n{whole}")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(f"{head}\n\n{whole}\n")
    results = [asdict(result) for result in run.results]
    write(args.json, vars(args), summary=table, arms=about, missing=run.missing, prompts=results)
    return 0


def say(words: str) -> None:
    """Progress, on standard error."""
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    started = time.time()
    status = main()
    say(f"{time.time() - started:.0f} s")
    sys.exit(status)
