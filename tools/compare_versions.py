"""Compare the speed of two checkouts of specnb: do calls on the embedded pairs take longer than before?

`python -m tools.compare_versions OLD_CHECKOUT [NEW_CHECKOUT] [--starts 4] [--repeats 6] [--output STEM]` starts a
process for each checkout. They take turns call by call, so that a change of the machine's speed affects both.
Two processes of one version differ by up to 8 %, so each checkout is started several times. Texts must be the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

STEADY = {"num_assistant_tokens_schedule": "constant"}
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "plain, tiny-llama": ("tiny-llama", None, {"method": "plain"}),
    "draft model": ("tiny-llama", "tiny-llama-draft", {"num_assistant_tokens": 5, **STEADY}),
    "universal": ("tiny-llama", "tiny-llama-other", {"num_assistant_tokens": 5, **STEADY}),
    "prompt lookup": ("tiny-llama", None, {"method": "prompt_lookup"}),
    "early exit": ("tiny-llama", None, {"assistant_early_exit": 2, "num_assistant_tokens": 3, **STEADY}),
    "plain, tiny-gemma4": ("tiny-gemma4", None, {"method": "plain"}),
    "Gemma 4 drafter": ("tiny-gemma4", "tiny-gemma4-assistant", {"num_assistant_tokens": 4, **STEADY}),
    "plain, tiny-glm4-moe": ("tiny-glm4-moe", None, {"method": "plain"}),
    "one MTP layer": ("tiny-glm4-moe", None, {"use_mtp": True, "num_assistant_tokens": 3, **STEADY}),
    "two MTP layers": ("tiny-glm4-moe-mtp2", None, {"use_mtp": True, "num_assistant_tokens": 2, **STEADY}),
}
"""By name: target, assistant, and options that every version since 0.1 accepts."""

PROMPT = "Once upon a time there was a little girl named Lily. She liked to play in the garden with her dog. One day, "
NEW_TOKENS = 96


def work() -> None:
    """Run the cases named on standard input; answer each with its CPU seconds and token ids."""
    import time

    import torch

    import specnb

    torch.set_num_threads(1)
    pairs: dict[Any, Any] = {}
    for line in sys.stdin:
        target, assistant, options = CASES[line.strip()]
        if (target, assistant) not in pairs:
            pairs[target, assistant] = specnb.load(target, assistant)
        pair = pairs[target, assistant]
        encoded = pair.tokenizer(PROMPT, return_tensors="pt")
        given = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        began = time.process_time()
        result = specnb.generate(pair, **given, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
        print(json.dumps([time.process_time() - began, list(result.rows[0].ids)]), flush=True)


def start(checkout: Path) -> subprocess.Popen[str]:
    """A process that runs cases with the specnb of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


def ask(process: subprocess.Popen[str], case: str) -> list[Any]:
    """The CPU seconds and the token ids of a case."""
    assert process.stdin and process.stdout
    process.stdin.write(case + "\n")
    process.stdin.flush()
    answer: list[Any] = json.loads(process.stdout.readline())
    return answer


def compare(checkouts: list[Path], starts: int, repeats: int) -> list[dict[str, Any]]:
    """The CPU seconds of each case in both checkouts; the first two turns of a process do not count."""
    seconds: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(starts):
        processes = [start(checkout) for checkout in checkouts]
        for case, turn in itertools.product(CASES, range(repeats + 2)):
            order = (0, 1) if turn % 2 else (1, 0)
            answers = {i: ask(processes[i], case) for i in order}
            if answers[0][1] != answers[1][1]:
                raise SystemExit(f"{case}: the texts differ")
            if turn >= 2:
                seconds[case].append((answers[0][0], answers[1][0]))
        for process in processes:
            process.communicate()
    return [
        {
            "case": case,
            "old_seconds": statistics.median(old for old, _ in pairs),
            "new_seconds": statistics.median(new for _, new in pairs),
            "ratio": statistics.median(new / old for old, new in pairs),
        }
        for case, pairs in seconds.items()
    ]


def main() -> None:
    """Parse the command line, compare, print and write."""
    parser = argparse.ArgumentParser(description="compare the speed of two checkouts of specnb, call by call in turns")
    parser.add_argument("old", type=Path, nargs="?", help="the earlier checkout")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--starts", type=int, default=4, help="processes per checkout, one after the other")
    parser.add_argument("--repeats", type=int, default=6, help="counted calls per case and process")
    parser.add_argument("--output", type=Path, help="write STEM.json and STEM.md")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work()
    if given.old is None:
        parser.error("name the earlier checkout")
    found = compare([given.old.resolve(), given.new.resolve()], given.starts, given.repeats)
    for one in found:
        print("{case:22} {old_seconds:.3f} s, {new_seconds:.3f} s, x {ratio:.3f}".format(**one))
    if given.output:
        revisions = [
            subprocess.run(["git", "-C", str(path), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
            for path in (given.old, given.new)
        ]
        old, new = (one.stdout.strip() for one in revisions)
        where = (
            f"{date.today()}, {platform.machine()}, one thread, {given.starts} x {given.repeats} calls each, in turns"
        )
        lines = [
            f"# {new} beside {old}",
            "",
            f"`python -m tools.compare_versions`: {where}. Processor seconds per call of {NEW_TOKENS} tokens, medians;",
            "the ratio is the median of the ratios of neighbouring calls.",
            "",
            f"| | {old} | {new} | ratio |",
            "|---|---|---|---|",
            *("| {case} | {old_seconds:.3f} | {new_seconds:.3f} | {ratio:.3f} |".format(**one) for one in found),
        ]
        given.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {"old": old, "new": new, "where": where, "cases": found}
        given.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
