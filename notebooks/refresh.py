"""Run the notebooks and store their outputs, or check that this was done.

    python notebooks/refresh.py [NOTEBOOK ...]            run them (all, if none is named) and store the outputs
    python notebooks/refresh.py --check [NOTEBOOK ...]    run nothing; fail if outputs are missing or outdated

The stored outputs are what is visible without a kernel: text, static HTML and PNG; no widget ids, execution times or
paths.
Needs nbclient, nbformat, ipykernel and specnb itself (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGE = '<img alt="'
SETTINGS = {"SPECNB_LIVE": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of the kernels, here and under nbval: no live display, no network, one thread."""


def all_notebooks() -> list[Path]:
    """The tutorial notebooks, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.ipynb"))


def code_hash(notebook: Any) -> str:
    """A fingerprint of all code and tags: it tells outputs of this code from those of an older one."""
    cells = [(cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:16]


def run(path: Path) -> None:
    """Execute a notebook in a kernel of this Python, from its own folder, and store it."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute()
    normalise(notebook)
    problems = problems_of(notebook)
    if problems:
        raise SystemExit(f"{path.name}: not stored: " + "; ".join(problems))
    nbformat.write(notebook, path)


def normalise(notebook: Any) -> None:
    """Leave only what a reader needs, the same on every machine."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "specnb": {"outputs_of": code_hash(notebook)},
        }
    )
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("tags", "cellView") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if IMAGE in data.get("text/html", ""):
                data.pop("image/png", None)  # the same picture, without its alt text


def faults(outputs: Iterable[Mapping[str, Any]]) -> list[str]:
    """What must not be in a cell's outputs, in a line each."""
    found = []
    for output in outputs:
        text = str(output.get("text", ""))
        if "UsageError" in text or output.get("ename") == "UsageError":
            found.append(f"a magic refused its arguments: {text.strip() or output.get('evalue')}")
        elif output.get("name") == "stderr":
            found.append(f"written to stderr: {text.strip()}")
        html = "".join(output.get("data", {}).get("text/html", ""))
        if "<script" in html.lower() or any("javascript" in kind for kind in output.get("data", {})):
            found.append("an output with a script")
    return found


def joined(outputs: Sequence[Any]) -> list[Any]:
    """The outputs, with what was written to stdout in one piece: where it is cut depends on the moment."""
    kept: list[Any] = []
    for output in outputs:
        before = kept[-1] if kept else {}
        if output.output_type == "stream" and before.get("name") == output.name:
            before["text"] += output.text
        else:
            kept.append(output)
    return kept


def problems_of(notebook: Any) -> list[str]:
    """Why a notebook may not be committed; empty if it may."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)) or not any(c.outputs for c in cells):
        found.append("its outputs are missing, or its cells did not run once in order")
    elif notebook.metadata.get("specnb", {}).get("outputs_of") != code_hash(notebook):
        found.append("its code was changed after it ran")
    for number, cell in enumerate(cells, 1):
        found += [f"cell {number}: {fault}" for fault in faults(cell.outputs)]
        found += [f"cell {number}: an error" for output in cell.outputs if output.output_type == "error"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="run nothing, only look")
    options = parser.parse_args(arguments)
    os.environ.update(SETTINGS)
    failed = False
    for path in options.notebooks or all_notebooks():
        if options.check:
            problems = problems_of(nbformat.read(path, as_version=4))
            if problems:
                failed = True
                print(
                    f"{path.name}: {'; '.join(problems)}.\nRun: python notebooks/refresh.py {path.name}",
                    file=sys.stderr,
                )
        else:
            start = time.monotonic()
            run(path)
            print(f"{path.name}: {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
