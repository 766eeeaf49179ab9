"""Notebook 7 on the real model: a drafter for recipes in some minutes, all included.

    python -m tools.narrow_domain [--minutes 10] [--threads 2] [--out FOLDER]

It takes the prompts of the notebook's cell, trains, writes `tests/results/narrow-domain.json` and `.md`, and puts the
table into the notebook.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import specnb
from specnb.training import TrainingResult

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "07_make_your_own_drafter.ipynb"
RESULT = ROOT / "tests" / "results" / "narrow-domain"
TARGET = "smollm2-135m-q4"
_PROMPTS = "# The prompts"  # how the notebook's cell begins
_MARKS = "<!-- narrow-domain -->", "<!-- /narrow-domain -->"


def main() -> None:
    """Train, and write what was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for answers, states, training and measuring")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder to keep the drafter in")
    parser.add_argument("--result", type=Path, default=RESULT, help="where to write, without the suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    learn, test = prompts()
    with nullcontext(str(args.out)) if args.out else tempfile.TemporaryDirectory() as out:
        pair = specnb.load(TARGET, None)
        result = specnb.train_drafter(pair, learn, held_out=test, out=Path(out) / "drafter", minutes=args.minutes)
    command = f"python -m tools.narrow_domain --minutes {args.minutes:g} --threads {args.threads}"
    page = report(result, command)
    data: dict[str, Any] = {**json.loads(result.to_json()), "out": "", "command": command}
    args.result.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    args.result.with_suffix(".md").write_text(page, encoding="utf-8")
    if args.result == RESULT:
        into_notebook(NOTEBOOK, page)
    print(page)


def prompts() -> tuple[list[str], list[str]]:
    """The notebook's prompts for the real model: to learn from, and held out."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    source = next(text for cell in cells if (text := "".join(cell["source"])).startswith(_PROMPTS))
    made: dict[str, Any] = {"tiny": False}
    exec(compile(source, NOTEBOOK.name, "exec"), made)
    return made["LEARN"], made["TEST"]


def report(result: TrainingResult, command: str) -> str:
    """What was reached, as Markdown."""
    counts, seconds = result.counts, result.seconds
    shares = ", ".join(f"{share:.0%}" for share in result.acceptance_by_position)
    parts = ", ".join(f"{part} {value:.0f} s" for part, value in seconds.items())
    lines = [
        f"`{command}`: {counts['examples']:,} recipes with {counts['training tokens']:,} tokens were answered and "
        f"learned from in {sum(seconds.values()) / 60:.1f} minutes ({parts}). The draft vocabulary has "
        f"{counts['draft vocabulary']:,} tokens, {counts['coverage']:.1%} of the unseen ones.",
        "",
        f"In {counts['held-out examples']} recipes for dishes that were not in training, drafts were right up to "
        f"positions 1 to {len(result.acceptance_by_position)} in {shares} of the places: "
        f"{result.mean_acceptance_length:.2f} tokens per target pass.",
    ]
    if result.comparison is None:
        lines += ["", "Its speed was not measured: the time was too short."]
    else:
        on = result.comparison.environment
        lines += [
            "",
            result.comparison.table().to_markdown(),
            "",
            f"{result.comparison.prompts} held-out prompts, greedy, one run each. {on['machine']}, {on['threads']} "
            f"threads, torch {on['torch']}, transformers {on['transformers']}, {on['date'][:10]}.",
        ]
    return "\n".join(lines) + "\n"


def into_notebook(path: Path, page: str) -> None:
    """Put the page between the marks of the notebook's cell; the rest of the file stays as it is."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    begin, end = _MARKS
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and begin in text:
            before, after = text.split(begin)[0], text.split(end)[1]
            cell["source"] = f"{before}{begin}\n{page.strip()}\n{end}{after}".splitlines(keepends=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
