"""Small models that come inside specnb: trained by `training/`, in transformers' own format, on real architectures.

They are for learning and tests; they know nothing but the small world of their training text.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""Holds a folder for each of the models, which `AutoModelForCausalLM.from_pretrained` loads like one from the hub."""

DEFAULT = ("tiny-llama", "tiny-llama-draft")
"""The target and the draft model that stand in where no model is named."""

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
}
"""What each model is, in a line."""
