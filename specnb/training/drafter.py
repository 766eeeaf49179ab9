"""A new drafter for a target: its draft vocabulary, its shape, and its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specnb.models.eagle3 import Eagle3Config, Eagle3Drafter
from specnb.runtime.module_view import layers_path
from specnb.training.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALL = 0.1
"""Factor of the random weights with which the lower layers' states enter at first."""
_PROPOSED = 3  # tokens, as the default of servers


def default_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The three layers of the target that a drafter reads: 2, n // 2 and n - 3 of n.

    A target with fewer than seven layers has other ones, all different, since vLLM reads three different ones. With
    fewer than four layers some come twice; vLLM has no place for such a drafter.
    """
    depth = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if depth >= 7:
        return 2, depth // 2, depth - 3
    last = max(1, min(4, depth - 1))
    return max(1, last - 2), max(1, last - 1), last


def draft_vocabulary(examples: Iterable[Example], size: int) -> Tensor:
    """The ids that the drafter can propose, in rising order: those that are most frequent in the answers.

    Args:
        size: how many at most.
    """
    counts = Counter(token for example in examples for token in example.answer)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[:size]  # equal counts: the same on each run
    return torch.tensor(sorted(frequent), dtype=torch.long)


def new_drafter(
    model: PreTrainedModel, layers: Sequence[int], vocabulary: Tensor, num_hidden_layers: int, seed: int
) -> Eagle3Drafter:
    """A drafter before training: it passes the top state on, and starts from copies of the target's own weights.

    Attention, MLP and norms of the target's last layer are copied where they have the drafter's shape.

    Args:
        layers: the target's layers that it reads, in transformers' numbering.
        vocabulary: the ids that it can draft, `[draft vocab]`, in rising order.
        num_hidden_layers: number of its layers.
        seed: of the random weights.
    """
    source = _last_layer(model)
    config = _config(model, source, layers, len(vocabulary), num_hidden_layers)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config)
        drafter.float()
        size, read = config.hidden_size, len(layers)
        with torch.no_grad():
            drafter.fc.weight.mul_(_SMALL)
            drafter.fc.weight[:, (read - 1) * size :] += torch.eye(size)
            for layer in drafter.layers:
                _copy_layer(layer, source, size)
            _copy(drafter.norm, _final_norm(model))
            head = model.get_output_embeddings().weight
            drafter.lm_head.weight.copy_(head[vocabulary.to(head.device)])
            buffers: Any = drafter
            buffers.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
            buffers.t2d.zero_()[vocabulary] = True
    return drafter


def _config(
    model: PreTrainedModel, source: Any, layers: Sequence[int], vocab: int, num_hidden_layers: int
) -> Eagle3Config:
    from transformers import LlamaConfig

    text = model.config.get_text_config(decoder=True)
    size = int(text.hidden_size)
    heads, head_dim, groups = _attention_shape(size, source)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0  # absent where layers differ
    layer = LlamaConfig(
        vocab_size=int(text.vocab_size),
        hidden_size=size,
        intermediate_size=_shape(getattr(source, "mlp", None), "gate_proj", 0) or 3 * size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 4096,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": float(theta)},
        tie_word_embeddings=False,
    )
    verifier = {"name_or_path": str(model.config.name_or_path or ""), "architectures": [type(model).__name__]}
    return Eagle3Config(
        architectures=["Eagle3Speculator"],
        transformer_layer_config=layer,
        draft_vocab_size=vocab,
        eagle_aux_hidden_state_layer_ids=list(layers),
        speculators_config={
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _PROPOSED}],
            "verifier": verifier,
        },
        tie_word_embeddings=False,
    )


def _attention_shape(size: int, source: Any) -> tuple[int, int, int]:
    """Heads, their size, and heads of keys and values: the target's, or heads of 64 where it has none of that kind.

    They are read from the modules, since configs may differ by layer.
    """
    attention = getattr(source, "self_attn", None)
    head_dim = getattr(attention, "head_dim", None)
    inner, keys = _shape(attention, "o_proj", 1), _shape(attention, "k_proj", 0)
    if isinstance(head_dim, int) and head_dim % 2 == 0 and inner and keys and not inner % head_dim + keys % head_dim:
        heads, groups = inner // head_dim, keys // head_dim
        if heads % groups == 0:
            return heads, head_dim, groups
    head_dim = next(d for d in (64, 32, 16, 8, 4, 2) if size % d == 0)
    return size // head_dim, head_dim, size // head_dim


def _shape(module: Any, name: str, dim: int) -> int:
    """A dimension of a linear layer's weight; 0 if there is no such layer."""
    weight = getattr(getattr(module, name, None), "weight", None)
    return int(weight.shape[dim]) if isinstance(weight, Tensor) and weight.dim() == 2 else 0


def _last_layer(model: PreTrainedModel) -> nn.Module | None:
    """The target's last layer that has an attention; None if it has no plain stack."""
    try:
        layers: Any = model.get_submodule(layers_path(model))
    except ValueError:
        return None
    return next((layer for layer in reversed(layers) if hasattr(layer, "self_attn")), None)


def _final_norm(model: PreTrainedModel) -> Any:
    return getattr(model.get_decoder(), "norm", None)


def _copy_layer(layer: Any, source: Any, size: int) -> None:
    """Copy what fits from a layer of the target. The first layer also reads embeddings, with small random weights."""
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = getattr(layer.self_attn, name), _weight(source, "self_attn", name)
        if theirs is not None and theirs.shape == (mine.weight.shape[0], size):
            wide = mine.weight.shape[1] == 2 * size
            if wide:
                mine.weight[:, size:].copy_(theirs)
            else:
                mine.weight.copy_(theirs)
    for part, names in (("self_attn", ("o_proj",)), ("mlp", ("gate_proj", "up_proj", "down_proj"))):
        for name in names:
            mine, theirs = getattr(getattr(layer, part), name), _weight(source, part, name)
            if theirs is not None and theirs.shape == mine.weight.shape:
                mine.weight.copy_(theirs)
    _copy(getattr(layer, "hidden_norm", layer.input_layernorm), getattr(source, "input_layernorm", None))
    _copy(layer.post_attention_layernorm, getattr(source, "post_attention_layernorm", None))


def _weight(source: Any, part: str, name: str) -> Tensor | None:
    weight = getattr(getattr(getattr(source, part, None), name, None), "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta else None


def _copy(mine: Any, theirs: Any) -> None:
    """Copy a norm's weights if it then computes the same, which for Gemma's, for example, it does not."""
    weight = getattr(theirs, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or weight.shape != mine.weight.shape:
        return
    before = mine.weight.detach().clone()
    mine.weight.copy_(weight)
    probe = torch.linspace(-1, 2, len(before))[None]
    found = theirs(probe.to(weight.device, weight.dtype))
    if not torch.allclose(mine(probe), found.float().cpu(), rtol=0.05, atol=0.05):
        mine.weight.copy_(before)
