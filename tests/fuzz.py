"""The differential fuzzer: `python tests/fuzz.py --minutes 10 [--seed N]`, `--count N` for a fixed number of draws.

Draws calls (a model, prompts, options, processors, a cache, a wrapper, an entry, a method) and compares specnb with transformers' plain
decoding. Equal, or refused in one line before the first token, is right; anything else is printed as a small script. A draw is
reproduced by its seed and index: `--seed N --first INDEX --count 1`. Ends with 1 where something was found.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fuzzing import runner


def main() -> int:
    parser = argparse.ArgumentParser(description="compare random calls of specnb with transformers' plain decoding")
    parser.add_argument("--minutes", type=float, help="how long to draw (10 where no count is given)")
    parser.add_argument("--count", type=int, help="how many draws")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="index of the first draw")
    parser.add_argument("--out", type=Path, help="folder for the findings' scripts")
    parser.add_argument("--shrink", type=float, default=60, help="seconds spent on making a finding small (0: none)")
    given = parser.parse_args()
    runner.quiet()
    minutes = given.minutes if given.minutes or given.count else 10
    report = runner.run(
        given.seed, minutes=minutes, count=given.count, first=given.first, out=given.out, shrinking=given.shrink
    )
    print(runner.summary(report), flush=True)
    return int(not report.right)


if __name__ == "__main__":
    sys.exit(main())
