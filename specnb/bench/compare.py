"""Running a comparison."""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specnb.bench.comparison import Comparison, Run
from specnb.bench.reference import Reference
from specnb.options import Method
from specnb.text import prompt_inputs
from specnb.trace import GenerationResult, Step

_WARM_UP = 8  # tokens generated first, so that no run pays for what happens only once


def compare(
    pair_or_model: Any,
    prompts: str | Iterable[Any],
    runs: str | Method | Mapping[str, Any] | Iterable[Method | str | Mapping[str, Any]],
    *,
    repeats: int = 3,
    warmup: int = 1,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    system: str | None = None,
    transformers: bool | Collection[str] = False,
    cancel: threading.Event | None = None,
    on_run: Callable[[int, int, str], object] | None = None,
    **options: Any,
) -> Comparison:
    """Generate from the same prompts in several ways and compare speed, acceptance and texts.

    The runs take turns, a different one first in each repeat, so that a machine that slows down slows all of them.

    Args:
        pair_or_model: a `Pair` from `specnb.load`, or a target (then give `tokenizer=` for texts).
        prompts: a text or several; token ids `[1, length]` may stand for a text, a list of texts for rows of one batch.
        runs: what to compare, each a method's name, a `Method`, or a dict of `generate`'s arguments ("method" among them).
            Plain decoding is put in front if it is not there.
        repeats: how often every run is timed.
        warmup: short runs of each before the clock counts.
        max_new_tokens: tokens per prompt.
        chat, system: as in `text.prompt_inputs`, for prompts that are texts.
        transformers: run transformers' own implementation too, right after specnb's: of every run, or of those with these labels.
        cancel: when set, ends before the next token step; repeats that are complete are kept.
        on_run: called before every run with the number of runs done, of all runs, and the label.
        options: further arguments of `generate` for all runs.

    Raises:
        ValueError: as `generate`; before the measurement, since every run is warmed up first.
        KeyboardInterrupt: as raised, with the comparison of the complete rounds as `.partial_result` (None if there is none).
    """
    import specnb
    from specnb.call.inputs import encode, unwrapped

    unwrapped("pair_or_model", pair_or_model)
    tokenizer = options.get("tokenizer") or getattr(pair_or_model, "tokenizer", None)
    target = getattr(pair_or_model, "target", pair_or_model)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or not isinstance(repeats, int) or repeats < 1 or warmup < 0:
        raise ValueError(
            f"compare() needs at least one prompt, repeats >= 1 and warmup >= 0, not {len(texts)}, {repeats!r} and {warmup!r}."
        )
    for number, one in enumerate(texts, 1):
        if isinstance(one, str) and not one.strip():
            raise ValueError(f"prompt {number} of {len(texts)} is empty: give some text.")
    device = getattr(target, "device", None)

    def encoded(one: Any) -> dict[str, Any]:
        if isinstance(one, (list, tuple)):
            return left_padded_batch([encoded(text) for text in one], tokenizer)
        if not isinstance(one, str):
            return {"inputs": one}
        given = prompt_inputs(tokenizer, one, chat=chat, system=system, device=device)
        return encode(target, given.pop("inputs", None), given, tokenizer)

    inputs = [encoded(one) for one in texts]
    runs_by_label = label_runs(runs)
    if isinstance(transformers, str) or (
        not isinstance(transformers, bool) and not set(transformers) <= set(runs_by_label)
    ):
        raise ValueError(
            f"transformers={transformers!r} must be True, False, or labels of runs: {', '.join(runs_by_label)}."
        )
    common = {**options, "cancel": cancel}
    theirs = Reference(pair_or_model, options) if transformers else None

    def wanted(label: str) -> bool:
        return transformers is True or label in (transformers or ())

    def run_once(label: str, tokens: int) -> _Round:
        results, seconds = [], 0.0
        for one in inputs:
            began = time.perf_counter()
            results.append(
                specnb.generate(pair_or_model, **one, **{**common, "max_new_tokens": tokens, **runs_by_label[label]})
            )
            seconds += time.perf_counter() - began
        own = theirs.run(label, runs_by_label[label], inputs, tokens) if theirs and wanted(label) else None
        return _Round(results, seconds, own)

    shown = {name: value for name, value in options.items() if isinstance(value, (int, float, str, list, tuple))}
    rounds: list[dict[str, _Round]] = []

    def comparison() -> Comparison:
        return Comparison(
            [_measured_run(label, arguments, rounds, theirs) for label, arguments in runs_by_label.items()]
            if rounds
            else [],
            len(texts),
            len(rounds),
            {"max_new_tokens": max_new_tokens, **shown},
            environment(pair_or_model),
            {label: one.results for label, one in rounds[-1].items()} if rounds else {},
        )

    total, done = len(runs_by_label) * (repeats + bool(warmup)), 0
    try:
        for repeat in range(-1 if warmup else 0, repeats):
            shift = max(0, repeat) % len(runs_by_label)
            order = [*list(runs_by_label)[shift:], *list(runs_by_label)[:shift]]
            found: dict[str, _Round] = {}
            for label in order:
                if on_run is not None:
                    on_run(done, total, label)
                for _ in range(warmup if repeat < 0 else 1):
                    found[label] = run_once(label, min(_WARM_UP, max_new_tokens) if repeat < 0 else max_new_tokens)
                done += 1
            if cancel is not None and cancel.is_set():
                break
            if repeat >= 0:
                rounds.append(found)
    except KeyboardInterrupt as interrupt:
        interrupt.partial_result = comparison() if rounds else None  # type: ignore[attr-defined]
        raise
    return comparison()


def label_runs(
    runs: str | Method | Mapping[str, Any] | Iterable[Method | str | Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The runs as arguments of `generate` under short labels that tell them apart, plain decoding first."""
    runs_by_label: list[dict[str, Any]] = []
    for run in [runs] if isinstance(runs, (str, Method, Mapping)) else runs:
        if isinstance(run, Method):
            runs_by_label.append({"method": run.name, **run.given})
        elif isinstance(run, (str, Mapping)):
            runs_by_label.append({"method": run} if isinstance(run, str) else dict(run))
        else:
            raise ValueError(f"a run is a method's name, a Method or a dict of generate()'s arguments, not {run!r}.")
    runs_by_label = [arguments for arguments in runs_by_label if arguments != {"method": "plain"}]
    shared = {"method"}  # and what all have alike, which tells nothing
    if len(runs_by_label) > 1:
        shared |= {
            name
            for name, value in runs_by_label[0].items()
            if all(name in a and a[name] == value for a in runs_by_label)
        }
    labels: dict[str, dict[str, Any]] = {"plain": {"method": "plain"}}
    for arguments in runs_by_label:
        told = [f"{name}={_short(value)}" for name, value in arguments.items() if name not in shared]
        label = ", ".join([str(arguments.get("method", "default")), *told])
        labels[label if label not in labels else f"{label} ({len(labels)})"] = arguments
    return labels


def _short(value: Any) -> str:
    """A value in a label; of a model its name, or its class."""
    if isinstance(value, (int, float, str)):
        return str(value)
    name = getattr(getattr(value, "config", None), "name_or_path", "") or getattr(value, "name_or_path", "")
    return os.path.basename(str(name)) if os.path.isabs(str(name)) else str(name) or type(value).__name__


def left_padded_batch(prompts: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Encoded prompts as the rows of one left-padded batch."""
    import torch

    rows = [prompt["input_ids"][0] for prompt in prompts]
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@dataclass
class _Round:
    """One run of an arguments over all prompts: results, seconds of the calls, and transformers' ids and seconds."""

    results: list[GenerationResult]
    seconds: float
    theirs: tuple[list[list[int]], float] | None

    @property
    def speed(self) -> float:
        return sum(result.num_emitted_tokens for result in self.results) / self.seconds

    @property
    def their_speed(self) -> float | None:
        return None if self.theirs is None else sum(map(len, self.theirs[0])) / self.theirs[1]

    @property
    def parts(self) -> tuple[float, float, float]:
        draft, verify = sum(r.draft_seconds for r in self.results), sum(r.verify_seconds for r in self.results)
        return draft, verify, max(0.0, self.seconds - draft - verify)

    @property
    def draft_cost(self) -> float:
        return sum(r.draft_seconds for r in self.results) / max(1, sum(r.num_draft_tokens for r in self.results))

    @property
    def pass_cost(self) -> float:
        steps = [step for result in self.results for step in result.steps if step is not result.rows[step.row].steps[0]]
        return sum(step.verify_seconds + step.other_seconds for step in steps) / max(1, len(steps))


def _measured_run(
    label: str, arguments: Mapping[str, Any], rounds: Sequence[Mapping[str, _Round]], theirs: Reference | None
) -> Run:
    speeds = {name: tuple(found[name].speed for found in rounds) for name in (label, "plain")}
    last, plain = rounds[-1][label], rounds[-1]["plain"]
    steps = [step for result in last.results for step in result.steps]
    drafted, accepted = sum(len(s.drafted) for s in steps), sum(s.accepted for s in steps)
    drafting = sum(bool(s.drafted) for s in steps)
    greedy = all(result.seed is None for result in plain.results)
    draft_cost, pass_cost, plain_cost = (
        statistics.median(getattr(found[name], cost) for found in rounds)
        for name, cost in ((label, "draft_cost"), (label, "pass_cost"), ("plain", "pass_cost"))
    )
    own = [found[label].their_speed for found in rounds]
    return Run(
        label,
        dict(arguments),
        speeds[label],
        tuple(mine / other if other else 0.0 for mine, other in zip(speeds[label], speeds["plain"], strict=True)),
        accepted / drafted if drafted else None,
        1 + accepted / drafting if drafting else None,
        sum(result.num_emitted_tokens for result in last.results) / max(1, len(steps)),
        sum(result.target_passes or len(result.steps) for result in last.results),
        all(a.ids == b.ids for a, b in zip(_rows(last), _rows(plain), strict=True)) if greedy else None,
        any(result.lossy for result in last.results),
        draft_cost,
        pass_cost,
        tuple(statistics.median(values) for values in zip(*(found[label].parts for found in rounds), strict=True)),
        predicted(steps, draft_cost, pass_cost, plain_cost) if drafted else None,
        tuple(mine / other for mine, other in zip(speeds[label], own, strict=True) if other),
        theirs.failed.get(label, "") if theirs else "",
    )


def _rows(one: _Round) -> list[Any]:
    return [row for result in one.results for row in result.rows]


def predicted(steps: Sequence[Step], draft_cost: float, pass_cost: float, plain_cost: float) -> float:
    """The cost model's speed-up, see `Run`; steps without a draft yield one token for a pass."""
    drafting = [step for step in steps if step.drafted]
    k = sum(len(step.drafted) for step in drafting) / len(drafting)
    judged = sum(min(step.accepted + 1, len(step.drafted)) for step in drafting)
    a = min(1.0, sum(step.accepted for step in drafting) / max(1, judged))
    share = len(drafting) / len(steps)
    tokens = 1 + k if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    cost = pass_cost + share * k * draft_cost
    return (1 - share + share * tokens) * plain_cost / cost if cost else 0.0


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
