"""Every model method against transformers' own, on the embedded pairs: `python tests/peers/methods.py [--threads 1] [--repeats 3]`.

Greedy, one process, taking turns; medians of the summed seconds over the prompts. "x HF plain" and "x HF own" are seconds of
transformers' plain decoding, and of its implementation of the same method on the same pair, over specnb's. Tokens per pass count
every target pass, the prompt's included.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import transformers

import specnb
from specnb.bench import environment
from specnb.models.embedded.training.data import held_out
from specnb.text import prompt_inputs


def as_transformers_reads(assistant: Any, k: int) -> Any:
    """The draft model with the draft length where transformers looks for it."""
    theirs = copy.copy(assistant)
    theirs.generation_config = copy.deepcopy(assistant.generation_config)
    theirs.generation_config.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
    )
    return theirs


def cases() -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Method, pair, and the arguments of transformers' and specnb's generate()."""
    llama = specnb.load("tiny-llama", "tiny-llama-draft")
    other = specnb.load("tiny-llama", "tiny-llama-other")
    gemma = specnb.load("tiny-gemma4", "tiny-gemma4-assistant")
    glm = specnb.load("tiny-glm4-moe")
    depth = glm.target.config.num_hidden_layers  # transformers knows the MTP layers of the released depths only
    glm.target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth}\."]
    lookup = {"prompt_lookup_num_tokens": 8}
    tokenizers = {"tokenizer": other.tokenizer, "assistant_tokenizer": other.assistant_tokenizer}
    draft = {"assistant_model": as_transformers_reads(llama.assistant, 5)}
    universal = {"assistant_model": as_transformers_reads(other.assistant, 5), **tokenizers}
    drafter = {"assistant_model": as_transformers_reads(gemma.assistant, 4)}
    return [
        ("draft model, k=5", llama, draft, {"assistant_model": llama.assistant, "num_assistant_tokens": 5}),
        ("prompt lookup, k=8", llama, lookup, lookup),
        ("early exit 2 of 5, k=5", llama, {"assistant_early_exit": 2, "num_assistant_tokens": 5},
         {"assistant_early_exit": 2, "num_assistant_tokens": 5}),
        ("universal, k=5", other, universal, {"assistant_model": other.assistant, "num_assistant_tokens": 5, **tokenizers}),
        ("Gemma 4 drafter, k=4", gemma, drafter, {"assistant_model": gemma.assistant, "num_assistant_tokens": 4}),
        ("MTP layers, k=1", glm, {"use_mtp": True}, {"use_mtp": True}),
        ("MTP layers, k=3", glm, {"use_mtp": True}, {"use_mtp": True, "num_assistant_tokens": 3}),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = cases()
    where = environment(made[0][1]) | {"model": "embedded pairs", "prompts": args.prompts, "repeats": args.repeats}
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    print(f"\n{'method':<26}{'tokens/pass':>12}{'tokens/s':>10}{'x HF plain':>12}{'x HF own':>10}  same text")
    for name, pair, own, mine in made:
        prompts = [prompt_inputs(pair.tokenizer, text, device="cpu") for text, _ in held_out(args.prompts)]
        common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        seconds: dict[str, list[float]] = defaultdict(list)
        same, tokens, passes = True, 0, 0
        for turn in range(args.repeats + 1):
            spent: dict[str, float] = defaultdict(float)
            tokens = passes = 0
            for given in prompts:
                began = time.perf_counter()
                plain = pair.target.generate(**given, **common)
                spent["plain"] += time.perf_counter() - began
                began = time.perf_counter()
                pair.target.generate(**given, **common, **own)
                spent["own"] += time.perf_counter() - began
                began = time.perf_counter()
                result = specnb.generate(pair.target, **given, **common, **mine)
                spent["specnb"] += time.perf_counter() - began
                same &= torch.equal(result.sequences, plain)
                tokens, passes = tokens + result.num_emitted_tokens, passes + result.target_passes
            for arm, value in spent.items():
                if turn:  # the first round is a warm-up
                    seconds[arm].append(value)
        plain_s, own_s, mine_s = (statistics.median(seconds[arm]) for arm in ("plain", "own", "specnb"))
        print(
            f"{name:<26}{tokens / passes:>12.2f}{tokens / mine_s:>10.1f}{plain_s / mine_s:>12.2f}{own_s / mine_s:>10.2f}"
            f"  {'yes' if same else 'NO'}"
        )


if __name__ == "__main__":
    main()
