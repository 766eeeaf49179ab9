"""`python -m specnb bench`: the built-in measurements, in one process, as plain data that `report` writes out.

A real model (SmolLM2-135M-Instruct) on the suite's prompts, the embedded pairs with every method, rows of a batch, long contexts,
the first token, and specnb's own share of the time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from specnb.bench.clocks import time_attention, time_model_calls
from specnb.bench.compare import compare, environment, left_padded_batch
from specnb.bench.comparison import Comparison
from specnb.bench.prompts import PROMPTS
from specnb.text import prompt_inputs

MODEL = "smollm2-135m-q4"
TINY_MODEL_PROMPTS = [  # of the embedded pairs, in the small language that they know
    "Tell me a story about a squirrel who hides a cup.",
    "Write a summary of this text: Felix is a pilot. Felix lives in a small house near the river. Every morning Felix drinks tea. "
    "Felix has a dog. On Friday Felix goes to the museum.",
    "How do I plant a tree?",
    "Change Mia to David in this text: Mia is a doctor. Mia lives in a flat above the bakery. Mia has a goldfish. Every morning Mia drinks "
    "tea. On Saturday Mia goes to the market.",
]
_K = "num_assistant_tokens"
EMBEDDED: list[tuple[str, str | None, list[dict[str, Any]]]] = [
    (
        "tiny-llama",
        "tiny-llama-draft",
        [
            {"method": "draft_model"},
            {"method": "draft_model", _K: 5},
            {"method": "prompt_lookup"},
            {"method": "early_exit", "assistant_early_exit": 2, _K: 5},
        ],
    ),
    ("tiny-llama", "tiny-llama-other", [{"method": "universal", _K: 5}]),
    ("tiny-gemma4", "tiny-gemma4-assistant", [{"method": "gemma4_assistant", _K: 4}]),
    ("tiny-glm4-moe", None, [{"method": "mtp_layers"}, {"method": "mtp_layers", _K: 3}]),
    ("tiny-glm4-moe-mtp2", None, [{"method": "mtp_layers"}]),
]


@dataclass(frozen=True)
class Size:
    """How much is measured: prompts of each kind, fixed draft lengths, repeats, new tokens, rows, contexts."""

    prompts: int
    lengths: tuple[int, ...]
    repeats: int
    new: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]


SIZES = {
    "small": Size(1, (4, 8), 2, 64, (1, 4), (256, 1024)),
    "full": Size(4, (2, 4, 8, 16), 2, 96, (1, 4, 8), (256, 1024, 4096)),
}


def run(size: str, on_progress: Callable[[str], object] = lambda _: None, only: Collection[str] = ()) -> dict[str, Any]:
    """The measurements of a size ("small": some minutes, "full": about half an hour), or `only` some sections of them."""
    import specnb

    size = SIZES[size]
    on_progress(f"loading {MODEL}")
    pair = specnb.load(MODEL)
    found: dict[str, Any] = {
        "format": "specnb.bench/1",
        "suite": size,
        "environment": environment(pair),
        "size": asdict(size),
    }
    for name in SECTIONS if not only else [section for section in SECTIONS if section in only]:
        found[name] = _MEASUREMENTS[name](pair, size, on_progress)
    return found


def prompts(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Prompt lookup on every prompt: as it comes (adaptive) and with fixed lengths, against plain decoding and transformers' own."""
    fixed = [{"method": "prompt_lookup", _K: k} for k in size.lengths]
    found = []
    for kind, number in itertools.product(PROMPTS, range(size.prompts)):
        on_progress(f"{kind}, prompt {number + 1} of {size.prompts}")
        own = {"plain", "prompt_lookup", f"prompt_lookup, {_K}=8"}
        one = compare(
            pair,
            PROMPTS[kind][number],
            ["prompt_lookup", *fixed],
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
    """Draft model and early exit on the real model, against transformers' own. Its first layers were not trained to draft: costs, not gains."""
    layers = pair.target.config.get_text_config().num_hidden_layers
    runs = [
        {"method": "draft_model", "assistant_model": _untrained_draft(pair.target), _K: 3},
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
    """Every method on the embedded pairs, against plain decoding and transformers' own implementation."""
    import specnb

    found = []
    for target, assistant, runs in EMBEDDED:
        on_progress(f"{target}" + (f" with {assistant}" if assistant else ""))
        pair = specnb.load(target, assistant)
        one = compare(
            pair,
            TINY_MODEL_PROMPTS,
            runs,
            repeats=4 * size.repeats + 1,
            max_new_tokens=size.new,
            do_sample=False,
            transformers=True,
        )
        found.append({"target": target, "assistant": assistant, "runs": run_records(one)})
    return found


def rows(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Tokens per second of the same prompts one by one and as rows of batches."""
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
            ids += [
                row.ids
                for row in specnb.generate(pair, **given, method=method, max_new_tokens=size.new, do_sample=False).rows
            ]
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


def contexts(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Milliseconds of a step at different contexts: the whole, outside attention, outside the model (medians).

    What is outside attention is measured a second time with an attention that reads no keys, for one token a step: it shows what
    reading them costs the other layers, whose data they displace in the processor's cache.
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
    """Seconds to the first token, over those of transformers' plain decoding (medians of the ratios of a turn)."""
    import specnb

    inputs = prompt_inputs(pair.tokenizer, PROMPTS["summarise"][0] * 3, device="cpu")
    draft = _untrained_draft(pair.target)
    ratios: dict[str, list[float]] = {"plain": [], "prompt_lookup": [], "draft_model": []}
    for turn in range(2 * size.repeats + 2):
        on_progress(f"first token, turn {turn}")
        began = time.perf_counter()
        pair.target.generate(**inputs, max_new_tokens=1, do_sample=False)
        theirs = time.perf_counter() - began
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
                values.append((seen[0] - began) / theirs)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {"prompt tokens": inputs["input_ids"].shape[1], **medians}


def own_share(pair: Any, size: Size, on_progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Percent of a generation's seconds outside the models' forwards (transformers' preparations included)."""
    import specnb

    found = []
    tiny, gemma = specnb.load("tiny-llama", "tiny-llama-draft"), specnb.load("tiny-gemma4", "tiny-gemma4-assistant")
    runs: list[tuple[Any, str, dict[str, Any]]] = [
        (pair, "plain", {}),
        (pair, "prompt_lookup", {}),
        (pair, "draft_model", {"assistant_model": _untrained_draft(pair.target)}),
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


def _untrained_draft(model: Any) -> Any:
    """A draft model of the first fifth of the layers: untrained for it, so for costs only."""
    import specnb

    return specnb.truncate(model, max(1, model.config.get_text_config().num_hidden_layers // 5))


def run_records(one: Comparison) -> list[dict[str, Any]]:
    """A comparison's runs as plain data."""
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
