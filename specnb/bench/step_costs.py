"""Costs of single steps: at long contexts, and until the first token."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from specnb.bench.clocks import time_attention, time_model_calls
from specnb.bench.prompts import PROMPTS
from specnb.bench.sizes import Size
from specnb.text import prompt_inputs

_K = "num_assistant_tokens"


def contexts(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Milliseconds of a step at different lengths of context (medians).

    Measured are the whole step, the step without attention, and the step without the model. For plain decoding the step
    without attention is measured again with an attention that reads no keys. The difference is what reading keys costs
    the other layers, since keys displace weights in the processor's cache.
    """
    import specnb

    ids = pair.tokenizer(PROMPTS["summarise"][0] * 60, return_tensors="pt").input_ids
    found = []
    for length, method in itertools.product(size.contexts, ("plain", "prompt_lookup")):
        on_progress(f"context of {length} tokens, {method}")
        chosen = method if method == "plain" else specnb.Method(method, **{_K: 8})

        def medians(reading: bool, ids: Any = ids[:, :length], chosen: Any = chosen) -> list[float]:
            marks: list[tuple[float, float, float]] = []
            with time_model_calls() as spent, time_attention(reading) as attended:

                def mark(_: object) -> None:
                    marks.append((time.perf_counter(), spent[0], attended[0]))

                specnb.generate(pair, ids, method=chosen, max_new_tokens=size.new, do_sample=False, on_step=mark)
            steps = [[b - a for a, b in zip(before, after, strict=True)] for before, after in itertools.pairwise(marks)]
            parts = ((step[0], step[0] - step[1], step[0] - step[2]) for step in steps)
            return [1e3 * statistics.median(values) for values in zip(*parts, strict=True)]

        whole, outside_model, outside_attention = medians(reading=True)
        found.append(
            {
                "context": length,
                "method": method,
                "step ms": whole,
                "outside attention ms": outside_attention,
                "the same, no keys read": medians(reading=False)[2] if method == "plain" else None,
                "outside the model ms": outside_model,
            }
        )
    return found


def first_token(pair: Any, size: Size, on_progress: Callable[[str], object]) -> dict[str, Any]:
    """Seconds to the first token, divided by those of transformers' plain decoding (medians over the turns)."""
    import specnb

    inputs = prompt_inputs(pair.tokenizer, PROMPTS["summarise"][0] * 3, device="cpu")
    draft = untrained_draft(pair.target)
    ratios: dict[str, list[float]] = {"plain": [], "prompt_lookup": [], "draft_model": []}
    for turn in range(2 * size.repeats + 2):
        on_progress(f"first token, turn {turn}")
        began = time.perf_counter()
        pair.target.generate(**inputs, max_new_tokens=1, do_sample=False)
        reference_seconds = time.perf_counter() - began
        for method, values in ratios.items():
            seen: list[float] = []
            began = time.perf_counter()
            specnb.generate(
                pair,
                **inputs,
                method=method,
                assistant_model=draft if method == "draft_model" else None,
                max_new_tokens=2,
                do_sample=False,
                on_step=lambda _, seen=seen: seen.append(time.perf_counter()),  # type: ignore[misc]
            )
            if turn:
                values.append((seen[0] - began) / reference_seconds)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {"prompt tokens": inputs["input_ids"].shape[1], **medians}


def untrained_draft(model: Any) -> Any:
    """The first fifth of the layers as a draft model. It is not trained to draft, so it only shows costs."""
    import specnb

    return specnb.truncate(model, max(1, model.config.get_text_config().num_hidden_layers // 5))
