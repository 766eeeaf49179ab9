"""The Gemma 4 MTP drafter: a small model without a cache that attends to the target's keys and values.

Its input is the target's embedding of the last token beside the target's last hidden state, then its own projected state;
its position stays that of the last token. Gemma 4 multi-token prediction guide, Google 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Draft, Row
from specnb.drafters.growing import Drawing, Growing


class Gemma4Assistant:
    """Drafts from the target's state after each pass; `target` must keep its hidden states."""

    drafts_first = False

    def __init__(self, assistant: PreTrainedModel, target: CachedLM, drawing: Drawing) -> None:
        self.assistant, self.target, self.drawing = assistant, target, drawing
        self.embed = target.model.get_input_embeddings()
        types = target.config.layer_types
        self.sources = {types[i]: i for i, layer in enumerate(target.store.layers) if layer in target.store.row_layers}

    def propose(self, rows: Sequence[Row], room: Sequence[int]) -> list[Draft]:
        self.target.store.follow([row.index for row in rows])
        return [self._propose(r, row, n) for r, (row, n) in enumerate(zip(rows, room, strict=True))]

    def _propose(self, r: int, row: Row, room: int) -> Draft:
        draft = Growing(row, room, self.drawing)
        if not draft.open:
            return draft.draft()
        last = len(row.ids) - 1  # the last token, which the target has not processed yet
        start, states = self.target.hidden[row.index]
        state = states[None, last - 1 - start : last - start]
        shared = {kind: self._shared(r, layer, last) for kind, layer in self.sources.items()}
        position = torch.tensor([[last]], device=self.target.device)
        token = row.ids[-1]
        while draft.open:
            embedded = self.embed(torch.tensor([[token]], device=self.target.device))
            with torch.no_grad():
                out = self.assistant(inputs_embeds=torch.cat([embedded, state.to(embedded.device)], -1), position_ids=position,
                                     shared_kv_states=shared, attention_mask=None)  # fmt: skip
            state = out.last_hidden_state
            draft.add(out.logits[0, -1])
            token = draft.tokens[-1]
        return draft.draft()

    def _shared(self, r: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """One row's keys and values of a layer: of committed tokens only, and no further back than a window reaches."""
        store: Any = self.target.store.layers[layer]
        first = 0 if store.window is None else max(0, length - store.window - 1)
        return store.keys[r : r + 1, :, first:length], store.values[r : r + 1, :, first:length]


def is_gemma4_assistant(model: Any) -> bool:
    """Whether `model` is a drafter of this kind."""
    return type(model).__name__ in ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def check_assistant(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Raise ValueError, naming both, for a drafter that was made for another target."""
    config, own = target.config.get_text_config(decoder=True), assistant.config.get_text_config(decoder=True)
    names = f"{type(assistant).__name__} cannot draft for {type(target).__name__}"
    if not str(config.model_type).startswith("gemma4"):
        raise ValueError(f"{names}: it attends to the keys and values of a Gemma 4 target.")
    if assistant.config.backbone_hidden_size != config.hidden_size:
        raise ValueError(
            f"{names}: it was made for a hidden size of {assistant.config.backbone_hidden_size}, the target has "
            f"{config.hidden_size}. Use the assistant of the same name as the target."
        )
    if own.vocab_size != config.vocab_size:
        raise ValueError(f"{names}: its vocabulary has {own.vocab_size} tokens, the target's {config.vocab_size}.")
    theirs, mine = _attentions(target), _attentions(assistant)
    missing = mine.keys() - theirs.keys()
    if missing:
        raise ValueError(
            f"{names}: it needs keys and values of {', '.join(sorted(missing))} layers, which the target does not share."
        )
    for kind, attention in mine.items():
        shape, wanted = _heads(theirs[kind]), _heads(attention)
        if shape != wanted:
            raise ValueError(
                f"{names}: its {kind} layers read {wanted[0]} key/value heads of size {wanted[1]}, the target has {shape[0]} of size "
                f"{shape[1]}."
            )


def _attentions(model: PreTrainedModel) -> dict[str, Any]:
    """The attention module per kind of layer whose keys and values are shared: the last of the kind that has its own, if any."""
    found: dict[str, Any] = {}
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        if hasattr(attention, "k_proj") or attention.layer_type not in found:
            found[attention.layer_type] = attention
    return found


def _heads(attention: Any) -> tuple[int, int]:
    """Number and size of the key/value heads that an attention module works with."""
    return attention.q_proj.out_features // attention.head_dim // attention.num_key_value_groups, attention.head_dim
