# %% [markdown]
# # An agent with 20 tools, reordered
# An agent's prompt holds the descriptions of all its tools. Frameworks send them in changing orders, leave some out and
# add others; a prefix cache then finds nothing. Here each description is read once. Calls are forced
# (`tool_choice="any"`), which makes them valid JSON that fits the schema, whatever the model; whether the choice is
# wise is up to the model.
#
# `pip install 'kvboost-rag[langchain,plots]'`. Runs for about two minutes on two CPU cores.

# %% [markdown]
# ## Twenty-one tools
# Methods of Python's strings, with the descriptions that Python gives them.

# %%
import random

import matplotlib.pyplot as plt
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool

import shared
from kvboost_rag import Engine
from langchain_kvboost import ChatKVBoost

NAMES = (
    "capitalize casefold encode isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
    "isspace istitle isupper lower lstrip split strip swapcase title"
).split()


def tool_of(name):
    def run(text: str) -> str:
        return str(getattr(text, name)())

    return StructuredTool.from_function(run, name=name, description=getattr(str, name).__doc__)


tools = [tool_of(name) for name in NAMES]

# %% [markdown]
# ## Twenty of them are read once
# `title`, the last one, is left for later.

# %%
engine = Engine.from_pretrained(shared.model())
llm = ChatKVBoost(engine=engine, max_tokens=96)
report = llm.warm_tools(tools[:20])
print(f"{report.computed} tools, {report.tokens} tokens, {report.seconds:.0f} s")

# %% [markdown]
# ## One turn: the model calls a tool, the tool runs, the model answers

# %%
by_name = {tool.name: tool for tool in tools}
messages = [SystemMessage("Use a tool."), HumanMessage("Turn into lower case: Good Morning")]
call = llm.bind_tools(tools[:20], tool_choice="any").invoke(messages)
result = by_name[call.tool_calls[0]["name"]].invoke(call.tool_calls[0]["args"])
messages += [call, ToolMessage(result, tool_call_id=call.tool_calls[0]["id"])]
final = llm.bind_tools(tools[:20]).invoke(messages)
print(call.tool_calls[0]["name"], call.tool_calls[0]["args"], "→", result)
print(final.content.strip() or final.tool_calls)

# %% [markdown]
# ## Five requests, each with other tools in front
# Each is also computed in full, for comparison.

# %%
shuffled = random.Random(0)
requests = {
    "as in the\nturn before": ("Use a tool.", tools[:20]),
    "other order": ("Use a tool.", shuffled.sample(tools[:20], 20)),
    "other system\nprompt": ("You are the agent of an editor. Choose one function.", shuffled.sample(tools[:20], 20)),
    "five left\nout": ("Use a tool.", shuffled.sample(tools[:20], 15)),
    "one never\nread": ("Use a tool.", shuffled.sample([*tools[1:20], tools[20]], 20)),
}
fields = ("exact_tokens", "approximate_tokens", "repaired_tokens")
usages, times = [], {"ours": [], "full": []}
for name, (system, chosen) in requests.items():
    asked = [SystemMessage(system), HumanMessage("Is this text made of digits only: 2026")]
    agent = llm.bind_tools(chosen, tool_choice="any")
    ours, full = agent.invoke(asked), agent.invoke(asked, reuse="off")
    details = ours.response_metadata
    usages.append({field: details[field] for field in fields} | {"prompt_tokens": ours.usage_metadata["input_tokens"]})
    times["ours"].append(details["ttft_s"])
    times["full"].append(full.response_metadata["ttft_s"])
    print(f"{name!r}: {ours.tool_calls[0]['name']}, in full {full.tool_calls[0]['name']}; {usages[-1]}")

# %% [markdown]
# ## Picture: tokens by kind of hit, and time to the first token
# The first request shows the tools as the turn before did: such a beginning is taken as it was served. In the others
# they are moved. A description is a short run of tokens, so a larger share of it is repaired than of a long passage.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
shared.draw_kinds(left, list(requests), usages)
left.set_title("What each prompt was made of")
places = range(len(requests))
for shift, key, colour, label in ((-0.2, "full", "#6b7280", "full recompute"), (0.2, "ours", "#047857", "ours")):
    bars = right.bar([place + shift for place in places], times[key], 0.38, color=colour, label=label)
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
right.set_xticks(places, list(requests))
right.set(ylabel="time to the first token, s", title="Time to the first token")
right.set_ylim(0, 1.25 * max(times["full"]))
right.legend(frameon=False, loc="upper left", ncols=2)
shared.save(figure, "agent_tools.png")

# %%
engine.close()
