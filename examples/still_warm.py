# %% [markdown]
# # Ingest a folder, restart, still warm
# With `disk_path`, what the model has read outlives the process. Here one process ingests a folder, and two others
# answer the same question: one without the store, one with it.
#
# `pip install 'kvboost-rag[plots]'`. Runs for about two minutes on two CPU cores.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import shared

work = tempfile.TemporaryDirectory()
folder, store = Path(work.name, "documents"), Path(work.name, "store")
folder.mkdir()
for subject, text in shared.passages(10).items():
    (folder / f"{subject}.txt").write_text(text, encoding="utf-8")

# %% [markdown]
# ## First process: ingest
# The command line reads a folder into a store. If it is stopped, the same command goes on where it was.

# %%
ingested = json.loads(shared.kvboost_rag("warm", folder, "--model", shared.model(), "--store", store, "--json"))
print(
    f"{ingested['computed']} documents, {ingested['tokens']} tokens, {ingested['on_disk']} chunks on disk, "
    f"{ingested['store_bytes'] / 2**20:.0f} MiB, {ingested['seconds']:.0f} s with loading the model"
)

# %% [markdown]
# ## Other processes: answer
# This is the whole program of each. It says what its first request cost. The documents stand in another order than they
# were ingested in; nothing needs to be warmed again.

# %%
program = """
import json, sys
from pathlib import Path
from kvboost_rag import Engine, EngineConfig, SamplingParams

model, folder, store = sys.argv[1:]
texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir(), reverse=True)[:6]]
question = "What happens when an assertion fails?"
messages = [{"role": "user", "content": "\\n\\n".join([*texts, question])}]
with Engine.from_pretrained(model, config=EngineConfig(disk_path=store or None)) as engine:
    engine.generate("Ready?", reuse="off")  # the very first pass pays for lazy initialisation
    answer = engine.generate(messages, sampling=SamplingParams(max_tokens=32))
names = ("prompt_tokens", "exact_tokens", "approximate_tokens", "repaired_tokens")
usage = {name: getattr(answer.usage, name) for name in names}
print(json.dumps({"text": answer.text, "ttft_s": answer.timing.ttft_s, "usage": usage}))
"""


def answer_in_a_new_process(disk_path):
    arguments = [sys.executable, "-c", program, shared.model(), folder, disk_path]
    done = subprocess.run(list(map(str, arguments)), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


answers = {"no store": answer_in_a_new_process(""), "store on disk": answer_in_a_new_process(store)}
for name, answer in answers.items():
    print(f"{name}: {answer['ttft_s']:.2f} s, {answer['usage']}\n  {answer['text'].strip()}")

# %% [markdown]
# ## Picture: the first question after a restart

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
times = [answer["ttft_s"] for answer in answers.values()]
bars = left.bar(list(answers), times, 0.6, color=("#6b7280", "#047857"))
left.bar_label(bars, fmt="%.2f s", padding=3)
left.set(ylabel="time to the first token, s", title="First question of a new process")
left.set_ylim(0, 1.15 * max(times))
shared.draw_kinds(right, list(answers), [answer["usage"] for answer in answers.values()])
right.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.1))
right.set_ylim(0, None)
right.set_title("Its prompt, six of ten documents")
shared.save(figure, "still_warm.png")

# %%
work.cleanup()
