"""The target's answers to the prompts: writing them, and putting together what several writers wrote."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import specnb
from specnb.options import TRAINING_OPTIONS
from specnb.training.examples import AnswerFile, Example, answer_prompts, encode_prompts, read_answers
from tools.smollm2_drafter.prompts import HELD_OUT, prompts

MOST_PROMPTS = 40_000
ROWS = 24
_MARK = "\u2042"


def write_answers(pair: specnb.Pair, asked: list[str], file: AnswerFile, tokens: int) -> None:
    """Add answers to the file, those to HELD_OUT first, until it has so many tokens."""
    defaults = {option.name: option.default for option in TRAINING_OPTIONS}
    ids = encode_prompts(pair, [*HELD_OUT, *asked], chat=True)
    known = file.read()
    count = sum(len(one.answer) for one in known)
    began, before = time.perf_counter(), count

    class Enough(Exception):
        """There are enough tokens."""

    def on_answers(new: list[Example]) -> None:
        nonlocal count
        file.append(new)
        known.extend(new)
        count += sum(len(one.answer) for one in new)
        print(f"{count:,} tokens, {(count - before) / (time.perf_counter() - began):.0f} a second", flush=True)
        if count >= tokens:
            raise Enough

    common = {"rows": ROWS, "max_new_tokens": defaults["max_new_tokens"], "seed": defaults["seed"], "until": None}
    try:
        for part, share in ((range(len(HELD_OUT)), 0.0), (range(len(HELD_OUT), len(ids)), defaults["sampled_share"])):
            left = [i for i in part if i >= len(known)]
            answer_prompts(pair, ids, numbers=left, sampled_share=share, on_answers=on_answers, **common)
    except Enough:
        pass


def together(pair: specnb.Pair, files: Iterable[Path]) -> tuple[list[str], list[Example]]:
    """What is in several files, each prompt once. The files are only read, also while somebody writes to them.

    Returns:
        The prompts to learn from, those of HELD_OUT left out, and all answers, the greedy ones to HELD_OUT first.
    """
    allowed, held = {*prompts(MOST_PROMPTS)} - {*HELD_OUT}, {*HELD_OUT}
    testing: dict[str, Example] = {}
    learning: dict[str, Example] = {}
    others = 0
    for file in files:
        found = read_answers(file)
        for text, one in zip(user_texts(pair, [one.prompt for one in found]), found, strict=True):
            if text in held:
                if not one.sampled:
                    testing.setdefault(text, one)
            elif text in allowed:
                learning.setdefault(text, one)
            else:
                others += 1
    if others:
        print(f"left out: {others} answers to prompts that are not of tools/smollm2_drafter/prompts.py")
    return list(learning), [*testing.values(), *learning.values()]


def user_texts(pair: specnb.Pair, prompts: Sequence[list[int]]) -> list[str]:
    """The user's message in each prompt; empty for one that is no chat with one message."""
    message = [{"role": "user", "content": _MARK}]
    head, tail = pair.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).split(_MARK)
    texts = []
    for ids in prompts:
        text = pair.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        fits = text.startswith(head) and text.endswith(tail) and len(text) > len(head) + len(tail)
        texts.append(text[len(head) : len(text) - len(tail)] if fits else "")
    return texts
