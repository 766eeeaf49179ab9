"""What the live views cost on SmolLM2-135M-Instruct: `python tests/live_cost.py [--repeats 7] [--threads 1]`.

A kernel generates the same text with no view, with the view of `%%specgen` and from the panel (in its thread, with the
probabilities it asks for), taking turns. Printed are the seconds of generation divided by those without a view in the
same round: median, lowest and highest. Needs nbclient and ipykernel.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_CODE = """
import statistics, specnb, torch
from specnb.notebook.stream import NotebookView
from specnb.text import prompt_inputs
torch.set_num_threads({threads})
pair = specnb.load({model!r})
panel = specnb.Panel(pair)
PROMPT = "Copy this text:\\n\\n" + "The old fisherman rowed out to the lighthouse every morning before sunrise. " * 3
inputs = prompt_inputs(pair.tokenizer, PROMPT)

def alone(method):
    return specnb.generate(pair, **inputs, method=method, max_new_tokens=96, do_sample=False, **options[method])

def magic(method):
    view = NotebookView(pair.tokenizer)
    result = specnb.generate(pair, **inputs, method=method, max_new_tokens=96, do_sample=False, **options[method],
                             on_step=view.step)
    view.finish(result)
    return result

def in_panel(method):
    panel.set(method=method, prompt=PROMPT, max_new_tokens=96, do_sample=False, **options[method])
    panel.run()
    panel.wait()
    return panel.result

options = {{"plain": {{}}, "prompt_lookup": {{"num_assistant_tokens": 8}}}}
lines = []
for method in options:
    ratios = {{magic: [], in_panel: []}}
    for turn in range({repeats} + 1):
        found = {{run: run(method) for run in ((alone, magic, in_panel) if turn % 2 else (in_panel, magic, alone))}}
        assert len({{tuple(result.ids) for result in found.values()}}) == 1
        if turn:  # the first warms up
            for run in ratios:
                ratios[run].append(found[run].seconds / found[alone].seconds)
    seconds, tokens = found[alone].seconds, found[alone].num_emitted_tokens
    for run, r in ratios.items():
        ratio = f"{{statistics.median(r):>8.3f}} ({{min(r):.3f}} to {{max(r):.3f}})"
        rest = f"{{tokens}} tokens, {{seconds:.2f}} s without a view"
        lines.append(f"{{method:<16}}{{run.__name__:<12}}{{ratio}}   {{rest}}")
"""


def main() -> None:
    """Run it in a kernel and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    cells = [_CODE.format(**vars(args)), "print('\\n'.join(lines))"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(book, timeout=3600, kernel_name="python3").execute()
    print(f"{'method':<16}{'view':<12}{'median':>8} (range), times the seconds without a view")
    print("".join(output.get("text", "") for output in book.cells[1].outputs))


if __name__ == "__main__":
    main()
