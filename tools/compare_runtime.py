"""Compare what makes a pass cheaper: specnb's runtime beside torch.compile with freezing, on a CPU.

`python -m tools.compare_runtime [--threads 1] [--repeats 20] [--output STEM]` times passes of SmolLM2-135M-Instruct
over 1, 5 and 9 tokens behind 256 cached ones: the model as transformers runs it, specnb's prepared module tree
without and with packed weights, and `torch.compile` (inductor, frozen weights) with a static cache. They take turns
within one process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

import specnb
from specnb import compat
from specnb.decoding.lm.kv_cache import KVCache
from specnb.runtime.prepare import prepare

NAME = compat.cache_keyword(inspect.signature(transformers.LlamaForCausalLM.forward).parameters)
CONTEXT, SLOTS = 256, 512
WIDTHS = (1, 5, 9)
Pass = Callable[[Tensor], Tensor]


def plain(model: Any, ids: Tensor) -> Pass:
    """The model as transformers runs it, with its DynamicCache."""
    cache = DynamicCache(config=model.config)
    model(ids, **{NAME: cache}, use_cache=True)

    def run(tokens: Tensor) -> Tensor:
        out = model(tokens, **{NAME: cache}, use_cache=True).logits
        cache.crop(-tokens.shape[1])
        return out

    return run


def prepared(model: Any, ids: Tensor) -> Pass:
    """specnb's module tree with its kv cache."""
    tree, _ = prepare(model)
    cache = KVCache(model.config, [0], SLOTS)
    tree(ids, **{NAME: cache}, use_cache=True)

    def run(tokens: Tensor) -> Tensor:
        cache.write_positions.set([CONTEXT])
        positions = CONTEXT + torch.arange(tokens.shape[1])[None]
        return tree(tokens, **{NAME: cache}, use_cache=True, position_ids=positions).logits

    return run


def compiled(model: Any, ids: Tensor) -> Pass:
    """torch.compile with frozen weights and a static cache; one graph for each width."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    cache = StaticCache(config=model.config, max_cache_len=SLOTS)
    model(ids, **{NAME: cache}, use_cache=True)
    step = torch.compile(model.forward, dynamic=False, fullgraph=False)

    def run(tokens: Tensor) -> Tensor:
        positions = CONTEXT + torch.arange(tokens.shape[1])
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(CONTEXT)
        return step(tokens, **{NAME: cache}, use_cache=True, position_ids=positions[None]).logits

    return run


def compare(threads: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass by way and width, the first call's seconds, and how far the logits are from plain's."""
    torch.set_num_threads(threads)
    pair = specnb.load("smollm2-135m-q4", None, pack=False)
    model = pair.target
    ids = torch.randint(0, 40000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    tokens = {w: torch.randint(0, 40000, (1, w), generator=torch.Generator().manual_seed(w)) for w in WIDTHS}
    found: dict[str, Any] = {}
    with torch.no_grad():
        ways: dict[str, Pass] = {"transformers": plain(model, ids), "specnb, not packed": prepared(model, ids)}
        specnb.pack(model)
        ways["specnb, packed"] = prepared(model, ids)
        specnb.unpack(model)
        ways["torch.compile, frozen"] = compiled(model, ids)
        for way, run in ways.items():
            began = time.perf_counter()
            outs = {w: run(tokens[w]).clone() for w in WIDTHS}
            found[way] = {"first_seconds": time.perf_counter() - began, "ms": {w: [] for w in WIDTHS}}
            right = {w: ways["transformers"](tokens[w]) for w in WIDTHS}
            found[way]["difference"] = max(float((outs[w] - right[w]).abs().max()) for w in WIDTHS)
        for _ in range(repeats):
            for w in WIDTHS:
                for way, run in ways.items():
                    began = time.perf_counter()
                    run(tokens[w])
                    found[way]["ms"][w].append(1e3 * (time.perf_counter() - began))
    for one in found.values():
        one["ms"] = {w: statistics.median(times) for w, times in one["ms"].items()}
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    head = ["", *[f"{w} tokens" for w in WIDTHS], "first calls", "largest difference of logits"]
    lines = [head, ["---"] * len(head)]
    for way, one in found.items():
        times = [f"{one['ms'][w]:.1f} ms" for w in WIDTHS]
        lines.append([way, *times, f"{one['first_seconds']:.1f} s", f"{one['difference']:.1e}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, metavar="STEM")
    given = parser.parse_args()
    found = compare(given.threads, given.repeats)
    command = f"python -m tools.compare_runtime --threads {given.threads} --repeats {given.repeats}"
    made = (
        f"`{command}`: smollm2-135m-q4, float32, {platform.system()} {platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {date.today()}; medians of a pass behind {CONTEXT} cached tokens."
    )
    text = f"# Ways to make a pass cheaper\n\n{made}\n\n{table(found)}\n"
    print(text)
    if given.output:
        given.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        given.output.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
