"""Figures on SmolLM2-135M-Instruct: `python tests/figures.py [--threads 1] [--repeats 3]` prints them as a table.

1. prompt lookup and a draft model against plain decoding and against transformers' own implementation of the same method,
   interleaved in one process, medians; the texts must be the same;
2. specnb's own share of the time, outside the models' forwards;
3. the time of a step at 256 and at 4,096 tokens of context.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

import specnb
from specnb.bench import prompts as suite
from specnb.decoding.cached import fastest

PROMPTS = {kind: suite.PROMPTS[kind][1] for kind in ("edit code", "summarise", "open story")}
STORY = suite.PROMPTS["summarise"][0]


@contextmanager
def timed_forwards(*models: torch.nn.Module) -> Iterator[list[float]]:
    """Seconds spent in the forwards of these models."""
    spent, began = [0.0], [0.0]
    hooks = []
    for model in models:
        hooks.append(model.register_forward_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter())))
        hooks.append(model.register_forward_hook(
            lambda *_: spent.__setitem__(0, spent[0] + time.perf_counter() - began[0])
        ))  # fmt: skip
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds and last result of each run; every round runs all of them, the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results = {}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            results[name] = run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}, results


def against_transformers(pair: specnb.Pair, new: int, repeats: int) -> None:
    target, draft = pair.target, specnb.truncate(pair.target, 6)
    theirs = copy.copy(draft)
    theirs.generation_config = copy.deepcopy(draft.generation_config)
    theirs.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
    )
    print(
        f"\n{'prompt':<12}{'method':<16}{'plain s':>9}{'HF own s':>10}{'specnb s':>10}{'x plain':>9}{'x HF own':>10}  same text"
    )
    for title, prompt in PROMPTS.items():
        ids = pair.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                 return_tensors="pt", return_dict=True)["input_ids"]  # fmt: skip
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
        for method, own, mine in (
            ("prompt lookup", {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3},
             {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}),
            ("draft model", {"assistant_model": theirs}, {"assistant_model": draft, "num_assistant_tokens": 3}),
            ("early exit", {"assistant_early_exit": 20, "num_assistant_tokens": 3}, {"assistant_early_exit": 20, "num_assistant_tokens": 3}),
        ):  # fmt: skip
            seconds, results = interleaved({
                "plain": lambda given=given: target.generate(**given),
                "HF": lambda given=given, own=own: target.generate(**given, **own),
                "specnb": lambda given=given, mine=mine: specnb.generate(target, **given, **mine).sequences,
            }, repeats)  # fmt: skip
            same = torch.equal(results["plain"], results["specnb"])
            a, b, c = seconds["plain"], seconds["HF"], seconds["specnb"]
            print(
                f"{title:<12}{method:<16}{a:>9.2f}{b:>10.2f}{c:>10.2f}{a / c:>9.2f}{b / c:>10.2f}  {'yes' if same else 'NO'}"
            )


def own_share(pair: specnb.Pair, new: int) -> None:
    target, draft = pair.target, specnb.truncate(pair.target, 6)
    print(f"\n{'own share of the time':<36}{'total s':>9}{'forwards s':>12}{'own %':>8}")
    for title, options in (
        ("plain", {}),
        ("prompt lookup", {"prompt_lookup_num_tokens": 8}),
        ("draft model", {"assistant_model": draft}),
    ):
        for _ in range(2):  # the first is a warm-up
            with timed_forwards(fastest(target), fastest(draft)) as spent:
                result = specnb.generate(
                    target,
                    PROMPTS["summarise"],
                    tokenizer=pair.tokenizer,
                    max_new_tokens=new,
                    do_sample=False,
                    **options,
                )
        print(f"{title:<36}{result.seconds:>9.2f}{spent[0]:>12.2f}{100 * (1 - spent[0] / result.seconds):>8.2f}")


def context_cost(pair: specnb.Pair) -> None:
    print(
        f"\n{'step time at context of':<36}{'256':>9}{'4096':>9}   (ms; prompt lookup k=8, medians; own: outside forwards)"
    )
    ids = pair.tokenizer(STORY * 60, return_tensors="pt").input_ids
    whole, own = [], []
    for length in (256, 4096):
        with timed_forwards(fastest(pair.target)) as spent:
            marks: list[tuple[float, float]] = []
            specnb.generate(pair.target, ids[:, :length], max_new_tokens=64, do_sample=False, prompt_lookup_num_tokens=8,
                            on_step=lambda step, marks=marks, spent=spent: marks.append((time.perf_counter(), spent[0])))  # fmt: skip
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
        whole.append(1e3 * statistics.median(s for s, _ in steps))
        own.append(1e3 * statistics.median(s - f for s, f in steps))
    print(f"{'whole step':<36}{whole[0]:>9.2f}{whole[1]:>9.2f}\n{'own part':<36}{own[0]:>9.2f}{own[1]:>9.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--no-pack", action="store_true", help="without packed weights, as transformers runs them")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    print(f"{datetime.date.today()}, {platform.machine()}, {args.threads} thread(s), torch {torch.__version__}, "
          f"transformers {transformers.__version__}, SmolLM2-135M-Instruct (Q4_1, dequantised), float32, weights {'as they are' if args.no_pack else 'packed for specnb'}")  # fmt: skip
    smol = specnb.load("smollm2-135m-q4", pack=not args.no_pack)
    own_share(smol, args.max_new_tokens)
    context_cost(smol)
    against_transformers(smol, args.max_new_tokens, args.repeats)
