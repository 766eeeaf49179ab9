"""Checks of the arguments of `train_drafter`, before any work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from specnb.options import TRAINING_OPTIONS, unknown
from specnb.training import checkpoint

ANSWERS = "answers.jsonl"
"""The file with the target's answers, in the drafter's folder."""
LEAST_EXAMPLES = 4  # to learn from
_MOST_HELD_OUT = 40


def check_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """All settings: the options that were given, checked, and the defaults of the others.

    Raises:
        ValueError: there is no such option, a value is out of bounds, or both minutes and steps are given.
    """
    known = {option.name: option for option in TRAINING_OPTIONS}
    for name in options:
        if name not in known:
            raise ValueError(f"train_drafter: {unknown('option', name, known)}")
    given = {name: value for name, value in options.items() if value is not None}
    if {"minutes", "steps"} <= given.keys():
        raise ValueError(
            f"minutes={given['minutes']!r} and steps={given['steps']!r} given: training ends after one of them, give "
            "that one."
        )
    return {name: option.check(given[name]) if name in given else option.default for name, option in known.items()}


def as_texts(name: str, given: Any) -> list[str]:
    """Texts as a list. Raises ValueError if one is empty or no text."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{name}= takes a list of texts, not a {type(given).__name__}.")
    texts = list(given)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            what = "is empty" if isinstance(text, str) else f"is a {type(text).__name__}"
            raise ValueError(f"{name}=: number {number} of {len(texts)} {what}; each must be a text.")
    return texts


def split(prompts: list[str], texts: list[str], held_out: Any, seed: int) -> tuple[list[str], list[str], list[str]]:
    """Held-out texts, prompts and texts. A tenth of the prompts, or of the texts, is held out if none are given."""
    source = prompts or texts
    if len(set(prompts)) + len(set(texts)) <= LEAST_EXAMPLES:
        raise ValueError(
            f"{len(set(prompts))} different prompts and {len(set(texts))} different texts are too few to learn from: "
            f"give at least {LEAST_EXAMPLES + 1}, of which one is held out. A useful drafter takes hundreds."
        )
    testing = as_texts("held_out", held_out)
    if not testing:
        source = list(dict.fromkeys(source))
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed)).tolist()
        count = min(_MOST_HELD_OUT, max(1, len(source) // 10))
        testing = [source[i] for i in sorted(order[:count])]
    left = set(testing)
    return testing, [one for one in prompts if one not in left], [one for one in texts if one not in left]


def as_folder(out: Any) -> Path:
    """The drafter's folder. Raises ValueError if it is not named."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise ValueError(f"out={out!r} names no folder for the drafter: give one, such as out='my-drafter'.")
    return Path(out)


def check_folder(out: Path, resume: bool) -> None:
    """Raise ValueError if the folder holds something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file: give a folder.")
    found = sorted(one.name for one in out.iterdir()) if out.exists() else []
    if found and not resume:
        raise ValueError(
            f"out={str(out)!r} is not empty ({', '.join(found[:3])}): give another folder, or resume=True to go on "
            "with a training there."
        )
    if resume and not {ANSWERS, checkpoint.FILE} & set(found):
        raise ValueError(f"out={str(out)!r} holds no training to resume: leave resume=True out.")


def within(prompts: list[list[int]], most: int) -> list[list[int]]:
    """The prompts. Raises ValueError for one that is too long."""
    for number, ids in enumerate(prompts, 1):
        if len(ids) > most:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, more than max_length={most}: shorten it, or raise it."
            )
    return prompts
