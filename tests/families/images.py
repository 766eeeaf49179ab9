"""An image for a tiny image-text model, made by hand: no processor, only the tensors that its forward pass reads.

What shapes a model takes is found by trying: a few layouts of patches, the number of image tokens counted from the
model's own features, and the proof that the image is read: other pixels give other logits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .layouts import Pixels, layouts

BEFORE = [5, 17]
AFTER = [23, 42, 5, 17, 61, 5, 17, 23, 42]
_IMAGE_IDS = ("image_token_id", "image_token_index", "image_patch_id", "img_token_id")
_START_IDS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index", "image_bos_token_id")
_END_IDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")


class NoImage(Exception):
    """No layout of pixels is known that the model takes."""


def image_inputs(model: PreTrainedModel, seed: int = 0, more: int = 0) -> dict[str, Any]:
    """What `generate()` needs for a prompt of one row with one image; `more` further text tokens at its end.

    Raises NoImage where no layout is known that the model takes.
    """
    reasons: dict[str, None] = {}
    for pixels in layouts(model):
        for count in _counts(model, pixels):
            try:
                made = _prompt(model, pixels.make(seed), count, more)
                other = _prompt(model, pixels.make(seed + 1000), count, more)
                if _reads(model, made, other):
                    return made
                reasons["the image is not read"] = None
            except Exception as error:
                reasons[f"{pixels.name}: {type(error).__name__} {' '.join(str(error).split())[:100]}"] = None
    raise NoImage("; ".join(reasons or ["no layout fits"])[:400])


def two_rows(model: PreTrainedModel) -> dict[str, Any]:
    """Two prompts with an image each, the shorter one padded on the left."""
    short, long = image_inputs(model, seed=0), image_inputs(model, seed=1, more=3)
    pad = long["input_ids"].shape[1] - short["input_ids"].shape[1]
    width = short["input_ids"].shape[1]
    rows = {}
    for name, value in short.items():
        other = long[name]
        if value.shape[:2] == (1, width):  # one value per token
            value = torch.cat([torch.zeros(1, pad, *value.shape[2:], dtype=value.dtype), value], 1)
        rows[name] = torch.cat([value, other])
    return rows


def _counts(model: PreTrainedModel, pixels: Pixels) -> Iterator[int]:
    """Candidates for the number of image tokens in the prompt."""
    if pixels.tokens is not None:
        yield pixels.tokens
        return
    for owner in (model, getattr(model, "model", None)):
        features = getattr(owner, "get_image_features", None)
        if features is None:
            continue
        given = {
            name: value for name, value in pixels.make(0).items() if name in inspect.signature(features).parameters
        }
        try:
            with torch.no_grad():
                found = features(**given)
        except Exception:
            continue
        yield _rows_of(found)
        return
    yield from (16, 4, 17, 1)


def _rows_of(features: Any) -> int:
    """How many token states are in image features of whatever type."""
    pooled = getattr(features, "pooler_output", None)
    features = pooled if pooled is not None else getattr(features, "last_hidden_state", features)
    if isinstance(features, Tensor):
        return math.prod(features.shape[:-1])
    return sum(_rows_of(one) for one in features if one is not None)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _prompt(model: PreTrainedModel, tensors: dict[str, Tensor], count: int, more: int) -> dict[str, Any]:
    """Ids, mask and per-token tensors around the image's."""
    config = model.config
    image, start, end = (_first(config, names) for names in (_IMAGE_IDS, _START_IDS, _END_IDS))
    image = 97 if image is None else image
    ids = [*BEFORE, *([] if start is None else [start]), *[image] * count, *([] if end is None else [end])]
    ids += [*AFTER, *(31 + i for i in range(more))]
    row = torch.tensor([ids])
    seen = (row == image).long()
    takes = inspect.signature(type(model).forward).parameters
    per_token: dict[str, Tensor] = {}
    if "mm_token_type_ids" in takes:
        per_token["mm_token_type_ids"] = seen
    if "moe_mm_token_type_ids" in takes:
        per_token["moe_mm_token_type_ids"] = seen.bool()
    if "token_type_ids" in takes:
        per_token["token_type_ids"] = torch.zeros_like(row) if "PaliGemma" in type(model).__name__ else seen
    if "image_embeds_position_mask" in takes:
        per_token["image_embeds_position_mask"] = seen if "2_5" in type(model).__name__ else seen.bool()
    if "cross_attention_mask" in takes:
        tiles = tensors["aspect_ratio_mask"].shape[-1]
        per_token["cross_attention_mask"] = torch.ones(1, len(ids), 1, tiles, dtype=torch.long)
    if "image_attention_mask" in takes:
        per_token["image_attention_mask"] = torch.ones(1, len(ids), 1, dtype=torch.long)
    return {"input_ids": row, "attention_mask": torch.ones_like(row), **tensors, **per_token}


def _reads(model: PreTrainedModel, made: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether generate() runs, and other pixels give other logits."""
    settings = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    first, second = (model.generate(**given, **settings).logits[0] for given in (made, other))
    return bool(torch.isfinite(first).all()) and not torch.allclose(first, second, atol=1e-5)
