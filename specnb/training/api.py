"""`train_drafter`: a drafter for a target, from its own answers, within a promised time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specnb.training.arguments import as_texts, check_settings, split
from specnb.training.result import Progress, TrainingResult
from specnb.training.run import Run

if TYPE_CHECKING:
    from specnb.models import Pair


def train_drafter(
    pair: Pair,
    prompts: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    *,
    out: str | os.PathLike[str],
    minutes: float = 15.0,
    steps: int | None = None,
    held_out: Sequence[str] | None = None,
    resume: bool = False,
    chat: bool | None = None,
    seed: int = 0,
    num_hidden_layers: int = 1,
    draft_vocab_size: int = 4096,
    ttt_steps: int = 3,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    rows: int = 16,
    max_new_tokens: int = 192,
    max_length: int = 512,
    sampled_share: float = 0.5,
    memory_gb: float | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> TrainingResult:
    """Train an EAGLE-3 drafter for a target, from the target's own answers to prompts, or from texts.

    The target answers the prompts in rows, part of them greedily and part sampled. Its states at three layers are kept,
    and a drafter of one layer learns to predict its next tokens from them, `ttt_steps` tokens ahead (training-time
    test of EAGLE-3, Li et al. 2503.01840). The drafter is written in the speculators format. The target is only read.

    Args:
        pair: a target with its tokenizer, from `specnb.load`.
        prompts: what the target is to answer; as many and as much like the later prompts as possible.
        texts: texts to learn from as they are, instead of prompts or in addition to them.
        out: folder of the drafter. `specnb.load(TARGET, out)` and vLLM read it.
        minutes: for all of it, measuring included.
        steps: number of optimizer steps instead of minutes. All prompts are answered then, and the same data and seed
            give the same drafter.
        held_out: prompts (or, with `texts` alone, texts) to measure with. None takes a tenth of those given, at most
            40.
        resume: go on with what is in `out`: answers, weights and optimizer are read from there.
        chat: whether prompts are sent as chat messages; None if the tokenizer has a chat template.
        seed: of everything that is random.
        num_hidden_layers: layers of the drafter.
        draft_vocab_size: most tokens that the drafter can propose: those that are most frequent in the answers.
        ttt_steps: number of tokens that are unrolled in training.
        learning_rate: the highest; it falls along a cosine.
        batch_size: texts per optimizer step.
        rows: prompts that are answered together.
        max_new_tokens: most tokens of an answer.
        max_length: most tokens of a text; longer texts are cut into pieces.
        sampled_share: share of the answers that is sampled, at temperature 0.6.
        memory_gb: memory for the target's states, in gigabytes; more of them go to a file in `out`. None takes a
            quarter of the memory that is free.
        on_progress: called with each `Progress`; None prints the messages.

    Returns:
        The result: what is accepted on held-out texts, the measured speed, and the pair with its drafter.

    Raises:
        ValueError: an argument is not valid, there are too few prompts, `out` holds something else, held-out texts have
            tokens that the others do not have, or the loss is not a number any more.
        OSError: the disk is full.
        KeyboardInterrupt: with the result so far as `.partial_result`; the best drafter so far is in `out`.
    """
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("pair", "prompts", "texts", "out", "held_out", "resume", "on_progress")
    }
    check_settings(settings)
    asked, given = as_texts("prompts", prompts), as_texts("texts", texts)
    testing, asked, given = split(asked, given, held_out, seed)
    run = Run(pair, Path(out), settings, on_progress or (lambda progress: print(progress.message, flush=True)))
    return run.train(asked, given, testing, resume)
