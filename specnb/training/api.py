"""`train_drafter`: a drafter for a target, from its own answers, within a promised time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from specnb.training.arguments import as_folder, as_texts, check_settings, split
from specnb.training.option_types import TrainingOptions
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
    held_out: Sequence[str] | None = None,
    resume: bool = False,
    keep_states: bool = False,
    chat: bool | None = None,
    cancel: threading.Event | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    **options: Unpack[TrainingOptions],
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
        held_out: prompts (or, with `texts` alone, texts) to measure with. None takes a tenth of those given, at most
            40.
        resume: go on with what is in `out`: answers, weights and optimizer are read from there.
        keep_states: keep the target's states in `out` (several kB a token), so that `resume` does not collect them
            again.
        chat: whether prompts are sent as chat messages; None if the tokenizer has a chat template.
        cancel: set from another thread to stop; what was reached is returned, if there is anything yet.
        on_progress: called with each `Progress`; None prints the messages.
        options: `minutes` (15), for all of it, or `steps`, a number of optimizer steps, with which the same data and
            `seed` give the same drafter; `num_hidden_layers`, `draft_vocab_size` and `ttt_steps` of the drafter;
            `learning_rate`, `batch_size`; `rows`, `max_new_tokens` and `sampled_share` of the answers; `max_length`,
            `memory_gb`. `specnb.options.TRAINING_OPTIONS` has them all with defaults and bounds.

    Returns:
        The result: what is accepted on held-out texts, the measured speed, and the pair with its drafter.

    Raises:
        ValueError: an argument is not valid, there are too few prompts, `out` holds something else, held-out texts have
            tokens that the others do not have, or the loss is not a number any more.
        OSError: the disk is full.
        KeyboardInterrupt: with the result so far as `.partial_result`; the best drafter so far is in `out`. Errors of
            `on_progress` likewise.
    """
    settings, folder = check_settings(options) | {"chat": chat}, as_folder(out)
    asked, given = as_texts("prompts", prompts), as_texts("texts", texts)
    testing, asked, given = split(asked, given, held_out, settings["seed"])
    report = on_progress or (lambda progress: print(progress.message, flush=True))
    run = Run(pair, folder, settings, report, keep_states, cancel)
    try:
        return run.train(asked, given, testing, resume)
    except KeyboardInterrupt as stop:
        partial: TrainingResult | None = getattr(stop, "partial_result", None)
        if cancel is None or not cancel.is_set() or partial is None:
            raise
        return partial
