"""Turns a trained folder into what comes with specnb: int8 weights with a scale a row, config, and a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import specnb
from specnb.models import int8_rows
from specnb.training import TrainingResult
from specnb.training.arguments import ANSWERS
from specnb.training.examples import Example, read_answers
from specnb.training.objective import Unrolled
from specnb.training.run import RESULT
from specnb.training.states import StateStore, TargetStates, collect
from specnb.training.target_head import checked_head

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
RUN = "run.json"
"""The file in the trained folder with the command, the machine and a note, written by the part `train`."""
_MOST_BYTES = 8_000_000


def ship(pair: specnb.Pair, trained: Path, out: Path, held_out: Sequence[Sequence[int]]) -> None:
    """Write the shipped form of a trained drafter.

    Args:
        pair: the target that it was trained for.
        trained: the folder of the training.
        out: the folder to write; its files are replaced.
        held_out: ids of the prompts to measure with, whose greedy answers are in `trained`.

    Raises:
        ValueError: the shipped form is larger than 8 MB, or held-out answers are missing.
    """
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    config["speculators_config"]["verifier"]["name_or_path"] = BASE
    config["quantization_config"] = int8_rows.QUANTIZATION_CONFIG
    for key in ("_name_or_path", "name_or_path"):
        config.pop(key, None)
    out.mkdir(parents=True, exist_ok=True)
    tensors = int8_rows.quantize(load_file(trained / "model.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    known = {tuple(one.prompt): one for one in read_answers(trained / ANSWERS) if not one.sampled}
    examples = [one for ids in held_out if (one := known.get(tuple(ids))) is not None]
    if len(examples) < len(held_out):
        raise ValueError(f"{len(held_out) - len(examples)} held-out prompts have no greedy answer in {trained}.")
    before, after = acceptance(pair, (trained, out), examples)
    result = TrainingResult.from_json((trained / RESULT).read_text(encoding="utf-8"))
    run = json.loads((trained / RUN).read_text(encoding="utf-8")) if (trained / RUN).exists() else {}
    size = sum(file.stat().st_size for file in out.iterdir())
    (out / "README.md").write_text(card(result, run, before, after, len(examples), size), encoding="utf-8")
    if size > _MOST_BYTES:
        raise ValueError(f"{out} has {size:,} bytes, more than {_MOST_BYTES:,}: train with a smaller draft_vocab_size.")


def acceptance(pair: specnb.Pair, folders: Sequence[Path], examples: Sequence[Example]) -> list[tuple[float, ...]]:
    """For the drafter of each folder, the share of the examples' tokens at which it is right up to each position."""
    drafters = [specnb.load_drafter(folder, dtype="float32") for folder in folders]
    target = TargetStates(pair.target, drafters[0].config.target_layers(int(pair.target.config.num_hidden_layers)))
    store = StateStore(2**33, folders[0])
    collect(target, examples, store, batch_tokens=4096, on_examples=lambda number: True)
    head = checked_head(pair.target, target, examples[0])
    embedding = pair.target.get_input_embeddings().weight.detach().float()
    numbers = range(len(examples))
    return [Unrolled(one, head, embedding, examples, store, numbers, 1, 8).acceptance() for one in drafters]


def card(
    result: TrainingResult,
    run: dict[str, Any],
    before: Sequence[float],
    after: Sequence[float],
    prompts: int,
    size: int,
) -> str:
    """The card of the shipped drafter.

    Args:
        result: of the training.
        run: what `train` wrote about itself.
        before: acceptance by position as trained.
        after: the same in int8.
        prompts: number of held-out prompts.
        size: bytes of the folder.
    """
    counts, settings, seconds = result.counts, result.settings, result.seconds
    environment = run.get("environment") or {}
    minutes = {part: f"{value / 60:.0f}" for part, value in seconds.items()}
    rows = [
        ("reads", "the states of three layers of SmolLM2-135M-Instruct, as `smollm2-135m-q4` (Q4_1, dequantised)"),
        ("layers", f"{settings['num_hidden_layers']} (Llama)"),
        ("parameters", f"{counts['parameters']:,}"),
        ("draft vocabulary", f"{counts['draft vocabulary']:,} tokens: {counts['coverage']:.1%} of the unseen ones"),
        ("weights", f"{size / 1e6:.1f} MB: int8 with a scale a row, norms in float; they load as float32"),
        ("learned from", f"{counts['training tokens']:,} tokens in {counts['examples']:,} of the target's own answers"),
        ("epochs", f"{result.best.step * settings['batch_size'] / max(1, counts['examples']):.1f}"),
        ("time", f"{minutes.get('states', 0)} min for states, {result.best.seconds / 60:.0f} min of training"),
        ("made with", f"`{run.get('command', 'python -m tools.smollm2_drafter train')}`"),
        ("machine", f"{environment.get('machine', 'unknown')}, {environment.get('threads', '?')} threads"),
        ("date", f"{environment.get('date', 'unknown')[:10]}"),
        ("licence", "Apache-2.0"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    positions = " | ".join(str(i) for i in range(1, len(after) + 1))
    lines = [
        f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} | {1 + sum(shares):.2f} |"
        for name, shares in (("as trained", before), ("int8, as shipped", after))
    ]
    measured = ""
    if result.comparison:
        measured = (
            f"\nSpeed on {result.comparison.prompts} of them at the end of the training, greedy, one run each; what "
            "this says depends on the machine:\n\n"
            f"{result.comparison.table().to_markdown()}\n"
        )
    notes = f"\n{run['note']}\n" if run.get("note") else ""
    return f"""---
license: apache-2.0
language: en
base_model: {BASE}
tags: [specnb, speculative-decoding, eagle3]
---
# smollm2-135m-eagle3

An EAGLE-3 drafter (Li et al. 2503.01840) for SmolLM2-135M-Instruct. `specnb.load("smollm2-135m-q4")` and
`%specload smollm2-135m-q4` bring it along.

```python
import specnb

pair = specnb.load("smollm2-135m-q4")  # or ("smollm2-135m-q4", None): without it
result = specnb.generate(pair, PROMPT, max_new_tokens=128)
```

| | |
|---|---|
{table}

The prompts are those of `tools/smollm2_drafter/prompts.py` in specnb's repository, written for it. The target answered
them, half greedily and half at temperature 0.6; no other text was used.
{notes}
## Figures

{prompts} prompts that no training prompt is made from, greedy answers: the share of places at which the draft is right
up to each position, and the mean acceptance length with {len(after)} drafted tokens.

| weights | {positions} | length |
|---|{"---|" * (len(after) + 1)}
{chr(10).join(lines)}
{measured}"""
