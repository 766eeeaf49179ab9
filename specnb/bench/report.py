"""The measurements of the built-in suite as a Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def markdown(found: Mapping[str, Any], command: str) -> str:
    """The page with all sections that were measured.

    Args:
        found: what `suite.run` returned.
        command: the command that repeats the measurement.
    """
    on, size = found["environment"], found["size"]
    parts = [
        f"# Measurements, {on['date'][:10]}",
        f"`{command}`: {on['model']}, {on['dtype']}, {on['machine']}, "
        f"{on['threads']} thread{'s' * (on['threads'] > 1)}, torch {on['torch']}, transformers {on['transformers']}, "
        f"specnb {on['specnb']}, Python {on['python']}. {size['new']} new tokens, greedy, runs taking turns, "
        f"medians of {size['repeats']} repeats.",
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
        "Default settings (adaptive draft length), compared with specnb's own plain decoding, with the fixed draft "
        "length that proved best for the prompt, and with transformers' prompt lookup."
    )
    return ["## Prompt lookup on a real model", note, _table(lines), *_hindsight(found)]


def _hindsight(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The speed of every run as a share of the best fixed draft length's, per prompt."""
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
    note = (
        "The best fixed length differs from prompt to prompt and is only known afterwards. The speed of each run, "
        "compared with it:"
    )
    return [note, _table(lines)]


def _embedded(found: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [" + ".join(filter(None, (one["target"], one["assistant"]))) for one in found]
    groups = [(name, one["runs"]) for name, one in zip(names, found, strict=True)]
    note = "Tiny models: most of the time is Python around the kernels."
    left_out = [
        f"{name}: left out. {one['left out']}" for name, one in zip(names, found, strict=True) if "left out" in one
    ]
    return ["## Every method on the embedded pairs", note, _runs(groups, "pair"), *left_out]


def _methods(found: Sequence[Mapping[str, Any]]) -> list[str]:
    note = "The first layers were not trained to draft, so few drafts are accepted: this compares the methods' costs."
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
    return _table([{name: group, **{key: run[key] for key in shown}} for group, runs in groups for run in runs])


def _table(records: Iterable[Mapping[str, Any]]) -> str:
    from specnb.views.table import Table

    return Table.from_records(records).to_markdown()


_PARTS: dict[str, Callable[[Any], list[str]]] = {
    "prompts": _prompts,
    "methods": _methods,
    "embedded": _embedded,
    "rows": lambda found: [
        "## Rows of a batch",
        "The same prompts one by one, and as rows decoded together.",
        _table(found),
    ],
    "contexts": lambda found: [
        "## Long contexts",
        "Milliseconds of one step: the whole, without the attention kernel, the same with an attention that reads no "
        "keys, and without the model.",
        _table(found),
    ],
    "first token": lambda found: [
        "## First token",
        "Seconds to the first token, divided by those of transformers' plain decoding.",
        _table([found]),
    ],
    "own share": lambda found: [
        "## Own share",
        "Time outside the models' forward passes, which includes the preparations of transformers' `generate()`.",
        _table(found),
    ],
}
