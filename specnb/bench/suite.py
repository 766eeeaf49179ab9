"""`python -m specnb bench`: the built-in measurements, as plain data that `report` turns into a page.

Measured are a real model (SmolLM2-135M-Instruct) on the suite's prompts, every method on the embedded pairs, rows of a
batch, long contexts, the first token, and the share of the time that specnb itself takes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from specnb.bench.clocks import time_model_calls
from specnb.bench.compare import compare, environment, left_padded_batch
from specnb.bench.comparison import Comparison
from specnb.bench.prompts import PROMPTS
from specnb.bench.sizes import SIZES, Size
from specnb.bench.step_costs import contexts, first_token, untrained_draft
from specnb.text import prompt_inputs

MODEL = "smollm2-135m-q4"
TINY_MODEL_PROMPTS = [
    "Tell me a story about a squirrel who hides a cup.",
    "Write a summary of this text: Felix is a pilot. Felix lives in a small house near the river. Every morning Felix "
    "drinks tea. Felix has a dog. On Friday Felix goes to the museum.",
    "How do I plant a tree?",
    "Change Mia to David in this text: Mia is a doctor. Mia lives in a flat above the bakery. Mia has a goldfish. "
    "Every morning Mia drinks tea. On Saturday Mia goes to the market.",
]
"""Prompts for the embedded models, in the words that they were trained on."""
_K = "num_assistant_tokens"
EMBEDDED: list[tuple[str, str | None, list[dict[str, Any]]]] = [
    (
        "tiny-llama",
        "tiny-llama-draft",
        [
            {"method": "draft_model"},
            {"method": "draft_model", _K: 5},
            {"method": "prompt_lookup"},
            {"method": "suffix"},
            {"method": "suffix+draft_model"},
            {"method": "early_exit", "assistant_early_exit": 2, _K: 5},
        ],
    ),
    ("tiny-llama", "tiny-llama-other", [{"method": "universal", _K: 5}]),
    ("tiny-gemma4", "tiny-gemma4-assistant", [{"method": "gemma4_assistant", _K: 4}]),
    ("tiny-glm4-moe", None, [{"method": "mtp_layers"}, {"method": "mtp_layers", _K: 3}]),
    ("tiny-glm4-moe-mtp2", None, [{"method": "mtp_layers"}]),
    ("tiny-qwen3-5", None, [{"method": "prompt_lookup"}, {"method": "mtp_layers"}, {"method": "mtp_layers", _K: 3}]),
]
"""Embedded target, draft model, and the runs to compare."""


def run(
    suite: str, on_progress: Callable[[str], object] = lambda _: None, sections: Collection[str] = ()
) -> dict[str, Any]:
    """Measure the suite.

    Args:
        suite: "small" takes some minutes, "full" about half an hour.
        on_progress: called with a line of text before each part.
        sections: names of the sections to measure, of `SECTIONS`; empty means all.

    Returns:
        Plain data: "format", "suite", "environment" and "size", and one entry per section. `report.markdown` writes it
        as a page.
    """
    import specnb

    size = SIZES[suite]
    on_progress(f"loading {MODEL}")
    pair = specnb.load(MODEL, None)
    found: dict[str, Any] = {
        "format": "specnb.bench/1",
        "suite": suite,
        "environment": environment(pair),
        "size": asdict(size),
    }
    for name in [section for section in SECTIONS if section in sections] if sections else SECTIONS:
        found[name] = _MEASUREMENTS[name](pair, size, on_progress)
    return found


def prompts(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Prompt lookup and suffix decoding with default settings, and prompt lookup with fixed draft lengths.

    Each is compared with plain decoding, and some with transformers' own prompt lookup.
    """
    fixed = [{"method": "prompt_lookup", _K: k} for k in size.lengths]
    found = []
    for kind, number in itertools.product(PROMPTS, range(size.prompts)):
        on_progress(f"{kind}, prompt {number + 1} of {size.prompts}")
        own = {"plain", "prompt_lookup", f"prompt_lookup, {_K}=8"}
        one = compare(
            pair,
            PROMPTS[kind][number],
            ["prompt_lookup", "suffix", *fixed],
            repeats=size.repeats,
            max_new_tokens=size.new,
            do_sample=False,
            transformers=own,
        )
        by_label = {row.label: row for row in one.rows}
        best = max((row for row in one.rows if _K in row.options), key=lambda row: row.speed_up)
        adaptive = by_label["prompt_lookup"]
        against = [a / b for a, b in zip(adaptive.tokens_per_second, best.tokens_per_second, strict=True)]
        found.append(
            {
                "kind": kind,
                "prompt": number,
                "adaptive": adaptive.speed_up,
                "best fixed": best.speed_up,
                "best k": best.options[_K],
                "adaptive / best fixed": statistics.median(against),
                "runs": run_records(one),
            }
        )
    return found


def methods(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Draft model and early exit on the real model, compared with transformers' own implementation.

    The drafters are first layers that were not trained to draft, so this measures costs, not speed-ups.
    """
    layers = pair.target.config.get_text_config().num_hidden_layers
    runs = [
        {"method": "draft_model", "assistant_model": untrained_draft(pair.target), _K: 3},
        {"method": "early_exit", "assistant_early_exit": max(1, 2 * layers // 3), _K: 3},
    ]
    found = []
    for kind in ("edit code", "summarise", "open story"):
        on_progress(f"methods, {kind}")
        one = compare(
            pair,
            PROMPTS[kind][1],
            runs,
            repeats=size.repeats,
            max_new_tokens=size.new,
            do_sample=False,
            transformers=True,
        )
        found.append({"kind": kind, "runs": run_records(one)})
    return found


def embedded(_: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Every method on the embedded pairs, compared with plain decoding and with transformers' own implementation."""
    import specnb

    found = []
    for target, assistant, runs in EMBEDDED:
        on_progress(f"{target}" + (f" with {assistant}" if assistant else ""))
        record: dict[str, Any] = {"target": target, "assistant": assistant, "runs": []}
        found.append(record)
        try:
            one = compare(
                specnb.load(target, assistant),
                TINY_MODEL_PROMPTS,
                runs,
                repeats=4 * size.repeats + 1,
                max_new_tokens=size.new,
                do_sample=False,
                transformers=True,
            )
            record["runs"] = run_records(one)
        except ValueError as error:  # the installed transformers is too old for the pair
            record["left out"] = str(error)
    return found


def rows(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Tokens per second of the same prompts, one by one and as the rows of batches."""
    import specnb

    asked = [text for kind in ("summarise", "edit code", "question") for text in PROMPTS[kind]][: max(size.rows)]
    encoded = [prompt_inputs(pair.tokenizer, text, device="cpu") for text in asked]
    batches = {
        n: [left_padded_batch(encoded[i : i + n], pair.tokenizer) for i in range(0, len(encoded), n)] for n in size.rows
    }
    speeds: dict[tuple[str, int], list[float]] = {}
    texts: dict[tuple[str, int], list[Any]] = {}
    for turn, method, n in itertools.product(range(size.repeats + 1), ("plain", "prompt_lookup"), size.rows):
        on_progress(f"{method}, {n} row{'s' * (n > 1)}, turn {turn} of {size.repeats}")
        began, ids = time.perf_counter(), []
        for given in batches[n]:
            result = specnb.generate(pair, **given, method=method, max_new_tokens=size.new, do_sample=False)
            ids += [row.ids for row in result.rows]
        if turn:  # the first is a warm-up
            speeds.setdefault((method, n), []).append(sum(map(len, ids)) / (time.perf_counter() - began))
        texts[method, n] = ids
    one = {method: statistics.median(values) for (method, n), values in speeds.items() if n == 1}
    return [
        {
            "method": method,
            "rows": n,
            "tokens/s": statistics.median(values),
            "x one row": statistics.median(values) / one[method],
            "same texts": texts[method, n] == texts["plain", 1],
        }
        for (method, n), values in speeds.items()
    ]


def own_share(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Percent of a generation's time outside the models' forward passes, preparations of `generate()` included."""
    import specnb

    found = []
    tiny, gemma = specnb.load("tiny-llama", "tiny-llama-draft"), specnb.load("tiny-gemma4", "tiny-gemma4-assistant")
    runs: list[tuple[Any, str, dict[str, Any]]] = [
        (pair, "plain", {}),
        (pair, "prompt_lookup", {}),
        (pair, "draft_model", {"assistant_model": untrained_draft(pair.target)}),
        (tiny, "plain", {}),
        (tiny, "prompt_lookup", {}),
        (tiny, "draft_model", {_K: 5}),
        (tiny, "early_exit", {"assistant_early_exit": 2, _K: 5}),
        (gemma, "gemma4_assistant", {_K: 4}),
    ]
    for one, method, options in runs:
        on_progress(f"own share: {one.name}, {method}")
        inputs = prompt_inputs(
            one.tokenizer, PROMPTS["summarise"][0] if one is pair else TINY_MODEL_PROMPTS[0], device="cpu"
        )
        shares = []
        for _ in range(2 * size.repeats + 2):
            with time_model_calls() as spent:
                began = time.perf_counter()
                specnb.generate(one, **inputs, method=method, max_new_tokens=size.new, do_sample=False, **options)
                shares.append(100 * (1 - spent[0] / (time.perf_counter() - began)))
        found.append({"model": one.name, "method": method, "own %": statistics.median(shares[1:])})
    return found


def run_records(one: Comparison) -> list[dict[str, Any]]:
    """The runs of a comparison as plain data."""
    return [
        {
            "run": row.label,
            "tokens/s": row.median,
            "x plain": row.speed_up,
            "predicted": row.predicted,
            "x transformers' own": row.own_ratio,
            "transformers": row.own,
            "tokens per pass": row.tokens_per_pass,
            "acceptance rate": row.draft_acceptance_rate,
            "mean acceptance length": row.mean_acceptance_length,
            "seconds: draft, verify, rest": row.parts,
            "same text": row.same_text,
        }
        for row in one.rows
    ]


_MEASUREMENTS: dict[str, Callable[[Any, Size, Callable[[str], object]], Any]] = {
    "prompts": prompts,
    "methods": methods,
    "rows": rows,
    "contexts": contexts,
    "first token": first_token,
    "own share": own_share,
    "embedded": embedded,
}
SECTIONS = tuple(_MEASUREMENTS)
"""Names of the sections, in the order in which they are measured."""
