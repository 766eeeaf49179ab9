"""Models that come with specnb: tiny ones in transformers' format, of real architectures, and a drafter of a real one.

The tiny ones are for learning and tests, and only know the topics of their training text. `tools/embedded_models`
trains them, `tools/smollm2_drafter` the drafter.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""Has one folder per model; those of `CARDS` are loaded by `AutoModelForCausalLM.from_pretrained`, too."""

DEFAULT = ("tiny-llama", "tiny-llama-draft")
"""The target and the draft model that are used where no model is named."""

_END = " Trained by specnb on a text of its own making; for learning and tests. Licence: Apache-2.0."

CARDS = {
    "tiny-llama": "Tiny Llama (5 layers), trained with early exits: assistant_early_exit=2 or 3 pays." + _END,
    "tiny-llama-draft": "Draft model for tiny-llama: Llama, 2 layers, same tokenizer, distilled from it." + _END,
    "tiny-llama-other": "Draft model for tiny-llama with another tokenizer: Llama, 2 layers." + _END,
    "tiny-gemma4": "Tiny Gemma 4 (6 layers: sliding and full attention, shared keys and values, per-layer inputs)."
    + _END,
    "tiny-gemma4-assistant": "Gemma 4 drafter for tiny-gemma4: 4 layers that read its keys and values." + _END,
    "tiny-glm4-moe": "Tiny GLM-4 MoE (4 layers, 8 experts) with a multi-token-prediction layer: use_mtp=True." + _END,
    "tiny-glm4-moe-mtp2": "Tiny GLM-4 MoE like tiny-glm4-moe, with two multi-token-prediction layers: use_mtp=True."
    + _END,
    "tiny-qwen3-5": "Tiny Qwen3.5 (3 layers of linear attention, 1 of full attention) with a multi-token-prediction "
    "layer: use_mtp=True." + _END,
}
"""One line about each tiny model."""

DRAFTERS = {
    "smollm2-135m-eagle3": "EAGLE-3 drafter for smollm2-135m-q4: 1 layer, stored in int8 with a scale a row. A "
    "placeholder: it is not trained yet. Licence: Apache-2.0.",
}
"""One line about each drafter of a model that does not come with specnb."""
