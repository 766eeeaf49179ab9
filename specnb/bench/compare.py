"""`compare`: generate from the same prompts with several methods, in turns."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from specnb.bench.comparison import Comparison
from specnb.bench.measured_run import Round, measured_run
from specnb.bench.reference import Reference
from specnb.options import BENCH_REPEATS, COMPARE_MAX_NEW_TOKENS, WARM_UP_TOKENS, Method
from specnb.text import prompt_inputs


def compare(
    pair_or_model: Any,
    prompts: str | Iterable[Any],
    runs: str | Method | Mapping[str, Any] | Iterable[Method | str | Mapping[str, Any]],
    *,
    repeats: int = BENCH_REPEATS,
    warmup: int = 1,
    max_new_tokens: int = COMPARE_MAX_NEW_TOKENS,
    chat: bool | None = None,
    system: str | None = None,
    transformers: bool | Collection[str] = False,
    cancel: threading.Event | None = None,
    on_run: Callable[[int, int, str], object] | None = None,
    **options: Any,
) -> Comparison:
    """Generate from the same prompts with several methods or options, and compare speed, acceptance and texts.

    The runs take turns, and each repeat begins with another run, so that a machine that slows down slows all of them.

    Args:
        pair_or_model: a `Pair` from `specnb.load`, or a target. With a target, texts need `tokenizer=`.
        prompts: one prompt or several: texts, token ids `[1, length]`, or lists of texts, which become one batch.
        runs: what to compare: names of methods, `Method` objects, or dicts of arguments of `generate` with "method".
            Plain decoding is added as the first run.
        repeats: how often every run is timed.
        warmup: number of short untimed runs of each.
        max_new_tokens: most tokens to generate per prompt.
        chat: whether texts are sent as chat messages, as in `specnb.text.prompt_inputs`.
        system: the system message, as in `specnb.text.prompt_inputs`.
        transformers: also run transformers' own implementation, right after specnb's: True for all runs, or the labels
            of some (`label_runs`).
        cancel: set this event to end the comparison within one step. Complete repeats are kept.
        on_run: called before every run with the number of runs done, the number of all runs, and the label.
        options: further arguments of `generate`, for all runs.

    Returns:
        The comparison of the complete repeats.

    Raises:
        ValueError: a prompt or a run is not valid. Every run is warmed up first, so this is raised before anything is
            measured.
        KeyboardInterrupt: the user interrupted. `.partial_result` is the comparison of the complete repeats, or None.
    """
    import specnb
    from specnb.call.inputs import encode, unwrap_model

    unwrap_model("pair_or_model", pair_or_model)
    tokenizer = options.get("tokenizer") or getattr(pair_or_model, "tokenizer", None)
    target = getattr(pair_or_model, "target", pair_or_model)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or not isinstance(repeats, int) or repeats < 1 or warmup < 0:
        raise ValueError(
            f"compare() needs at least one prompt, repeats >= 1 and warmup >= 0, not {len(texts)}, {repeats!r} and "
            f"{warmup!r}."
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
    reference = Reference(pair_or_model, options) if transformers else None

    def wanted(label: str) -> bool:
        return transformers is True or label in (transformers or ())

    def run_once(label: str, tokens: int) -> Round:
        results, seconds = [], 0.0
        arguments = runs_by_label[label]
        for one in inputs:
            began = time.perf_counter()
            results.append(specnb.generate(pair_or_model, **one, **{**common, "max_new_tokens": tokens, **arguments}))
            seconds += time.perf_counter() - began
        own = reference.run(label, arguments, inputs, tokens) if reference and wanted(label) else None
        return Round(results, seconds, own)

    shown = {name: value for name, value in options.items() if isinstance(value, (int, float, str, list, tuple))}
    rounds: list[dict[str, Round]] = []

    def comparison() -> Comparison:
        failed = reference.failed if reference else {}
        measured = [measured_run(*run, rounds, failed) for run in runs_by_label.items()] if rounds else []
        return Comparison(
            rows=measured,
            prompts=len(texts),
            repeats=len(rounds),
            options={"max_new_tokens": max_new_tokens, **shown},
            environment=environment(pair_or_model),
            results={label: one.results for label, one in rounds[-1].items()} if rounds else {},
        )

    total, done = len(runs_by_label) * (repeats + bool(warmup)), 0
    try:
        for repeat in range(-1 if warmup else 0, repeats):
            shift = max(0, repeat) % len(runs_by_label)
            order = [*list(runs_by_label)[shift:], *list(runs_by_label)[:shift]]
            found: dict[str, Round] = {}
            for label in order:
                if on_run is not None:
                    on_run(done, total, label)
                for _ in range(warmup if repeat < 0 else 1):
                    found[label] = run_once(
                        label, min(WARM_UP_TOKENS, max_new_tokens) if repeat < 0 else max_new_tokens
                    )
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
    """The runs as arguments of `generate`, by label.

    Args:
        runs: as in `compare`.

    Returns:
        The arguments of each run under a short label with the method and the options in which the runs differ. Plain
        decoding is first.

    Raises:
        ValueError: a run is neither a name, nor a `Method`, nor a dict.
    """
    found: list[dict[str, Any]] = []
    for run in [runs] if isinstance(runs, (str, Method, Mapping)) else runs:
        if isinstance(run, Method):
            found.append({"method": run.name, **run.given})
        elif isinstance(run, (str, Mapping)):
            found.append({"method": run} if isinstance(run, str) else dict(run))
        else:
            raise ValueError(f"a run is a method's name, a Method or a dict of generate()'s arguments, not {run!r}.")
    found = [arguments for arguments in found if arguments != {"method": "plain"}]
    shared = {"method"}  # options that all runs share are not part of a label
    if len(found) > 1:
        shared |= {name for name, value in found[0].items() if all(name in a and a[name] == value for a in found)}
    labels: dict[str, dict[str, Any]] = {"plain": {"method": "plain"}}
    for arguments in found:
        shown = [f"{name}={_short(value)}" for name, value in arguments.items() if name not in shared]
        label = ", ".join([str(arguments.get("method", "default")), *shown])
        labels[label if label not in labels else f"{label} ({len(labels)})"] = arguments
    return labels


def _short(value: Any) -> str:
    """A value in a label. A model is shown by its name, or by its class if it has none."""
    if isinstance(value, (int, float, str)):
        return str(value)
    name = getattr(getattr(value, "config", None), "name_or_path", "") or getattr(value, "name_or_path", "")
    return os.path.basename(str(name)) if os.path.isabs(str(name)) else str(name) or type(value).__name__


def left_padded_batch(prompts: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Encoded prompts as one left-padded batch.

    Args:
        prompts: dicts with "input_ids" `[1, length]`.
        tokenizer: gives the id to pad with; 0 if it has none.

    Returns:
        "input_ids" and "attention_mask", both `[rows, longest length]`.
    """
    import torch

    rows = [prompt["input_ids"][0] for prompt in prompts]
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def environment(pair_or_model: Any) -> dict[str, Any]:
    """What speeds depend on: model, dtype, device, machine, threads and versions; and the date in UTC."""
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
