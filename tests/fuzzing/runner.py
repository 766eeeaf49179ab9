"""Worker processes, a batch of draws each: whatever happens to one of them, the run goes on."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .draws import Draw, draw
from .judge import Outcome, judge
from .script import source
from .shrink import explained, label, shrink

BATCH = 20  # draws per worker
MEMORY = 12 * 2**30  # bytes of addresses that a worker may take: what wants more fails, on whichever side


@dataclass
class Report:
    """Counts of outcomes, and the findings, each kind once."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, tuple[int, Draw, Outcome]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)

    @property
    def right(self) -> bool:
        return not self.findings


def run(
    seed: int,
    *,
    minutes: float | None = None,
    count: int | None = None,
    first: int = 0,
    out: Path | None = None,
    shrinking: float = 60,
) -> Report:
    """Draw until the minutes are over, or `count` draws are made, from index `first`."""
    report, index = Report(seed), first
    end = time.monotonic() + 60 * (minutes or 1e9)
    last = first + (count or 10**9)
    while index < last and time.monotonic() < end:
        batch = range(index, min(index + BATCH, last))
        done = index
        for done, outcome, small in _worker(report, batch, end, shrinking):
            report.counts[outcome.kind] += 1
            if not outcome.right:
                _tell(report, done, outcome, small, out)
            done += 1
        if done == index:  # not even one: time is over, or the worker died at once
            if time.monotonic() < end:
                raise RuntimeError("a worker ended before its first draw")
            break
        index = done
    return report


def _worker(report: Report, batch: range, end: float, shrinking: float) -> Iterator[tuple[int, Outcome, Draw]]:
    """Judge a batch of draws in a forked child; a child that dies is a finding of the draw it was at."""
    seed = report.seed
    known = [(small, outcome) for _, small, outcome in report.findings.values()]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if "FUZZ_STDERR" not in os.environ:
            os.dup2(null, 2)
        with os.fdopen(writing, "wb") as pipe:
            for index in batch:
                if time.monotonic() > end:
                    break
                made = draw(seed, index)
                outcome = judge(made)
                if not outcome.right and shrinking:
                    made, outcome = explained(made, outcome, known) or shrink(made, outcome, shrinking)
                    known.append((made, outcome))
                pipe.write(pickle.dumps((index, outcome, made)))
                pipe.flush()
        os._exit(0)
    os.close(writing)
    at = batch.start
    with os.fdopen(reading, "rb") as pipe:
        while True:
            try:
                found = pickle.load(pipe)
            except EOFError:
                break
            at = found[0] + 1
            yield found
    _, status = os.waitpid(child, 0)
    if status:
        yield at, Outcome("died", f"status {status}"), draw(seed, at)


def _tell(report: Report, index: int, outcome: Outcome, small: Draw, out: Path | None) -> None:
    """Print a finding that is new, count one that is not."""
    key = f"{outcome.kind} | {outcome.where or label(small)}"
    report.again[key] += 1
    if key in report.findings:
        return
    report.findings[key] = (index, small, outcome)
    text = script_of(report.seed, index, outcome, small)
    print(f"\n{'=' * 100}\n{text}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha1(key.encode()).hexdigest()[:6]
        (out / f"{outcome.kind.replace(' ', '-')}-{digest}.py").write_text(text)


def script_of(seed: int, index: int, outcome: Outcome, small: Draw) -> str:
    """The finding as a script, with what was found in its docstring."""
    again = f"python tests/fuzz.py --seed {seed} --first {index} --count 1"
    head = f"{outcome.kind}: {label(small)}\n\n{outcome.where}\n{outcome.detail}\n\n{again}\n"
    return f'r"""{head}"""\n' + source(small)


def summary(report: Report) -> str:
    """The counts, and one line per finding."""
    total = sum(report.counts.values())
    lines = [
        f"seed {report.seed}: {total} draws: " + ", ".join(f"{n} {kind}" for kind, n in report.counts.most_common())
    ]
    for key, (index, small, outcome) in report.findings.items():
        lines.append(f"- {key} ({report.again[key]} times, first at {index}; {label(small)}): {outcome.detail[:200]}")
    return "\n".join(lines)


def quiet() -> None:
    """One thread, no network, no chatter; before anything is drawn."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.setrecursionlimit(5000)
