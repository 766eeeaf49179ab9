"""What recording the best tokens costs: `python -m tools.measure_top_logprobs [TARGET [ASSISTANT]]`.

Runs the same greedy call with and without `top_logprobs=5, probabilities=True`, taking turns, and prints the medians of
seconds per step.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

import specnb
from specnb.models.embedded import DEFAULT
from specnb.notebook.stream import RECORDED
from specnb.text import prompt_inputs

TURNS = 9


def main(target: str, assistant: str | None) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    pair = specnb.load(target, assistant)
    inputs = prompt_inputs(pair.tokenizer, "Tell me a story about a fox who finds a lantern.")
    given: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "num_assistant_tokens": 5}
    given |= {"num_assistant_tokens_schedule": "constant", "method": "draft_model" if assistant else "prompt_lookup"}
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS + 1):
        for recorded in (False, True) if turn % 2 else (True, False):
            result = specnb.generate(pair, **inputs, **given, **(RECORDED if recorded else {}))
            if turn:  # the first warms up
                steps = result.steps[1:]
                found[recorded].append(
                    sum(step.draft_seconds + step.verify_seconds + step.other_seconds for step in steps) / len(steps)
                )
    without, recorded_seconds = statistics.median(found[False]), statistics.median(found[True])
    print(
        f"{target}: {1000 * without:.2f} ms a step, {1000 * recorded_seconds:.2f} ms with the best tokens recorded "
        f"({recorded_seconds / without - 1:+.1%})"
    )


if __name__ == "__main__":
    main(*(sys.argv[1:] or DEFAULT)) if len(sys.argv) != 2 else main(sys.argv[1], None)
