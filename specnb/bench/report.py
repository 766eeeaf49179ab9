"""The built-in suite's figures as a Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def markdown(found: Mapping[str, Any], command: str) -> str:
    """All sections of `suite.run`, each with what it measures in a line."""
    on = found["environment"]
    parts = [
        f"# Measurements, {on['date'][:10]}",
        f"`{command}`: {on['model']}, {on['dtype']}, {on['machine']}, {on['threads']} thread{'s' * (on['threads'] > 1)}, torch {on['torch']}, "
        f"transformers {on['transformers']}, specnb {on['specnb']}, Python {on['python']}. {found['size']['new']} new tokens, greedy, runs taking "
        f"turns, medians of {found['size']['repeats']} repeats.",
    ]
    for name, part in _PARTS.items():
        if name in found:
            parts += part(found[name])
    return "\n\n".join(parts) + "\n"


def _prompts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        kinds.setdefault(one["kind"], []).append(one)
    lines = []
    for kind, prompts in kinds.items():
        runs = [run for one in prompts for run in one["runs"] if run["run"] == "prompt_lookup"]
        lines.append(
            {
                "kind": kind,
                "x plain, median": statistics.median(one["adaptive"] for one in prompts),
                "lowest": min(one["adaptive"] for one in prompts),
                "best fixed k": ", ".join(str(one["best k"]) for one in prompts),
                "x best fixed k, median": statistics.median(one["adaptive / best fixed"] for one in prompts),
                "lowest ": min(one["adaptive / best fixed"] for one in prompts),
                "x transformers' own": statistics.median(run["x transformers' own"] for run in runs),
                "same text": all(run["same text"] for one in prompts for run in one["runs"]),
            }
        )
    note = (
        "As it comes (adaptive length), against specnb's own plain decoding, against the best fixed draft length in hindsight, and against "
        "transformers' prompt lookup."
    )
    return ["## Prompt lookup on a real model", note, table(lines), *_hindsight(found)]


def _hindsight(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """How near each way of choosing the length comes to the best fixed one of every prompt."""
    shares: dict[str, list[float]] = {}
    for one in found:
        for run in one["runs"]:
            shares.setdefault(run["run"], []).append(run["x plain"] / one["best fixed"])
    lines = [
        {
            "run": name,
            "x best fixed k, median": statistics.median(values),
            "lowest": min(values),
            f"prompts of {len(values)} below 0.95": sum(value < 0.95 for value in values),
        }
        for name, values in shares.items()
    ]
    note = "The best fixed length differs from prompt to prompt and is known afterwards only. How near each run comes to it:"
    return [note, table(lines)]


def _embedded(found: Sequence[Mapping[str, Any]]) -> list[str]:
    groups = [(" + ".join(filter(None, (one["target"], one["assistant"]))), one["runs"]) for one in found]
    note = "Tiny models: most of the time is Python around the kernels."
    return ["## Every method on the embedded pairs", note, _runs(groups, "pair")]


def _methods(found: Sequence[Mapping[str, Any]]) -> list[str]:
    note = "Its first layers were not trained to draft, so hardly a draft stands: this compares what the methods cost."
    groups = [(one["kind"], one["runs"]) for one in found]
    return ["## Draft model and early exit on the real model", note, _runs(groups, "prompt")]


def _runs(groups: Iterable[tuple[str, Sequence[Mapping[str, Any]]]], name: str) -> str:
    shown = (
        "run",
        "tokens per pass",
        "tokens/s",
        "x plain",
        "predicted",
        "x transformers' own",
        "mean acceptance length",
        "same text",
    )
    return table([{name: group, **{key: run[key] for key in shown}} for group, runs in groups for run in runs])


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table of records with the same keys."""
    records = list(lines)
    rows = [
        [name.strip() for name in records[0]],
        ["---"] * len(records[0]),
        *([_cell(value) for value in line.values()] for line in records),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


_PARTS: dict[str, Callable[[Any], list[str]]] = {
    "prompts": _prompts,
    "methods": _methods,
    "embedded": _embedded,
    "rows": lambda found: [
        "## Rows of a batch",
        "The same prompts one by one, and as rows decoded together.",
        table(found),
    ],
    "contexts": lambda found: [
        "## Long contexts",
        "One step; the model's attention kernel apart, and again with an attention that reads no keys.",
        table(found),
    ],
    "first token": lambda found: [
        "## First token",
        "Seconds to it, over those of transformers' plain decoding.",
        table([found]),
    ],
    "own share": lambda found: [
        "## Own share",
        "Time outside the models' forwards, transformers' preparations in `generate()` included.",
        table(found),
    ],
}
