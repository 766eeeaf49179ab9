"""Measure the embedded checkpoints and write their cards: `python -m tools.embedded_models.cards`.

Figures go to `results.json` beside this file, and into the README.md of each model's folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from specnb.models.embedded import FOLDER
from tools.embedded_models.data import FRESH, held_out
from tools.embedded_models.measure import MEASURES, Bench, text_of

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

WHAT = {
    "tiny-llama": (
        "A target model. Its layers 2 and 3 were also trained to say what the whole model says (early-exit "
        "loss in the manner of LayerSkip, arXiv 2404.16710), so that it can draft for itself with "
        "`assistant_early_exit=2` or `3`."
    ),
    "tiny-llama-draft": (
        "The draft model of `tiny-llama`: the same tokenizer, fewer and narrower layers, distilled from the "
        "target's probabilities, half of the text being the target's own greedy answers."
    ),
    "tiny-llama-other": (
        "A draft model for `tiny-llama` with a tokenizer of another kind (marked spaces, byte fallback, 896 "
        "tokens), for universal assisted decoding. It learnt from texts: two thirds the target's own greedy "
        "answers, one third the training text."
    ),
    "tiny-gemma4": (
        "A target model with what Gemma 4's small models have: sliding-window and full attention in turn, "
        "last layers that read keys and values of earlier ones, a small input of its own for each layer "
        "(per-layer embeddings), soft-capped logits."
    ),
    "tiny-gemma4-assistant": (
        "The multi-token-prediction drafter of `tiny-gemma4`: four layers without keys and values of their "
        "own. It reads the target's embedding of the last token beside the target's last hidden state (then "
        "its own), stands at a constant position, and attends to the target's keys and values. Trained just "
        "so, four tokens deep, on the target's probabilities."
    ),
    "tiny-glm4-moe": (
        "A target model with mixture-of-experts layers (8 routed experts, 2 of them active, 1 shared) and one "
        "multi-token-prediction layer, stored as in the released checkpoints (`model.layers.4.enorm`, "
        "`hnorm`, `eh_proj`, `shared_head.norm` and a decoder block). The MTP loss was added to the main one; "
        "the layer also learnt to go on from its own output."
    ),
    "tiny-glm4-moe-mtp2": (
        "Like `tiny-glm4-moe`, with two multi-token-prediction layers (`model.layers.4` and "
        "`model.layers.5`): the first learnt to guess the second next token, the other, which reads the first "
        "one's states, the third."
    ),
    "tiny-qwen3-5": (
        "A hybrid target model: three layers of linear attention (gated delta rule), whose running states cannot be "
        "cropped, one of full attention, and one multi-token-prediction layer, stored as in the released checkpoints "
        "(`mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.norm`, `mtp.layers.0`). The MTP loss "
        "was added to the main one; the layer also learnt to go on from its own output."
    ),
}

USE = {
    "tiny-llama": 'pair = specnb.load("tiny-llama")\nresult = specnb.generate(pair, PROMPT, assistant_early_exit=2)',
    "tiny-llama-draft": 'pair = specnb.load("tiny-llama", assistant="tiny-llama-draft")\n'
    "result = specnb.generate(pair, PROMPT)",
    "tiny-llama-other": 'pair = specnb.load("tiny-llama", assistant="tiny-llama-other")\n'
    "result = specnb.generate(pair, PROMPT)",
    "tiny-gemma4": 'pair = specnb.load("tiny-gemma4")\n'
    "result = specnb.generate(pair, PROMPT, prompt_lookup_num_tokens=5)",
    "tiny-gemma4-assistant": 'pair = specnb.load("tiny-gemma4", assistant="tiny-gemma4-assistant")\n'
    "result = specnb.generate(pair, PROMPT, num_assistant_tokens=4)",
    "tiny-glm4-moe": 'pair = specnb.load("tiny-glm4-moe")\n'
    "result = specnb.generate(pair, PROMPT, use_mtp=True, num_assistant_tokens=1)",
    "tiny-glm4-moe-mtp2": 'pair = specnb.load("tiny-glm4-moe-mtp2")\n'
    "result = specnb.generate(pair, PROMPT, use_mtp=True, num_assistant_tokens=2)",
    "tiny-qwen3-5": 'pair = specnb.load("tiny-qwen3-5")\n'
    "result = specnb.generate(pair, PROMPT, use_mtp=True, num_assistant_tokens=1)",
}

CARD = """---
license: apache-2.0
language: en
library_name: transformers
tags: [specnb, speculative-decoding, tiny]
---
# {name}

{what}

It is for learning and for tests, not for knowledge: it speaks of the small world of its training text only.

```python
import specnb

{use}
```

`PROMPT` is a chat: `"<|user|>Tell me a story about a fox who finds a bell.<|end|>\\n<|assistant|>"`, or what the
tokenizer's chat template makes of a message. The folder loads with `AutoModelForCausalLM.from_pretrained` and
`AutoTokenizer.from_pretrained`.

| | |
|---|---|
| class | `{architecture}` |
| layers, width | {layers}, {hidden} |
| parameters | {parameters:,} |
| tokenizer | {vocab} tokens |
| context | trained on texts of up to 256 tokens |
| weights | {size:.1f} MB; rounded to float16 after training and stored so, loaded as float32 without loss |
| licence | Apache-2.0 |

## Training

The text was written by the seeded program `tools/embedded_models/data.py` of specnb's repository (stories, questions
about a text, summaries, edits of texts and of code, lists, instructions, small talk); nothing was taken from elsewhere.
Training took {steps:,} steps, {tokens:,} tokens and {minutes:.0f} minutes on one shared CPU core. `log.json` beside
that program is its log, `train.py` repeats it (`../README.md` says how closely).

## Figures

Greedy decoding of {prompts} held-out prompts ({kinds}: combinations that appear in no training text),
by `tools/embedded_models/cards.py`. Every text is the target's plain greedy one, token for token. Acceptance length
counts the target's own token.

| method | mean acceptance length | drafts accepted | by position |
|---|---|---|---|
{figures}

By kind of prompt ({first}): {by_kind}.

The target's own answers: {ended} of {prompts} end by themselves; word for word what the prompt calls for (stories
may be told differently): {exact}.
{example}"""


def figures(entry: dict[str, Any]) -> str:
    """A line of the table of figures."""
    positions = ", ".join(f"{rate:.2f}" for rate in entry["acceptance_rate_by_position"])
    accepted = f"{entry['draft_acceptance_rate']:.0%}"
    return f"| {entry['measure']} | {entry['mean_acceptance_length']:.2f} | {accepted} | {positions} |"


def card(name: str, bench: Bench, results: dict[str, Any], log: dict[str, Any]) -> str:
    """The text of a model's card."""
    model, tokenizer = bench.model(name)
    text = model.config.get_text_config()
    main, quality = results["measures"][0], results["quality"]
    stored = bench.folder / name / "model.safetensors"
    target = MEASURES[name][0].target or name
    example = ""
    if target == name:
        blocks = []
        for index in range(0, quality["prompts"], bench.per_kind):
            asked = held_out(bench.per_kind)[index][0]
            blocks.append(f"user: {asked}\n\nassistant: {text_of(bench.plainly(name)[index])}\n")
        example = (
            "\n## What it writes\n\nIts greedy answers to the first held-out prompt of each kind:\n\n~~~\n"
            + "\n".join(blocks)
            + "~~~\n"
        )
    return CARD.format(
        name=name,
        what=WHAT[name],
        use=USE[name],
        architecture=type(model).__name__,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        parameters=stored_parameters(stored),
        vocab=len(tokenizer),
        size=stored.stat().st_size / 1e6,
        steps=log["steps"],
        tokens=log["tokens"],
        minutes=max(1, log["seconds"] / 60),
        prompts=quality["prompts"],
        kinds=", ".join(FRESH),
        figures="\n".join(map(figures, results["measures"])),
        first=main["measure"],
        by_kind=", ".join(f"{kind} {value:.2f}" for kind, value in main["mean_acceptance_length_by_kind"].items()),
        ended=quality["ended"],
        exact=", ".join(f"{kind} {count} of {bench.per_kind}" for kind, count in quality["exact"].items()),
        example=example,
    )


def stored_parameters(file: Path) -> int:
    """Numbers in a safetensors file, MTP layers included."""
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the embedded checkpoints and write their cards.")
    parser.add_argument("--only", choices=list(MEASURES), help="one model")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder with the models' folders")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bench = Bench(arguments.folder)
    logs = json.loads((HERE / "log.json").read_text(encoding="utf-8"))
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in [arguments.only] if arguments.only else MEASURES:
        measures = [bench.run(name, measure) for measure in MEASURES[name]]
        results[name] = {"quality": bench.quality(MEASURES[name][0].target or name), "measures": measures}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (arguments.folder / name / "README.md").write_text(
            card(name, bench, results[name], logs[name]), encoding="utf-8"
        )
        print(name, *map(figures, measures), results[name]["quality"], sep="\n  ")


if __name__ == "__main__":
    main()
