"""Types of the options of `train_drafter`. Written by `python -m tools.option_types`: do not edit."""

from __future__ import annotations

from typing import TypedDict


class TrainingOptions(TypedDict, total=False):
    """The options of `specnb.train_drafter`, as in `specnb.options`."""

    minutes: float | None
    steps: int | None
    seed: int | None
    num_hidden_layers: int | None
    draft_vocab_size: int | None
    ttt_steps: int | None
    learning_rate: float | None
    batch_size: int | None
    rows: int | None
    max_new_tokens: int | None
    max_length: int | None
    sampled_share: float | None
    memory_gb: float | None
