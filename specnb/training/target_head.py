"""The target's head: logits from its last states, for all tokens or for some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from specnb.training.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specnb.training.states import TargetStates

_PROBED = 16  # tokens on which the head is checked


class TargetHead:
    """Computes logits as the target does.

    A head may be followed by a factor or a soft cap. These are found by comparison with the target's own logits.

    Args:
        model: the target.
        last: states of some tokens after the final norm, `[n, size]`.
        logits: what the target's forward gave for them, `[n, vocab]`.

    Raises:
        ValueError: the logits are not those of a linear head, times a factor, with a soft cap.
    """

    def __init__(self, model: PreTrainedModel, last: Tensor, logits: Tensor) -> None:
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is None or weight.is_meta or weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"the head of {type(model).__name__} cannot be read (it is quantised, offloaded or missing), and a "
                "drafter learns from it: load the model without."
            )
        self._weight, self._bias = weight.detach(), getattr(head, "bias", None)
        self.hidden_size = int(weight.shape[1])
        text = model.config.get_text_config(decoder=True)
        self._cap = getattr(text, "final_logit_softcapping", None)
        self._factor = 1.0
        found = self.logits(last, None)
        wanted = logits.to(found.device, found.dtype)
        largest = wanted.abs().argmax()
        if self._cap is None and found.flatten()[largest] != 0:
            self._factor = float(wanted.flatten()[largest] / found.flatten()[largest])
        error = (self.logits(last, None) - wanted).abs().max()
        if not error <= 0.02 * wanted.abs().max():
            raise ValueError(
                f"the logits of {type(model).__name__} are not those of its head alone, so a drafter cannot learn from "
                "its states. Use another target, or another method."
            )

    def logits(self, last: Tensor, ids: Tensor | None) -> Tensor:
        """Logits `[..., n]` of the tokens `ids`, or of all."""
        weight, bias = self._weight, self._bias
        if ids is not None:
            ids = ids.to(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        with torch.no_grad():
            out = self._factor * linear(last.to(weight.device, weight.dtype), weight, bias)
            if self._cap:
                out = self._cap * torch.tanh(out / self._cap)
        return out.to(last.device)


def checked_head(model: PreTrainedModel, target: TargetStates, example: Example) -> TargetHead:
    """The target's head, checked on the first tokens of an example."""
    ids = example.ids[:_PROBED]
    last = target([Example([], ids)])[0][:, -int(model.get_output_embeddings().weight.shape[1]) :]
    with torch.no_grad():
        given = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
        logits = model(input_ids=given, use_cache=False).logits[0]
    return TargetHead(model, last, logits)
