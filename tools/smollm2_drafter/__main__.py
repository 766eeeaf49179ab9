"""Make the drafter of SmolLM2-135M-Instruct (the Q4_1 conversion), in three parts that can be stopped and continued.

    python -m tools.smollm2_drafter answers --out DIR [--tokens 1000000] [--threads 1]
    python -m tools.smollm2_drafter train --out DIR [--answers FILE ...] [--minutes 60 | --epochs 6] [--threads 2]
    python -m tools.smollm2_drafter ship --out DIR

`answers`: the target answers the prompts of `prompts`, those that are held out first, into DIR/answers.jsonl.

`train`: a training with all answers in DIR and in the given files, in any order, each prompt once; the files stay as
they are. Run again, it goes on where it stopped: with --epochs exactly, with --minutes for that time once more. More
answers are taken in only by a training that begins anew (--anew). The target's states, 4.6 kB a token, stay in DIR.

`ship`: the trained drafter in int8 with its card, into specnb/models/embedded. It measures what int8 costs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

import specnb
from specnb.bench.compare import environment
from specnb.models import embedded
from specnb.options import TRAINING_OPTIONS
from specnb.training import checkpoint
from specnb.training.arguments import ANSWERS
from specnb.training.examples import AnswerFile, encode_prompts
from tools.smollm2_drafter import answers
from tools.smollm2_drafter.prompts import HELD_OUT, prompts
from tools.smollm2_drafter.ship import RUN, ship

TARGET = "smollm2-135m-q4"
SHIPPED = embedded.FOLDER / "smollm2-135m-eagle3"
_OPTIONS = ("learning_rate", "batch_size", "draft_vocab_size", "ttt_steps", "num_hidden_layers", "memory_gb")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["answers", "train", "ship"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="answers: tokens of answers")
    parser.add_argument("--answers", type=Path, nargs="+", default=[], metavar="FILE", help="train: more answers")
    parser.add_argument("--minutes", type=float, default=60.0, help="train: for all of it")
    parser.add_argument("--epochs", type=float, help="train: instead of minutes")
    parser.add_argument("--anew", action="store_true", help="train: begin anew with all answers that are there")
    parser.add_argument("--note", default="", help="train: a sentence for the card, such as how long the answers took")
    parser.add_argument("--to", type=Path, default=SHIPPED, help="ship: the folder to write")
    for option in TRAINING_OPTIONS:
        if option.name in _OPTIONS:
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=option.read, help=f"train: {option.help}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    pair = specnb.load(TARGET, None)
    if args.part == "answers":
        asked = [one for one in prompts(answers.MOST_PROMPTS) if one not in HELD_OUT]
        answers.write_answers(pair, asked, AnswerFile(args.out / ANSWERS), args.tokens)
    elif args.part == "train":
        train(pair, args)
    else:
        ship(pair, args.out, args.to, encode_prompts(pair, HELD_OUT, chat=True))
        print((args.to / "README.md").read_text(encoding="utf-8"))


def train(pair: specnb.Pair, args: argparse.Namespace) -> specnb.TrainingResult:
    """Train with all answers, or go on."""
    mine = args.out / ANSWERS
    if args.anew:
        (args.out / checkpoint.FILE).unlink(missing_ok=True)
    begun = (args.out / checkpoint.FILE).exists()
    there, examples = answers.together(pair, [file for file in (mine, *args.answers) if file.exists()])
    if begun:
        more = len(there)
        there, examples = answers.together(pair, [mine])
        print(f"going on with {len(there):,} prompts; {more - len(there):,} more would be there (--anew)")
    else:
        part = mine.with_suffix(".part")
        part.unlink(missing_ok=True)
        AnswerFile(part).append(examples)
        part.replace(mine)
        print(f"{len(there):,} prompts, {sum(len(one.answer) for one in examples):,} tokens of answers")
    command = shlex.join(["python", "-m", "tools.smollm2_drafter", *sys.argv[1:]]).replace(str(args.out), "DIR")
    for i, file in enumerate(args.answers):
        command = command.replace(str(file), f"ANSWERS-{i}")
    run = {"command": command, "note": args.note, "environment": environment(pair)}
    (args.out / RUN).write_text(json.dumps(run) + "\n", encoding="utf-8")
    options = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.epochs:
        size = options.get("batch_size") or next(o.default for o in TRAINING_OPTIONS if o.name == "batch_size")
        options["steps"] = max(1, round(args.epochs * (len(there) // size)))
    else:
        options["minutes"] = args.minutes
    result = specnb.train_drafter(
        pair, there, out=args.out, held_out=HELD_OUT, resume=True, keep_states=True, chat=True, **options
    )
    print(result.comparison.text() if result.comparison else result.verdict)
    return result


if __name__ == "__main__":
    main()
