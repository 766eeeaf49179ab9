"""Compare methods fairly: the same prompts, runs interleaved and repeated, plain decoding always among them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specnb.options import Method
from specnb.text import prompt_inputs
from specnb.trace import GenerationResult

_WARM_UP = 8  # tokens generated first, so that no run pays for what happens only once
HEADERS = ("run", "acceptance rate", "mean acceptance length", "target passes", "same text as plain")
SPEED_HEADERS = ("tokens/s", "from", "to", "speed-up")


@dataclass(frozen=True)
class Run:
    """One run's figures over all prompts; a value per repeat for speeds, medians over the repeats for costs.

    `speed_ups` are this run's speeds over plain decoding's of the same repeat. `draft_cost` is seconds per drafted token,
    `pass_cost` seconds per target pass, prompt processing aside. `same_text` says whether all texts are plain decoding's;
    None when sampling, where they need not be. Acceptance is None where nothing was drafted.
    """

    label: str
    options: Mapping[str, Any]
    tokens_per_second: tuple[float, ...]
    speed_ups: tuple[float, ...]
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_pass: float
    target_passes: int
    same_text: bool | None
    lossy: bool
    draft_cost: float
    pass_cost: float

    @property
    def median(self) -> float:
        """Median of the tokens per second."""
        return statistics.median(self.tokens_per_second)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest repeat, in tokens per second."""
        return min(self.tokens_per_second), max(self.tokens_per_second)

    @property
    def speed_up(self) -> float:
        """Median of the speed-ups over plain decoding."""
        return statistics.median(self.speed_ups)


@dataclass
class Comparison:
    """What `compare` found: a `Run` each, plain decoding first, and what they were measured on.

    `results` holds each run's results of the last repeat, one per prompt, by label.
    """

    rows: list[Run]
    prompts: int
    repeats: int
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, list[GenerationResult]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> Run:
        """The run with the highest median speed."""
        return max(self.rows, key=lambda row: row.median)

    @property
    def swept(self) -> str | None:
        """The option of which the runs are several values of, when they differ in nothing else."""
        runs = [row.options for row in self.rows if row.options.get("method") != "plain"]
        names = {name for run in runs for name in run}
        varying = [name for name in names if len({repr(run.get(name)) for run in runs}) > 1]
        numeric = len(varying) == 1 and all(isinstance(run.get(varying[0]), (int, float)) for run in runs)
        return varying[0] if numeric else None

    @property
    def verdict(self) -> str:
        """In a sentence: which run is best, and whether the measurements can tell."""
        best, where = self.best, "this prompt" if self.prompts == 1 else "these prompts"
        if best is self.rows[0]:
            return f"Plain decoding is fastest for {where}: no method pays off here."
        gain = f"{best.label}, {best.speed_up:.2f} times plain decoding"
        if self.repeats > 1 and min(best.speed_ups) <= 1:
            return f"No clear winner for {where}: {gain} in the median, but slower than it in some repeat."
        note = " (lossy: it changes what the target would write)" if best.lossy else ""
        once = " One run each: times vary from run to run." if self.repeats == 1 else ""
        return f"Best for {where}: {gain}{note}.{once}"

    def table(self, times: bool = True) -> tuple[list[list[object]], tuple[str, ...]]:
        """Rows and headers for a table; without `times` only what is the same on every machine."""
        lines: list[list[object]] = []
        for row in self.rows:
            rate = None if row.draft_acceptance_rate is None else f"{row.draft_acceptance_rate:.1%}"
            speed = [f"{v:.1f}" for v in (row.median, *row.spread)] + [f"{row.speed_up:.2f}x"]
            counted = [rate, row.mean_acceptance_length, row.target_passes, row.same_text]
            lines.append([row.label, *(speed if times else ()), *counted])
        return lines, (HEADERS[0], *(SPEED_HEADERS if times else ()), *HEADERS[1:])

    def text(self) -> str:
        """The table in plain text, with times, and the verdict."""
        from specnb.views.text import table

        return f"{table(*self.table())}\n{self.verdict}"

    def to_json(self, **dumps: Any) -> str:
        """Figures, options and environment as JSON (without `results`)."""
        data = {"rows": [asdict(row) for row in self.rows], "prompts": self.prompts, "repeats": self.repeats,
                "options": self.options, "environment": self.environment}  # fmt: skip
        return json.dumps({"format": "specnb.Comparison/1", **data}, default=str, **dumps)

    def to_pandas(self) -> Any:
        """A DataFrame with one line per run and repeat. Needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame([
            {**asdict(row), "repeat": i, "tokens_per_second": speed, "speed_ups": row.speed_ups[i]}
            for row in self.rows for i, speed in enumerate(row.tokens_per_second)
        ]).rename(columns={"speed_ups": "speed_up"})  # fmt: skip

    def plot(self) -> Any:
        """A matplotlib Figure: speed against the option's values where one was varied, else a bar for each run."""
        from specnb.views import plots

        return plots.by_option(self) if self.swept else plots.comparison_bars(self)

    def __str__(self) -> str:
        from specnb.views.text import table

        return table(*self.table(times=False))

    def __repr__(self) -> str:
        return f"Comparison({len(self.rows)} runs, {self.prompts} prompts, {self.repeats} repeats)"

    def _repr_html_(self) -> str:
        from specnb.views.html import comparison_view

        return comparison_view(*self.table(), self.verdict, self.rows.index(self.best))


def compare(
    pair_or_model: Any,
    prompts: str | Iterable[Any],
    runs: Iterable[Method | str | Mapping[str, Any]],
    *,
    repeats: int = 3,
    warmup: int = 1,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    system: str | None = None,
    cancel: threading.Event | None = None,
    on_run: Callable[[int, int, str], object] | None = None,
    **options: Any,
) -> Comparison:
    """Generate from the same prompts in several ways and compare speed, acceptance and texts.

    The runs take turns, a different one first in each repeat, so that a machine that slows down slows all of them.

    Args:
        pair_or_model: a `Pair` from `specnb.load`, or a target (then give `tokenizer=` for texts).
        prompts: a text or several; token ids `[1, length]` may stand for a text.
        runs: what to compare, each a method's name, a `Method`, or a dict of `generate`'s arguments ("method" among them).
            Plain decoding is put in front if it is not there.
        repeats: how often every run is timed.
        warmup: short runs of each before the clock counts.
        max_new_tokens: tokens per prompt.
        chat, system: as in `text.prompt_inputs`, for prompts that are texts.
        cancel: when set, ends before the next token step; repeats that are complete are kept.
        on_run: called before every run with the number of runs done, of all runs, and the label.
        options: further arguments of `generate` for all runs.

    Raises:
        ValueError: as `generate`; before the measurement, since every run is warmed up first.
    """
    import specnb

    tokenizer = options.get("tokenizer") or getattr(pair_or_model, "tokenizer", None)
    target = getattr(pair_or_model, "target", pair_or_model)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or repeats < 1:
        raise ValueError("compare() needs at least one prompt and one repeat.")
    device = getattr(target, "device", None)
    inputs = [prompt_inputs(tokenizer, one, chat=chat, system=system, device=device) if isinstance(one, str)
              else {"inputs": one} for one in texts]  # fmt: skip
    arms = labelled(runs)
    common = {**options, "cancel": cancel}

    def once(arm: Mapping[str, Any], tokens: int) -> list[GenerationResult]:
        given = {**common, "max_new_tokens": tokens, **arm}
        return [specnb.generate(pair_or_model, **one, **given) for one in inputs]

    total, done = len(arms) * (repeats + bool(warmup)), 0
    rounds: list[dict[str, list[GenerationResult]]] = []
    for repeat in range(-1 if warmup else 0, repeats):
        shift = max(0, repeat) % len(arms)
        order = [*list(arms.items())[shift:], *list(arms.items())[:shift]]
        found: dict[str, list[GenerationResult]] = {}
        for label, arm in order:
            if on_run is not None:
                on_run(done, total, label)
            for _ in range(warmup if repeat < 0 else 1):
                found[label] = once(arm, min(_WARM_UP, max_new_tokens) if repeat < 0 else max_new_tokens)
            done += 1
        if cancel is not None and cancel.is_set():
            break
        if repeat >= 0:
            rounds.append(found)
    shown = {name: value for name, value in options.items() if isinstance(value, (int, float, str, list, tuple))}
    return Comparison(
        [_figures(label, arm, rounds) for label, arm in arms.items()] if rounds else [],
        len(texts), len(rounds), {"max_new_tokens": max_new_tokens, **shown}, environment(pair_or_model),
        rounds[-1] if rounds else {},
    )  # fmt: skip


def labelled(runs: Iterable[Method | str | Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs as arguments of `generate` under short labels that tell them apart, plain decoding first."""
    arms: list[dict[str, Any]] = []
    for run in runs:
        if isinstance(run, Method):
            arms.append({"method": run.name, **run.given})
        else:
            arms.append({"method": run} if isinstance(run, str) else dict(run))
    arms = [arm for arm in arms if arm.get("method") != "plain"]
    shared = {"method"}  # and what all have alike, which tells nothing
    if len(arms) > 1:
        shared |= {name for name, value in arms[0].items() if all(name in a and a[name] == value for a in arms)}
    labels: dict[str, dict[str, Any]] = {"plain": {"method": "plain"}}
    for arm in arms:
        told = [f"{name}={value}" for name, value in arm.items() if name not in shared]
        labels[", ".join([str(arm.get("method", "default")), *told])] = arm
    return labels


def _figures(label: str, arm: Mapping[str, Any], rounds: Sequence[Mapping[str, list[GenerationResult]]]) -> Run:
    speeds = {name: tuple(_speed(found[name]) for found in rounds) for name in (label, "plain")}
    last, plain = rounds[-1][label], rounds[-1]["plain"]
    steps = [step for result in last for step in result.steps]
    drafted, accepted = sum(len(s.drafted) for s in steps), sum(s.accepted for s in steps)
    drafting = sum(bool(s.drafted) for s in steps)
    greedy = all(result.seed is None for result in plain)
    return Run(
        label, dict(arm), speeds[label],
        tuple(own / other if other else 0.0 for own, other in zip(speeds[label], speeds["plain"], strict=True)),
        accepted / drafted if drafted else None, 1 + accepted / drafting if drafting else None,
        sum(result.num_emitted_tokens for result in last) / max(1, len(steps)),
        sum(result.target_passes or len(result.steps) for result in last),
        all(a.ids == b.ids for a, b in zip(last, plain, strict=True)) if greedy else None,
        any(result.lossy for result in last),
        statistics.median(_draft_cost(found[label]) for found in rounds),
        statistics.median(_pass_cost(found[label]) for found in rounds),
    )  # fmt: skip


def _speed(results: Sequence[GenerationResult]) -> float:
    seconds = sum(result.seconds for result in results)
    return sum(result.num_emitted_tokens for result in results) / seconds if seconds else 0.0


def _draft_cost(results: Sequence[GenerationResult]) -> float:
    return sum(r.draft_seconds for r in results) / max(1, sum(r.num_draft_tokens for r in results))


def _pass_cost(results: Sequence[GenerationResult]) -> float:
    steps = [step for result in results for step in result.steps[1:]]
    return sum(step.verify_seconds + step.other_seconds for step in steps) / max(1, len(steps))


def environment(pair_or_model: Any) -> dict[str, Any]:
    """What a speed depends on: model, machine, threads, versions, and the date."""
    from datetime import UTC, datetime

    import torch
    import transformers

    import specnb

    target = getattr(pair_or_model, "target", pair_or_model)
    device = str(getattr(target, "device", "cpu"))
    return {
        "model": getattr(pair_or_model, "name", "") or type(target).__name__,
        "dtype": str(getattr(target, "dtype", "")).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specnb": specnb.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
