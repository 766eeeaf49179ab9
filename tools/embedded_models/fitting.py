"""Fitting a model: losses, optimisers, the loop with its log, and saving."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tools.embedded_models.data import EDITS
from tools.embedded_models.tokenizers import Batch, batches, texts

LOG_EVERY = 100

TOKENS = 1024
"""Tokens in a batch."""


def cross_entropy(logits: Tensor, batch: Batch, ahead: int = 1) -> Tensor:
    """Weighted mean loss of `logits[:, t]` as a guess of the token at `t + ahead`."""
    targets, weights = batch.ids[:, ahead:], batch.weights[:, ahead:]
    losses = functional.cross_entropy(logits[:, : targets.shape[1]].transpose(1, 2), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def divergence(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean KL divergence of the distribution of `logits` from the teacher's."""
    losses = functional.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True)
    return (losses.sum(-1) * weights).sum() / weights.sum()


def agreement(logits: Tensor, teacher: Tensor, weights: Tensor) -> float:
    """Share of answer tokens on which both would choose the same token."""
    answers = weights == 1
    return float((logits.argmax(-1) == teacher.argmax(-1))[answers].float().mean())


def fit(
    name: str,
    parameters: list[tuple[str, torch.nn.Parameter]],
    data: Iterator[Batch],
    loss: Callable[[Batch, int], tuple[Tensor, dict[str, float]]],
    steps: int,
    rate: float = 8e-3,
    done: int = 0,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Run `steps` steps of Muon (matrices inside the layers) and AdamW (the rest); returns the log.

    `done` is the number of steps done before, in an earlier part of the training.
    """
    inner = [p for n, p in parameters if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    matrices = {id(p) for p in inner}
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [p for _, p in parameters if id(p) not in matrices], lr=rate, betas=(0.9, 0.98), weight_decay=0.0
        )
    ]
    if inner:
        optimisers.append(torch.optim.Muon(inner, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, rate, total_steps=steps, pct_start=0.1, cycle_momentum=False)
        for o in optimisers
    ]
    log: list[dict[str, float]] = []
    sums: dict[str, float] = {}
    start, tokens = time.perf_counter(), 0
    for step in range(1, steps + 1):
        batch = next(data)
        value, parts = loss(batch, done + step)
        for optimiser in optimisers:
            optimiser.zero_grad()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_([p for _, p in parameters], 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        tokens += int(batch.mask.sum())
        for key, part in parts.items():
            sums[key] = sums.get(key, 0.0) + part
        if step % LOG_EVERY == 0 or step == steps:
            count = LOG_EVERY if step % LOG_EVERY == 0 else step % LOG_EVERY
            entry = {"step": done + step, **{key: round(part / count, 4) for key, part in sums.items()}}
            log.append(entry)
            seconds = time.perf_counter() - start
            say(f"{name}: {entry} {seconds:.0f} s, {tokens / seconds:.0f} tokens/s")
            sums = {}
    return {"steps": steps, "tokens": tokens, "seconds": round(time.perf_counter() - start), "log": log}


def in_two_parts(
    name: str,
    parameters: list[tuple[str, torch.nn.Parameter]],
    tokenizer: Any,
    seed: int,
    loss: Callable[[Batch, int], tuple[Tensor, dict[str, float]]],
    steps: Sequence[int],
) -> dict[str, Any]:
    """The first steps on the usual texts, the others at a lower rate on texts with more edits; the log of both."""
    first, second = steps
    log = fit(name, parameters, batches(tokenizer, seed, TOKENS), loss, first)
    round_off(p for _, p in parameters)
    edits = batches(tokenizer, 100 + seed, TOKENS, texts(100 + seed, EDITS))
    more = fit(name, parameters, edits, loss, second, rate=5e-3, done=first)
    return {key: log[key] + more[key] for key in log}


def round_off(tensors: Iterable[Tensor]) -> None:
    """Round to what float16 can hold, in place."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.copy_(tensor.half().float())


def save(model: Any, tokenizer: Any, path: Path) -> None:
    """Round the weights to float16, in place, and save: half the size, and float32 loads exactly these weights."""
    round_off([*model.parameters(), *model.buffers()])
    model.eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = None
    model.save_pretrained(path)
    file = path / "model.safetensors"
    save_half(load_file(file), file)
    tokenizer.save_pretrained(path)
    set_config(path / "config.json", dtype="float32")
    set_config(path / "tokenizer_config.json", is_local=None, local_files_only=None)


def save_half(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors as float16 (numbers of other kinds as they are)."""
    halved = {k: (v.half() if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    save_file(halved, file, metadata={"format": "pt"})
    file.chmod(0o644)


def set_config(file: Path, **values: Any) -> None:
    """Change entries of a saved JSON file; None removes."""
    config = json.loads(file.read_text(encoding="utf-8")) | values
    config = {key: value for key, value in config.items() if not (key in values and value is None)}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
