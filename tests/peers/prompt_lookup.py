"""Prompt lookup against other packages, on the built-in suite.

    python tests/peers/prompt_lookup.py [--threads 1] [--repeats 3] [--device cpu]

All run the same SmolLM2-135M-Instruct in float32 in one process, taking turns; plain decoding is transformers' own.
Packages that are not installed are left out (`pip install --no-deps flashspec==0.3.1 economize==0.3.2`; flashspec needs
pydantic too). Per kind of prompt: the median over the prompts of plain seconds / seconds, where the seconds of a prompt
are the median over the repeats. Every text is compared with plain decoding's. On a GPU (`--device cuda`; not tried yet)
specnb runs with CUDA graphs and without, and transformers' compiled `generate()` beside its plain one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import specnb
from specnb.bench import environment
from specnb.bench.prompts import PROMPTS
from specnb.text import prompt_inputs

Arm = Callable[[torch.Tensor, int], list[int]]


def arms(pair: Any, without_prepacking: Any, k: int) -> dict[str, Arm]:
    """What is compared: functions from a prompt `[1, length]` to the new ids. `without_prepacking`: the same pair."""
    model = without_prepacking.target
    eos, device = model.generation_config.eos_token_id, model.device

    def theirs(ids: torch.Tensor, new: int, **options: Any) -> list[int]:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
        return out[0, ids.shape[1] :].tolist()

    def ours(ids: torch.Tensor, new: int, target: Any = pair.target, **options: Any) -> list[int]:
        mask = torch.ones_like(ids)
        return list(
            specnb.generate(target, ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options).ids
        )

    found: dict[str, Arm] = {
        "plain": theirs,
        "transformers": lambda ids, new: theirs(ids, new, prompt_lookup_num_tokens=k),
        "specnb": lambda ids, new: ours(ids, new, method="prompt_lookup"),
        f"specnb, k={k}": lambda ids, new: ours(ids, new, prompt_lookup_num_tokens=k),
        f"specnb, k={k}, not prepacked": lambda ids, new: ours(ids, new, model, prompt_lookup_num_tokens=k),
        "specnb plain": ours,
    }
    if device.type == "cuda":
        specnb.cuda_graphs(pair.target)
        del found[f"specnb, k={k}, not prepacked"]
        found["specnb, no CUDA graphs"] = lambda ids, new: ours(ids, new, model, method="prompt_lookup")
        found["transformers plain, compiled"] = lambda ids, new: theirs(ids, new, cache_implementation="static")
    try:
        import economize
        from economize.techniques.lookup import LookupConfig

        lookup = economize.apply(model, LookupConfig())
        cycle = economize.DecodeConfig(cycle_length=k + 1)
        found["economize"] = lambda ids, new: lookup.decode(ids[0], new, decoding=cycle, stop=eos).tokens.tolist()
    except ImportError:
        print("economize is not installed: left out")
    try:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine.ngram import NgramDrafter
        from flashspec.engine.verifier import TargetModel

        config = FlashSpecConfig(
            drafter_name="ngram",
            target_name="smollm2",
            device=str(device),
            dtype="float32",
            eos_token_ids=(eos,),
            drafter_strategy="bandit",
            bandit=BanditConfig(n_arms=1),
            sampling=SamplingConfig(gamma=k, temperature=0.0, variant="greedy"),
        )
        wrapped = TargetModel("smollm2", device, torch.float32, model=model)
        engine = SpeculativeEngine(config, [NgramDrafter()], wrapped)
        found["flashspec"] = lambda ids, new: [
            token
            for token in engine.generate(ids, max_new_tokens=new).output_ids[0].tolist()
            if token >= 0  # -1 is padding
        ]
    except ImportError:
        print("flashspec is not installed: left out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-assistant-tokens", type=int, default=8)
    parser.add_argument("--kinds", nargs="*", default=["edit code", "summarise", "open story"])
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    pair, without_prepacking = (
        specnb.load("smollm2-135m-q4", None, pack=pack, device_map=args.device) for pack in (True, False)
    )
    compared = arms(pair, without_prepacking, args.num_assistant_tokens)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    same = dict.fromkeys(compared, True)
    for kind in args.kinds:
        for prompt in PROMPTS[kind][: args.prompts]:
            ids = prompt_inputs(pair.tokenizer, prompt, device=args.device)["input_ids"]
            seconds: dict[str, list[float]] = defaultdict(list)
            for turn in range(args.repeats + 1):
                texts = {}
                for name, arm in compared.items():
                    began = time.perf_counter()
                    texts[name] = arm(ids, args.max_new_tokens)
                    if turn:  # the first round is a warm-up
                        seconds[name].append(time.perf_counter() - began)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            for name in compared:
                ratios[kind][name].append(medians["plain"] / medians[name])
                same[name] &= texts[name] == texts["plain"]
    where = environment(pair) | {
        "k": args.num_assistant_tokens,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
    }
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    print(
        f"\n{'x plain, median (lowest) of the prompts':<42}"
        + "".join(f"{kind:>22}" for kind in args.kinds)
        + "  same text"
    )
    for name in compared:
        cells = [f"{statistics.median(ratios[kind][name]):.2f} ({min(ratios[kind][name]):.2f})" for kind in args.kinds]
        print(f"{name:<42}" + "".join(f"{cell:>22}" for cell in cells) + f"  {'yes' if same[name] else 'NO'}")
    if args.json:
        args.json.write_text(json.dumps({"environment": where, "x_plain": ratios, "same_text": same}, indent=1) + "\n")


if __name__ == "__main__":
    main()
