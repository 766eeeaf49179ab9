"""The families run: `python -m tests.families.run causal|image-text|images|all [--out FOLDER] [--list] [family ...]`.

Builds a tiny random model of every family of transformers (a forked child each, with a limit of CPU time), makes the calls
of `cells`, and writes `families-KIND.jsonl` and `families.md` to the folder (tests/results). `--list` also writes the tested list into
the package. Families that are in the file already are not run again; name them to do so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from . import report
from .build import CAUSAL, IMAGE_TEXT, build, families
from .cells import ROWS, Cell, batch, image_cells, plain, text_cells
from .images import NoImage

IMAGES = "images"
KINDS = (CAUSAL, IMAGE_TEXT, IMAGES)
SECONDS = 150  # of CPU time per family


def run_family(family: str, kind: str) -> dict[str, Any]:
    """One family in this process: its class and its cells, or why there are none."""
    found: dict[str, Any] = {"family": family, "kind": kind}
    try:
        model = build(family, CAUSAL if kind == CAUSAL else IMAGE_TEXT)
    except Exception as error:
        return found | {"not_run": _line("not built", error)}
    found |= {"class": type(model).__name__, "model_type": model.config.model_type}
    cells: dict[str, Cell] = {}
    try:
        if kind == IMAGES:
            cells.update(image_cells(model))
        else:
            plain(model, batch(ROWS[:1]), 3)
            cells.update(text_cells(model))
    except Exception as error:  # not ours: transformers' own decoding, or no image
        if not cells:
            return found | {"not_run": _line("no image" if isinstance(error, NoImage) else "plain fails", error)}
        found["stopped"] = _line("stopped", error)
    found["cells"] = {name: cell.to_json() for name, cell in cells.items()}
    return found


def _line(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def isolated(family: str, kind: str, seconds: float = SECONDS) -> dict[str, Any]:
    """`run_family` in a forked child, which is ended after so many seconds of CPU time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with os.fdopen(writing, "w") as pipe:
            json.dump(run_family(family, kind), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    why = f"more than {seconds:g} s of CPU time" if os.WTERMSIG(status) == signal.SIGPROF else f"status {status}"
    return {"family": family, "kind": kind, "not_run": f"ended: {why}"}


def quiet() -> None:
    """One thread and no chatter; to be called before the first fork."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*KINDS, "all", "report"])
    parser.add_argument("family", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--list", action="store_true", help="write the tested list into the package")
    given = parser.parse_intermixed_args()
    quiet()
    kinds = KINDS if given.kind == "all" else () if given.kind == "report" else (given.kind,)
    bad = 0
    for kind in kinds:
        known = families(CAUSAL if kind == CAUSAL else IMAGE_TEXT)
        path = given.out / f"families-{kind}.jsonl"
        kept = report.read(path)
        for family in given.family or [name for name in known if name not in kept]:
            kept[family] = found = isolated(family, kind)
            print(f"{kind} {family:28} {report.verdict(found)}", flush=True)
            report.write(path, [kept[name] for name in known if name in kept])
            bad += report.is_bad(found)
    report.table(given.out, KINDS)
    if given.list:
        report.tested_list(given.out)
    print(f"{bad} families with a wrong text or a raw error")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
