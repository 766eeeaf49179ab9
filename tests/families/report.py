"""What the families run found: JSON lines, a table in Markdown, and the package's list of tested families."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .cells import CRASH, EQUAL, REFUSED, UNSTEADY, WRONG

RESULTS = Path(__file__).parent.parent / "results"
LIST = Path(__file__).parent.parent.parent / "specnb" / "decoding" / "lm" / "tested_families.json"
MARKS = {EQUAL: "=", REFUSED: "refused", UNSTEADY: "unsteady", WRONG: "**WRONG**", CRASH: "**raw error**"}
Found = dict[str, Any]


def read(path: Path) -> dict[str, Found]:
    """Results by family; empty where there is no file yet."""
    if not path.exists():
        return {}
    return {found["family"]: found for found in map(json.loads, path.read_text().splitlines())}


def write(path: Path, results: Iterable[Found]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(found) + "\n" for found in results))


def verdicts(found: Found) -> dict[str, str]:
    """The verdict per cell; empty for a family that was not run."""
    return {name: cell["verdict"] for name, cell in found.get("cells", {}).items()}


def is_bad(found: Found) -> bool:
    """Whether a text is wrong or an error is not a refusal of ours."""
    return bool({WRONG, CRASH} & set(verdicts(found).values()))


def is_right(found: Found) -> bool:
    """Whether something ran and nothing is wrong: what is not equal is refused by name."""
    return EQUAL in verdicts(found).values() and not is_bad(found)


def is_equal(found: Found) -> bool:
    """Whether every cell is equal, several rows with images aside, which may be refused."""
    cells = verdicts(found)
    return all(kind == EQUAL or (kind == REFUSED and name.startswith("image rows")) for name, kind in cells.items())


def verdict(found: Found) -> str:
    """One line about a family."""
    if "not_run" in found:
        return f"not run ({found['not_run'][:100]})"
    cells = verdicts(found)
    off = [f"{name}: {kind}" for name, kind in cells.items() if kind != EQUAL]
    if not off:
        return "equal"
    if set(cells.values()) == {REFUSED}:
        return "refused wholly"
    return ", ".join(off)


def table(folder: Path, kinds: Sequence[str]) -> None:
    """Write `families.md` and `families.json` (the counts) from the files of JSON lines."""
    lines = [
        "# Families",
        "",
        f"A tiny random model of every family of transformers {transformers.__version__} "
        f"(torch {torch.__version__}), float32 on the CPU, against transformers' own plain greedy text. `=`: equal; "
        "refused: by one line of ours before the first token; unsteady: rounding decides, and one pass of transformers "
        "over the whole text gives ours.",
    ]
    counts: dict[str, Any] = {"transformers": transformers.__version__, "torch": str(torch.__version__)}
    for kind in kinds:
        results = list(read(folder / f"families-{kind}.jsonl").values())
        counts[kind] = _counts(results)
        lines += [
            "",
            f"## {kind}",
            "",
            ", ".join(f"{n} {what}" for what, n in counts[kind].items() if what != "cells"),
            "",
        ]
        lines += _table([found for found in results if "cells" in found])
        lines += [*(f"- {found['family']}: {found['not_run']}" for found in results if "not_run" in found)]
    (folder / "families.md").write_text("\n".join(lines) + "\n")
    (folder / "families.json").write_text(json.dumps(counts, indent=1) + "\n")


def _counts(results: list[Found]) -> dict[str, Any]:
    ran = [found for found in results if "cells" in found]
    cells = Counter(kind for found in ran for kind in verdicts(found).values())
    return {
        "families": len(results),
        "equal in all": sum(set(verdicts(found).values()) == {EQUAL} for found in ran),
        "refused in part": sum(set(verdicts(found).values()) == {EQUAL, REFUSED} for found in ran),
        "refused wholly": sum(set(verdicts(found).values()) == {REFUSED} for found in ran),
        "unsteady": sum(UNSTEADY in verdicts(found).values() for found in ran),
        "with a wrong text": sum(WRONG in verdicts(found).values() for found in ran),
        "with a raw error": sum(CRASH in verdicts(found).values() for found in ran),
        "not run": len(results) - len(ran),
        "cells": {kind: cells[kind] for kind in MARKS},
    }


def _table(ran: list[Found]) -> list[str]:
    columns = list(dict.fromkeys(name for found in ran for name in found["cells"]))
    if not columns:
        return []
    lines = ["", "| family | class | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for found in ran:
        cells = verdicts(found)
        marks = [MARKS[cells[name]] if name in cells else "" for name in columns]
        lines.append(f"| {found['family']} | {found['class']} | " + " | ".join(marks) + " |")
    return lines


def tested(folder: Path) -> dict[str, Any]:
    """The tested list: model types (of the models' configs) found right with text and with an image.

    A type is on the list only if all cells of every class that was run with it are equal. Several rows with images may
    be refused, since that does not depend on the list. A type that the block check refuses must not be on it: models on
    the list skip the block check.
    """
    runs = {kind: list(read(folder / f"families-{kind}.jsonl").values()) for kind in ("causal", "image-text", "images")}
    return {
        "transformers": transformers.__version__,
        "text": right_types([*runs["causal"], *runs["image-text"]]),
        "image": right_types(runs["images"]),
    }


def right_types(results: list[Found]) -> list[str]:
    ran = [found for found in results if "cells" in found]
    wrong = {found["model_type"] for found in ran if not is_equal(found)}
    return sorted({found["model_type"] for found in ran} - wrong)


def tested_list(folder: Path) -> None:
    """Write the tested list into the package."""
    LIST.write_text(json.dumps(tested(folder), indent=1) + "\n")
