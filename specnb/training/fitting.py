"""The training loop: batches, optimizer, budget, evaluations; the best weights are kept."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specnb.training.result import Evaluation


class Objective(Protocol):
    """What is learned, for examples by their numbers."""

    @property
    def drafter(self) -> nn.Module:
        """What is trained."""
        ...

    def loss(self, numbers: Sequence[int]) -> Tensor:
        """The loss of a batch, a scalar with gradients."""
        ...

    def acceptance(self) -> tuple[float, ...]:
        """By position, the share of held-out tokens at which a greedy draft is right up to this position."""
        ...


class DivergedError(ValueError):
    """The loss is not a number any more."""


@dataclass
class Budget:
    """How long to train: until a time, or for a number of steps.

    Args:
        until: `time.monotonic()` at which training ends.
        steps: number of optimizer steps.
        cancel: set to stop as an interrupt does.
    """

    until: float | None = None
    steps: int | None = None
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def progress(self, step: int) -> float:
        """The share of the budget that is used up, 1 or more at its end."""
        if self.steps is not None:
            return step / self.steps
        assert self.until is not None
        return (time.monotonic() - self._began) / max(1e-9, self.until - self._began)

    def check(self) -> None:
        """Raise KeyboardInterrupt if the training is to stop."""
        if self.cancel is not None and self.cancel.is_set():
            raise KeyboardInterrupt

    def reserve(self, seconds: float) -> None:
        """Keep time for what comes after the last step."""
        if self.until is not None:
            self.until = max(self._began, self.until - seconds)


@dataclass
class Fitting:
    """The state of a training, which a checkpoint holds.

    Args:
        objective: what is learned.
        learning_rate: the highest; it falls along a cosine.
        batch_size: examples per step.
        examples: numbers of the training examples.
        lengths: tokens of each of them.
        seed: of the order of the examples.
        prepare: places the drafter and the optimizer (accelerate's `prepare`).
        backward: computes gradients (accelerate's `backward`).
    """

    objective: Objective
    learning_rate: float
    batch_size: int
    examples: Sequence[int]
    lengths: Sequence[int]
    seed: int
    prepare: Callable[..., Any]
    backward: Callable[[Tensor], object]

    WARM_UP, BETAS, WEIGHT_DECAY, CLIP = 20, (0.9, 0.95), 0.01, 1.0
    SORTED = 16  # batches that are sorted by length together
    EVALUATING = 0.15  # share of the time; with a budget of steps, there are as many as asked for

    def __post_init__(self) -> None:
        self.step = 0
        self.trained_seconds = 0.0
        self.history: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.best_weights: dict[str, Tensor] = {}
        optimizer = torch.optim.AdamW(
            (one for one in self.objective.drafter.parameters() if one.requires_grad),
            lr=self.learning_rate,
            betas=self.BETAS,
            weight_decay=self.WEIGHT_DECAY,
        )
        self.optimizer = self.prepare(optimizer)
        self._losses: list[float] = []
        self._evaluating = 0.0  # seconds
        self._epoch = -1
        self._batches: list[list[int]] = []

    def run(
        self, budget: Budget, evaluate_at: Sequence[float], on_evaluation: Callable[[Evaluation, float], object]
    ) -> None:
        """Train until the budget is used up.

        Args:
            evaluate_at: shares of the budget, in rising order, at which to evaluate.
            on_evaluation: called with each evaluation and the share of the budget.

        Raises:
            DivergedError: the loss is not a number; `best_weights` are those of the best evaluation so far.
        """
        began = time.monotonic() - self.trained_seconds
        marks = list(evaluate_at)
        if not self.history:
            self._evaluate(began, on_evaluation, 0.0)
            budget.reserve(self._evaluating)
        while (progress := budget.progress(self.step)) < 1:
            budget.check()
            rate = self.learning_rate * min(1, (self.step + 1) / self.WARM_UP)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * progress))
            loss = self.objective.loss(self._numbers())
            value = float(loss.detach())
            if not math.isfinite(value):
                raise DivergedError(
                    f"the loss became {value} at step {self.step} with learning_rate={self.learning_rate:g}: give a "
                    "smaller one. The best drafter so far was kept."
                )
            self.optimizer.zero_grad()
            self.backward(loss)
            nn.utils.clip_grad_norm_(self.objective.drafter.parameters(), self.CLIP)
            self.optimizer.step()
            self.step += 1
            self._losses.append(value)
            self.trained_seconds = time.monotonic() - began
            progress = budget.progress(self.step)
            if marks and progress >= marks[0] and (budget.steps is not None or self._evaluates_little(began)):
                self._evaluate(began, on_evaluation, progress)
                marks = [mark for mark in marks if mark > progress]
        if self.step != self.history[-1].step:
            self._evaluate(began, on_evaluation, 1.0)

    def _evaluate(self, began: float, on_evaluation: Callable[[Evaluation, float], object], progress: float) -> None:
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        start = time.monotonic()
        found = Evaluation(start - began, self.step, loss, self.objective.acceptance())
        self._evaluating += time.monotonic() - start
        self._losses.clear()
        self.history.append(found)
        if self.best is None or found.mean_acceptance_length > self.best.mean_acceptance_length:
            self.best = found
            self.best_weights = {
                name: value.detach().to("cpu", copy=True) for name, value in self.objective.drafter.state_dict().items()
            }
        on_evaluation(found, progress)

    def _evaluates_little(self, began: float) -> bool:
        """Whether little of the time so far went into evaluations; with few minutes there are fewer of them."""
        return self._evaluating <= self.EVALUATING * (time.monotonic() - began)

    def _numbers(self) -> list[int]:
        """The examples of the next batch: every epoch has an order of its own, which depends on the seed alone.

        The examples of a batch are of similar length, since those that are shorter than the longest are padded.
        """
        size = min(self.batch_size, len(self.examples))
        count = len(self.examples) // size
        epoch, batch = divmod(self.step, count)
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            drawn = torch.randperm(len(self.examples), generator=generator).tolist()[: count * size]
            pool = self.SORTED * size
            by_length = [
                i for j in range(0, len(drawn), pool) for i in sorted(drawn[j : j + pool], key=self.lengths.__getitem__)
            ]
            batches = [by_length[j * size : (j + 1) * size] for j in range(count)]
            self._batches = [batches[j] for j in torch.randperm(count, generator=generator).tolist()]
            self._epoch = epoch
        return [self.examples[i] for i in self._batches[batch]]


def make_accelerator() -> Any:
    """accelerate's Accelerator: mixed precision where a GPU has bfloat16, else float32."""
    from accelerate import Accelerator

    half = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return Accelerator(mixed_precision="bf16" if half else "no")
