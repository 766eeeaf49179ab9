"""The options of `train_drafter`, `%%spectrain` and `python -m specnb train`."""

from __future__ import annotations

from dataclasses import replace

from specnb.options.option import Option

_OPTIONS = (
    Option(
        name="minutes",
        type=float,
        default=15.0,
        help="for all of it: answers, training and measuring",
        low=0,
        low_open=True,
        slider=(1, 120),
    ),
    Option(
        name="steps",
        type=int,
        default=None,
        help=(
            "number of optimizer steps instead of minutes: all prompts are answered, and the same data and seed give "
            "the same drafter"
        ),
        low=1,
    ),
    Option(name="seed", type=int, default=0, help="of everything that is random", low=0, high=2**63 - 1),
    Option(name="num_hidden_layers", type=int, default=1, help="layers of the drafter", low=1, high=8, slider=(1, 4)),
    Option(
        name="draft_vocab_size",
        type=int,
        default=4096,
        help="most tokens that the drafter can propose: those that are most frequent in the answers",
        low=2,
        slider=(512, 32768),
    ),
    Option(
        name="ttt_steps",
        type=int,
        default=3,
        help="tokens that are unrolled in training (training-time test)",
        low=1,
        high=16,
        slider=(1, 8),
    ),
    Option(
        name="learning_rate",
        type=float,
        default=1e-3,
        help="the highest; it falls along a cosine",
        low=0,
        low_open=True,
        high=1,
    ),
    Option(name="batch_size", type=int, default=16, help="texts per optimizer step", low=1, slider=(1, 64)),
    Option(name="rows", type=int, default=16, help="prompts that are answered together", low=1, slider=(1, 64)),
    Option(name="max_new_tokens", type=int, default=192, help="most tokens of an answer", low=2, slider=(16, 1024)),
    Option(
        name="max_length",
        type=int,
        default=512,
        help="most tokens of a prompt; texts that are longer are cut into pieces",
        low=8,
        slider=(64, 4096),
    ),
    Option(
        name="sampled_share",
        type=float,
        default=0.5,
        help="share of the answers that is sampled, at temperature 0.6; the others are greedy",
        low=0,
        high=1,
        slider=(0, 1),
    ),
    Option(
        name="memory_gb",
        type=float,
        default=None,
        help="gigabytes of memory for the target's states; more go to a file. Left out: a quarter of what is free",
        low=0,
    ),
)
TRAINING_OPTIONS: tuple[Option, ...] = tuple(replace(option, group="training") for option in _OPTIONS)
"""The options, in the order in which they are listed."""
