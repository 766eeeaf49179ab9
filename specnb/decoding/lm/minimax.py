"""MiniMax: linear attention states beside the cache's layers, and the masks that its code gets wrong.

Its code asks the first layer how much is cached. Where that is linear attention, as in the released models, it takes
the cache to be empty, and masks a pass of several tokens as a prompt. It takes ready-made masks by kind of layer, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.lm.model_inputs import forward_parameters


def is_minimax(model: PreTrainedModel) -> bool:
    """Whether the model is of the family."""
    return bool(model.config.model_type == "minimax")


def takes_masks(model: PreTrainedModel) -> bool:
    """Whether a MiniMax can be given its masks: its attention reads them, and nothing else does (a loss would).

    Its code loses a sliding window, too, token by token. Released models have none. Before transformers 5.24, its
    attention does not take these masks.
    """
    config = model.config
    usual = getattr(config, "sliding_window", None) is None and not getattr(config, "output_router_logits", False)
    usual &= compat.cache_keyword(forward_parameters(type(model))) == compat.CACHE_NAMES[0]
    return usual and compat.attention_implementation(config) in ("sdpa", "eager")


def masks(model: PreTrainedModel, start: int, width: int) -> dict[str, Tensor | None]:
    """The masks, by kind of layer, of `width` tokens of one row without padding, after `start` tokens in the cache."""
    device = model.get_input_embeddings().weight.device
    queries, keys = (
        torch.arange(start, start + width, device=device)[:, None],
        torch.arange(start + width, device=device),
    )
    seen = keys <= queries
    if compat.attention_implementation(model.config) == "eager":
        blocked = torch.finfo(model.dtype).min
        seen = torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill(~seen, blocked)
    return {"full_attention": seen[None, None], "linear_attention": None}
