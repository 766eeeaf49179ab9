"""Make the drafter of SmolLM2-135M-Instruct (the Q4_1 conversion), in two parts that can be stopped and continued.

    python -m tools.smollm2_drafter answers --out DIR [--tokens 1000000] [--threads 1]
    python -m tools.smollm2_drafter train --out DIR [--minutes 60] [--threads 2]

The target answers the prompts of `prompts`, those that are held out first. The training reads these answers from DIR.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import specnb
from specnb.options import TRAINING_OPTIONS
from specnb.training.arguments import ANSWERS
from specnb.training.examples import AnswerFile, Example, answer_prompts, encode_prompts
from tools.smollm2_drafter.prompts import HELD_OUT, prompts

TARGET = "smollm2-135m-q4"
_MOST_PROMPTS = 40_000
_ROWS = 24


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["answers", "train"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of answers")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    pair = specnb.load(TARGET)
    asked = [one for one in prompts(_MOST_PROMPTS) if one not in HELD_OUT]
    if args.part == "answers":
        write_answers(pair, asked, AnswerFile(args.out / ANSWERS), args.tokens)
        return
    answered = len(AnswerFile(args.out / ANSWERS).read()) - len(HELD_OUT)
    result = specnb.train_drafter(
        pair, asked[:answered], out=args.out, held_out=HELD_OUT, minutes=args.minutes, resume=True, rows=_ROWS
    )
    print(result.comparison.text() if result.comparison else result.verdict)


def write_answers(pair: specnb.Pair, asked: list[str], file: AnswerFile, tokens: int) -> None:
    """Add answers to the file until it has so many tokens."""
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

    common = {"rows": _ROWS, "max_new_tokens": defaults["max_new_tokens"], "seed": defaults["seed"], "until": None}
    try:
        for part, share in ((range(len(HELD_OUT)), 0.0), (range(len(HELD_OUT), len(ids)), defaults["sampled_share"])):
            left = [i for i in part if i >= len(known)]
            answer_prompts(pair, ids, numbers=left, sampled_share=share, on_answers=on_answers, **common)
    except Enough:
        pass


if __name__ == "__main__":
    main()
