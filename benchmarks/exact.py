"""Exact mode against plain Hugging Face: largest difference of logits, and the same greedy answers.

Each prompt is served once and stored; then another question about the same documents is asked in exact mode and
compared with `model(...)` and `model.generate(...)` on the same ids.

    python benchmarks/exact.py --json results/exact.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from common import count_tokens, default_model, load_engine, markdown, write
from workload import QUESTIONS, items, passages

from kvboost_rag import SamplingParams

COLUMNS = ("prompts", "exact_share", "max_logit_difference", "identical_answers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="hub id or folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.model, args.dtype, reuse="exact")
    same, worst, shares = 0, 0.0, []
    for item in items(passages(count_tokens(engine)), args.prompts, seed=args.seed):
        engine.clear()
        engine.prefill(item.messages())
        other = replace(item, question=QUESTIONS[0].format(name=item.passages[-1].name)).messages()
        ids = torch.tensor([engine.tokenize(other)])
        prefill = engine.prefill(other, store=False)
        with torch.inference_mode():
            plain = engine.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        worst = max(worst, float((prefill.logits - plain).abs().max()))
        shares.append(prefill.usage.exact_tokens / prefill.usage.prompt_tokens)
        ours = engine.generate(other, sampling=SamplingParams(max_tokens=args.answer_tokens), store=False).token_ids
        theirs = engine.model.generate(ids, max_new_tokens=args.answer_tokens, do_sample=False)[0, ids.shape[1] :]
        same += list(ours) == theirs.tolist()
    row = {
        "prompts": args.prompts,
        "exact_share": sum(shares) / len(shares),
        "max_logit_difference": worst,
        "identical_answers": f"{same} of {args.prompts}",
    }
    print(markdown(COLUMNS, [row]))
    write(args.json, vars(args), summary=[row])


if __name__ == "__main__":
    main()
