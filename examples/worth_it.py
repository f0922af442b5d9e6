# %% [markdown]
# # Is it worth it for me?
# `kvboost-rag trace analyze` reads a log of prompts and says what repeats in it, what each mode would save, and whether
# to switch it on. No text is printed and nothing leaves the machine. Name your own log with `KVBOOST_LOG=file.jsonl`
# (chat requests as OpenAI's API has them, LangSmith runs, or plain prompts, one JSON value in each line); without one,
# three logs are made up here.
#
# `pip install 'kvboost-rag[plots]'`. Runs for about a minute on two CPU cores.

# %% [markdown]
# ## Three kinds of traffic
# Retrieved documents in changing orders; one long system prompt with a new question each time; short prompts with long
# answers.

# %%
import json
import os
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import shared

work = tempfile.TemporaryDirectory()
passages = list(shared.passages(24).values())
chance = random.Random(0)


def request(system, user, answer):
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "response": answer,
    }


def question(number):
    return f"Question {number}: what do they say about {chance.choice(['names', 'loops', 'types', 'files'])}?"


handbook = "\n\n".join(passages[:8])
short = "It is explained in the second document."
logs = {
    "documents in\nany order": [
        request("Use the context.", "\n\n".join([*chance.sample(passages, 5), question(n)]), short) for n in range(80)
    ],
    "one long\nprefix": [request(handbook, question(n), short) for n in range(80)],
    "short prompts,\nlong answers": [
        request("You tell stories.", question(n), passages[n % 24] * 2) for n in range(80)
    ],
}
if named := os.environ.get("KVBOOST_LOG"):
    paths = {Path(named).name: Path(named)}
else:
    paths = {name: Path(work.name, f"log{number}.jsonl") for number, name in enumerate(logs)}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(line) + "\n" for line in logs[name]), encoding="utf-8")

# %% [markdown]
# ## Analyze
# `--model` measures the model's speed on this machine; `--tokenizer` in its place needs no weights. Without `--json`
# the same is printed as tables, and `--plot` draws them.

# %%
reports = {}
for name, path in paths.items():
    reports[name] = json.loads(shared.kvboost_rag("trace", "analyze", path, "--model", shared.model(), "--json"))
    verdict = reports[name]["verdict"]
    go = f"go, reuse={verdict['mode']!r}" if verdict["go"] else "no-go"
    print(f"{' '.join(name.split())}: {go}: {verdict['reason']}")

# %% [markdown]
# ## Picture: predicted time to the first token, and what repeats
# "Moved text" is what no prefix cache can use. A no-go may have the lowest bars: short prompts leave little to save,
# and reuse does not make decoding faster.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(1, 1.4))
kinds = (("leading", "leading prefix", "#1d4ed8"), ("moved", "moved text", "#047857"), ("new", "new", "#9ca3af"))
bottom = [0.0] * len(reports)
for key, label, colour in kinds:
    heights = [100 * report["shares"][key] for report in reports.values()]
    left.bar(range(len(reports)), heights, 0.6, bottom=bottom, color=colour, label=label)
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
left.set_xticks(range(len(reports)), list(reports))
left.set(ylabel="prompt tokens, %", ylim=(0, 118), title="What repeats", yticks=range(0, 101, 20))
left.legend(frameon=False, ncols=3, loc="upper center", fontsize=9)
modes = (
    ("plain", "full prefill", "#6b7280"),
    ("prefix", "a prefix cache", "#93c5fd"),
    ("exact", 'reuse="exact"', "#1d4ed8"),
    ("approximate", 'reuse="approximate"', "#047857"),
)
for number, (mode, label, colour) in enumerate(modes):
    means = [report["modes"][mode]["ttft_mean_s"] for report in reports.values()]
    places = [place + 0.2 * (number - 1.5) for place in range(len(reports))]
    bars = right.bar(places, means, 0.19, color=colour, label=label)
    right.bar_label(bars, fmt="%.2g", padding=2, fontsize=8)
verdicts = ["go: " + r["verdict"]["mode"] if r["verdict"]["go"] else "no-go" for r in reports.values()]
right.set_xticks(range(len(reports)), [f"{name}\n→ {said}" for name, said in zip(reports, verdicts, strict=True)])
right.set(ylabel="seconds, mean", title="Predicted time to the first token")
right.margins(y=0.25)
right.legend(frameon=False, ncols=2, fontsize=9, loc="upper right")
shared.save(figure, "worth_it.png")

# %%
work.cleanup()
