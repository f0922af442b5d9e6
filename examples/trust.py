# %% [markdown]
# # How far can I trust it?
# A document that is met at another place is moved and repaired, which is close to full recomputation, not identical.
# How close depends on the model and on the documents, so measure yours: `KVBOOST_MODEL=…` and `KVBOOST_DOCS=folder`.
#
# Two ways are shown: fidelity against the share of tokens that runs, on prompts made for it, and shadow audits of live
# requests. `pip install 'kvboost-rag[plots]'`. Runs for about three minutes on two CPU cores; more prompts give
# steadier figures (`docs/accuracy.md` has larger runs).

# %%
import random
import tempfile
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import shared
from kvboost_rag import Engine, EngineConfig, SamplingParams

PROMPTS, DOCUMENTS, ANSWER_TOKENS = 5, 4, 24
passages = shared.passages(14)
disk = tempfile.TemporaryDirectory()
engine = Engine.from_pretrained(shared.model(), config=EngineConfig(disk_path=disk.name))
report = engine.warm(list(passages.values()))
print(f"{report.computed} documents read in {report.seconds:.0f} s")

# %% [markdown]
# ## Prompts
# Some documents in random order, and a question about one of them.


# %%
def prompt_of(chosen):
    documents = "\n\n".join(passages[subject] for subject in chosen)
    return [{"role": "user", "content": f"{documents}\n\nExplain in two sentences: {subject_of[tuple(chosen)]}"}]


shuffled = random.Random(1)
prompts = [shuffled.sample(list(passages), DOCUMENTS) for _ in range(PROMPTS)]
subject_of = {tuple(chosen): chosen[-1] for chosen in prompts}

# %% [markdown]
# ## Fidelity
# Full recomputation answers first. Then every budget is run along that same answer, and the distributions of each next
# token are compared (KL divergence). *Fidelity* is 1 − KL / KL of the prompt without its documents: 1 is what full
# recomputation gives, 0 is as if the documents had not been there.
#
# `engine.recipe` is what repairs; `with_ratio` is the same with another share of the moved tokens to recompute, as
# `EngineConfig(repair_ratio=…)` sets it.


# %%
def along(prefill, answer):
    """Log-probabilities at each token of an answer."""
    ids = torch.tensor([answer[:-1]])
    start = len(prefill.token_ids)
    positions = torch.arange(start, start + ids.shape[1])[None]
    with torch.inference_mode():
        rows = engine.model(input_ids=ids, position_ids=positions, cache=prefill.cache, use_cache=True).logits[0]
    return torch.cat([prefill.logits[None], rows.float()]).log_softmax(-1)


def divergence(full, other):
    return float((full.exp() * (full - other)).sum(-1).mean())


standard = engine.recipe
recipes = {
    "moved only": replace(standard, strategy="none"),
    "the default": standard,
    "10 %": standard.with_ratio(0.1),
    "20 %": standard.with_ratio(0.2),
    "40 %": standard.with_ratio(0.4),
    "everything": replace(standard, ratio=1.0),
}
kl = {name: [] for name in ("no documents", *recipes)}
run = {name: [] for name in recipes}
for number, chosen in enumerate(prompts, 1):
    messages = prompt_of(chosen)
    question = [{"role": "user", "content": messages[0]["content"].rsplit("\n\n", 1)[1]}]
    answer = engine.generate(messages, reuse="off", sampling=SamplingParams(max_tokens=ANSWER_TOKENS)).token_ids
    full = along(engine.prefill(messages, reuse="off"), answer)
    kl["no documents"].append(divergence(full, along(engine.prefill(question, reuse="off"), answer)))
    for name, recipe in recipes.items():
        engine.recipe = recipe
        prefill = engine.prefill(messages, store=False)
        run[name].append(prefill.usage.computed_tokens / prefill.usage.prompt_tokens)
        kl[name].append(divergence(full, along(prefill, answer)))
    engine.recipe = standard
    print(f"prompt {number} of {PROMPTS}")

means = {name: sum(values) / len(values) for name, values in kl.items()}
fidelity = {name: 1 - means[name] / means["no documents"] for name in recipes}
share = {name: 100 * sum(values) / len(values) for name, values in run.items()}
for name in recipes:
    print(f"{name}: {share[name]:.1f} % of the tokens run, fidelity {fidelity[name]:.3f}")

# %% [markdown]
# ## Shadow audits
# In production nobody asks twice. An engine with `audit_share` computes a share of its requests in full once more, when
# the model has nothing else to do, and compares. Here all of them are; in production 0.05 may do, with an `audit_bound`
# beyond which a tenant goes to exact reuse.

# %%
audited = Engine(engine.model, engine.tokenizer, EngineConfig(disk_path=disk.name, audit_share=1.0))
found, total = [], 0.0
for chosen in prompts:
    audited.generate(prompt_of(chosen), sampling=SamplingParams(max_tokens=ANSWER_TOKENS))
    while audited.stats().audits.pending:
        time.sleep(0.1)
    audits = audited.stats().audits
    found.append(audits.mean_kl * audits.audits - total)
    total = audits.mean_kl * audits.audits
print(
    f"{audits.audits} audits: mean KL {audits.mean_kl:.3f} nats at the first token; the same first token in "
    f"{audits.first_token_agreement:.0%}; {audits.answer_agreement:.0%} of the answers' tokens are what full "
    "recomputation would choose"
)

# %% [markdown]
# ## Picture

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(1.5, 1))
left.plot([share[name] for name in recipes], list(fidelity.values()), color="#047857", marker="o")
for name in recipes:
    place = (-8, -14) if name == "everything" else (8, -12)
    side = "right" if name == "everything" else "left"
    left.annotate(name, (share[name], fidelity[name]), xytext=place, textcoords="offset points", ha=side, fontsize=9)
left.set(xlabel="tokens run, % of the prompt", ylabel="fidelity, 1 = full recomputation (axis cut)", xlim=(0, 102))
left.set_ylim(min(*fidelity.values(), 0.9) - 0.01, 1.004)
left.set_title(f"Fidelity against budget, {PROMPTS} prompts of {DOCUMENTS} documents")
left.grid(alpha=0.25)
right.bar(range(1, PROMPTS + 1), found, 0.6, color="#047857")
right.axhline(audits.mean_kl, color="#111827", linestyle="--", label=f"mean: {audits.mean_kl:.3f}")
right.set(xlabel="audited request", ylabel="KL of the first token, nats", xticks=range(1, PROMPTS + 1))
right.set_title("Shadow audits of the default")
right.set_ylim(0, 1.25 * max(*found, 1e-3))
right.legend(frameon=False)
shared.save(figure, "trust.png")

# %%
audited.close()
engine.close()
disk.cleanup()
