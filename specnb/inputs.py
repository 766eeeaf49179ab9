"""What a call is given: models, and prompts as texts or ids. Checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specnb.models import Pair
from specnb.text import text_tokenizer


def unwrapped(name: str, model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The model itself where a `Pair` was given, with the pair's tokenizer if there is no other. ValueError for a name or another thing."""
    if isinstance(model, Pair):
        return model.target, model.tokenizer if tokenizer is None else tokenizer
    if model is not None and not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, PreTrainedModel):
            raise ValueError(
                f"{name} is what torch.compile() made of a {type(inner).__name__}; give the model itself. (model.compile() compiles in place.)"
            )
        what = f"the name {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        load = f"specnb.load({model!r})" if isinstance(model, str) else "specnb.load(NAME)"
        raise ValueError(f"{name} must be a model or a Pair, not {what}: load it first with {load}.")
    return model, tokenizer


def check_arguments(model: Any, streamer: Any, generation_config: Any) -> None:
    """Raise ValueError for a model, streamer or generation config that is none."""
    if model is None:
        raise ValueError("model is None: load one with specnb.load(NAME).")
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise ValueError(
            f"streamer must have put() and end(), as transformers' TextStreamer has; a {type(streamer).__name__} has not."
        )
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ValueError(
            f"generation_config must be a GenerationConfig, not a {type(generation_config).__name__}; options can be given by name."
        )


def encode(model: PreTrainedModel, inputs: Any, passed: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Arguments for `generate()` with texts turned into a left-padded batch."""
    if inputs is None:
        return passed
    if "input_ids" in passed:
        raise ValueError("the prompt was given twice: as `inputs` and as `input_ids`.")
    if isinstance(inputs, Tensor):
        return passed | {"inputs": inputs}
    if isinstance(inputs, (list, tuple)) and not inputs:
        raise ValueError("inputs is an empty list; give at least one text.")
    texts = [inputs] if isinstance(inputs, str) else list(inputs) if isinstance(inputs, (list, tuple)) else []
    if not texts or not all(isinstance(t, str) for t in texts):
        raise TypeError(f"inputs must be token ids, a text or a list of texts, not {type(inputs).__name__}.")
    if tokenizer is None:
        raise ValueError("a text needs tokenizer= (or a Pair from specnb.load); else give token ids.")
    tokenizer = text_tokenizer(tokenizer)
    rows = [tokenizer(t)["input_ids"] for t in texts]
    if not all(rows):
        raise ValueError("an empty text has no tokens to continue; give some text.")
    width = max(map(len, rows))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return passed | {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def check_prompt(model: PreTrainedModel, passed: Mapping[str, Any]) -> None:
    """Raise ValueError for ids or a mask that cannot be a prompt's, naming what is wrong."""
    ids = passed.get("input_ids", passed.get("inputs"))
    if ids is None:
        if passed.get("inputs_embeds") is None:
            raise ValueError("there is no prompt: give a text, a list of texts, or token ids [rows, length].")
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        found = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"token ids must be a tensor of whole numbers [rows, length], not {found}.")
    rows = int(model.get_input_embeddings().weight.shape[0])
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise ValueError(
            f"the prompt holds the id {low if low < 0 else high}, but {type(model).__name__} has the ids 0 to {rows - 1}."
        )
    mask = passed.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has the shape {list(mask.shape)}, the prompt {list(ids.shape)}; they must be the same."
        )
