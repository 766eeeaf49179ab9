"""What drafting costs for a target with running states: `python -m tools.measure_recurrent [--output STEM]`.

The target is a Qwen3.5 with 12 layers of width 512; half of them are linear attention. Its weights are random, except
for the head: it makes the text a cycle of tokens, so that the text repeats the prompt. Four ways of decoding take turns
call by call, on one thread: transformers' own `generate()`, specnb's plain decoding, prompt lookup, and a draft model
that is never right, with the default schedule. The time of copying states and rolling them back is measured in the same
calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import specnb
from specnb.decoding.lm.snapshots import Snapshots

VOCAB, CYCLE, PROMPT, NEW = 4096, 96, 200, 128


def target() -> PreTrainedModel:
    """The hybrid model."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=12,
        layer_types=["linear_attention", "full_attention"] * 6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        tokens = torch.randn(VOCAB, 512)
        model.get_input_embeddings().weight.copy_(tokens)
        head = torch.zeros(VOCAB, 512)
        head[(torch.arange(CYCLE) + 1) % CYCLE] = tokens[:CYCLE]
        model.get_output_embeddings().weight.copy_(head)
    return model


def useless_draft() -> PreTrainedModel:
    """A small model whose tokens the target never chooses."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[:CYCLE] = -1
    return model


class Clock:
    """Adds up the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def method(self) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            out = self.function(*args)
            self.seconds += time.perf_counter() - began
            return out

        return timed


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description="what drafting costs for a target with running states")
    parser.add_argument("--repeats", type=int, default=9, help="counted turns")
    parser.add_argument("--output", type=Path, help="write STEM.json and STEM.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model, draft = target(), useless_draft()
    ids = (torch.arange(PROMPT) % CYCLE)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    ways: dict[str, dict[str, Any]] = {
        "plain, specnb": {"method": "plain"},
        "prompt lookup": {"method": "prompt_lookup"},
        "a draft model that is never right": {"assistant_model": draft},
    }
    theirs: list[float] = []
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    copies: dict[str, list[float]] = {way: [] for way in ways}
    results: dict[str, Any] = {}
    for turn in range(given.repeats + 2):
        began = time.perf_counter()
        expected: Tensor = model.generate(ids, **options)
        plain = time.perf_counter() - began
        for way, how in ways.items():
            clocks = [Clock(Snapshots.save), Clock(Snapshots.roll_back)]
            with (
                patch.object(Snapshots, "save", clocks[0].method()),
                patch.object(Snapshots, "roll_back", clocks[1].method()),
            ):
                began = time.perf_counter()
                results[way] = specnb.generate(model, ids, **options, **how)
                spent = time.perf_counter() - began
            assert torch.equal(results[way].sequences, expected), way
            if turn >= 2:
                seconds[way].append(plain / spent)
                copies[way].append(sum(clock.seconds for clock in clocks) / spent)
        if turn >= 2:
            theirs.append(plain)
    found = [
        {
            "way": way,
            "times plain generate()": statistics.median(ratios),
            "lowest": min(ratios),
            "copies, share of the time": statistics.median(copies[way]),
            "mean acceptance length": results[way].mean_acceptance_length,
            "passes of the target": len(results[way].steps),
            "memory of copies, kB": results[way].runtime["target"]["state_snapshot_bytes"] / 1000,
        }
        for way, ratios in seconds.items()
    ]
    where = (
        f"{date.today()}, {platform.machine()}, one thread, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {given.repeats} turns"
    )
    lines = [
        "# Targets with running states",
        "",
        f"`python -m tools.measure_recurrent`: {where}. {NEW} new tokens after {PROMPT}; plain `generate()` took",
        f"{statistics.median(theirs):.2f} s. Texts are the same.",
        "",
        "| | times plain `generate()`, median (lowest) | acceptance length | passes | copies, share of time | memory |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one['way']} | {one['times plain generate()']:.2f} ({one['lowest']:.2f}) | "
            f"{one['mean acceptance length']:.2f} | {one['passes of the target']} | "
            f"{one['copies, share of the time']:.1%} | {one['memory of copies, kB']:.0f} kB |"
            for one in found
        ),
    ]
    print("\n".join(lines))
    if given.output:
        given.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {"where": where, "plain_seconds": statistics.median(theirs), "ways": found}
        given.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
