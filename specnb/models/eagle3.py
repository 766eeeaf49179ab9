"""EAGLE-3 drafters: the config, the model, and whether one was made for a target. `eagle3_files` reads the checkpoints.

Li et al. 2503.01840; the flags of EAGLE 3.1: 2605.09992. The config is that of the speculators format, which servers
read too. Layers of the target are numbered as in transformers' `hidden_states`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from specnb import compat

LAYER_TYPES = ("llama", "qwen3")
"""Model types of the decoder layers that a drafter may have."""
_HUB_ID = re.compile(r"[\w.-]+/([\w.-]+)")


class Eagle3Config(PreTrainedConfig):
    """The config of an EAGLE-3 drafter, as speculators 0.9.0 writes it.

    Attributes:
        transformer_layer_config: the config of its decoder layers: llama or qwen3.
        draft_vocab_size: number of tokens that it can draft.
        target_hidden_size: size of the target's states; None if it is that of the layers.
        eagle_aux_hidden_state_layer_ids: the layers of the target whose states it reads; None for 2, n // 2 and n - 3
            of a target with n layers.
        norm_before_residual: the residual of the first layer is the normalised state.
        norm_before_fc: the states of all layers are normalised together (EAGLE 3.1).
        fc_norm: the states of each layer are normalised (EAGLE 3.1).
        norm_output: the state for the next token is the normalised one (EAGLE 3.1).
        speculators_config: `verifier` names the target that the drafter was made for.
    """

    model_type = "eagle3"

    speculators_model_type: str = "eagle3"
    transformer_layer_config: Any = None
    draft_vocab_size: int = 32000
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: Any = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    speculators_config: Any = None

    def to_dict(self) -> dict[str, Any]:
        """The config as it is stored: with the architecture by which servers know the format."""
        stored: dict[str, Any] = super().to_dict()
        return stored | {"architectures": ["Eagle3Speculator"]}

    @property
    def num_hidden_layers(self) -> int:
        """Number of the drafter's own layers."""
        return int(self.transformer_layer_config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Size of the drafter's states."""
        return int(self.transformer_layer_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return int(self.transformer_layer_config.vocab_size)

    @property
    def num_target_layers(self) -> int:
        """Number of target layers whose states are read."""
        return len(self.eagle_aux_hidden_state_layer_ids or (0, 0, 0))

    def target_layers(self, depth: int) -> tuple[int, ...]:
        """The layers of a target with `depth` layers whose states are read, in transformers' numbering."""
        return tuple(self.eagle_aux_hidden_state_layer_ids or (2, depth // 2, depth - 3))


class Eagle3Layer(nn.Module):
    """The first layer: it reads the embedding of a token and the state at the position before it."""

    def __init__(self, config: Any, parts: compat.DecoderParts, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = parts.attention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, old.out_features, bias=old.bias is not None))
        self.mlp = parts.mlp(config)
        self.input_layernorm, self.hidden_norm = parts.norm(size, eps=eps), parts.norm(size, eps=eps)
        self.post_attention_layernorm = parts.norm(size, eps=eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, inputs_embeds: Tensor, hidden_states: Tensor, **attention: Any) -> Tensor:
        """The layer's states `[rows, width, size]` for embeddings and states of that shape."""
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(inputs_embeds), normed], -1), **attention
        )
        states = residual + attended
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3Drafter(PreTrainedModel):
    """An EAGLE-3 drafter. It shares the target's embedding unless its checkpoint has one.

    Args:
        config: its config.

    Attributes:
        embed_tokens: its own embedding; None where the target's is used.
        d2t: `[draft_vocab]`: the target's id of draft token i is i + d2t[i].
        t2d: `[vocab]`: whether a token can be drafted.

    Raises:
        ValueError: its layers are of a type that is not built here.
    """

    config_class = Eagle3Config
    config: Eagle3Config
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    _supports_sdpa = True

    def __init__(self, config: Eagle3Config) -> None:
        layer = config.transformer_layer_config
        parts = compat.decoder_parts(layer.model_type)
        if parts is None:
            raise ValueError(
                f"EAGLE-3 drafters with {layer.model_type} layers are not built here, only with those of "
                f"{' and '.join(LAYER_TYPES)}."
            )
        super().__init__(config)
        layer = compat.with_attention(layer, "sdpa")
        size, read = layer.hidden_size, config.target_hidden_size or layer.hidden_size
        count, eps = config.num_target_layers, layer.rms_norm_eps
        self.embed_tokens: nn.Embedding | None = None
        self.input_norm = parts.norm(count * read, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(parts.norm(read, eps=eps) for _ in range(count)) if config.fc_norm else None
        self.fc = nn.Linear(count * read, size, bias=False)
        first = Eagle3Layer(layer, parts, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(parts.layer(layer, i) for i in range(1, layer.num_hidden_layers))])
        self.norm = parts.norm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = parts.rotary(layer)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.cache_keyword = compat.cache_keyword(inspect.signature(parts.attention.forward).parameters)
        self.layer_config = layer
        self.generation_config = GenerationConfig()  # options for drafting are read from it, as from a draft model's
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """The drafter's own embedding; None where the target's is used."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The head, with a row per draft token."""
        return self.lm_head

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """The input states `[..., size]` for the target's states `[..., layers * target size]`."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: Tensor = self.fc(states)
        return out

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Any = None,
    ) -> Tensor:
        """Run the layers over some entries: each pairs the embedding of a token with the state at the position before.

        Args:
            inputs_embeds: `[rows, width, size]`.
            hidden_states: `[rows, width, size]`: what `combine_hidden_states` or the last step gave.
            position_embeddings: cosine and sine from `rotary_emb`.
            attention_mask: as the layers take it, or a dict of masks by layer type; None: causal, or all entries.
            cache: of keys and values.

        Returns:
            The states after the last layer `[rows, width, size]`.
        """
        kinds = getattr(self.layer_config, "layer_types", None) or ()
        for i, layer in enumerate(self.layers):
            mask = attention_mask[kinds[i]] if isinstance(attention_mask, dict) else attention_mask
            given = {"position_embeddings": position_embeddings, "attention_mask": mask, self.cache_keyword: cache}
            hidden_states = layer(hidden_states, **given) if i else layer(inputs_embeds, hidden_states, **given)
        return hidden_states

    def compute_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[..., draft_vocab]` after the last layer's states, and the states for the next token."""
        normed = self.norm(hidden_states)
        return self.lm_head(normed), normed if self.config.norm_output else hidden_states

    def target_ids(self) -> Tensor:
        """The target's ids `[draft_vocab]` of the draft tokens."""
        ids: Tensor = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        return ids


def is_eagle3(model: Any) -> bool:
    """Whether a model is an EAGLE-3 drafter."""
    return isinstance(model, Eagle3Drafter)


def check_eagle3(target: PreTrainedModel, drafter: Eagle3Drafter) -> None:
    """Check that a drafter was made for the target.

    Raises:
        ValueError: it was made for another one. The message names both and what differs.
    """
    text, config = target.config.get_text_config(decoder=True), drafter.config
    mine = config.name_or_path or type(drafter).__name__
    theirs = target.config.name_or_path or type(target).__name__
    names = f"the EAGLE-3 drafter {mine!r} cannot draft for {theirs!r} ({type(target).__name__})"
    size, depth = config.target_hidden_size or config.hidden_size, int(getattr(text, "num_hidden_layers", 0))
    if size != text.hidden_size:
        raise ValueError(f"{names}: it reads states of size {size}, the target's have {text.hidden_size}.")
    if config.vocab_size != text.vocab_size:
        raise ValueError(f"{names}: its vocabulary has {config.vocab_size} tokens, the target's {text.vocab_size}.")
    ids = drafter.target_ids()
    if int(ids.min()) < 0 or int(ids.max()) >= text.vocab_size or len(set(ids.tolist())) < len(ids):
        raise ValueError(
            f"{names}: its d2t gives ids from {int(ids.min())} to {int(ids.max())}, which must be different ids of the "
            f"target's {text.vocab_size} tokens."
        )
    layers = config.target_layers(depth)
    if min(layers) < 0 or max(layers) > depth:
        raise ValueError(
            f"{names}: it reads the states of layers {', '.join(map(str, layers))}, the target has {depth} layers."
        )
    if drafter.embed_tokens is None and config.hidden_size != text.hidden_size:
        raise ValueError(
            f"{names}: it has no embedding of its own, and the target's has the size {text.hidden_size}, not "
            f"{config.hidden_size}."
        )
    check_verifier(target, drafter, names)


def check_verifier(target: PreTrainedModel, drafter: PreTrainedModel, names: str) -> None:
    """Raise ValueError if a drafter's config names another target. `names` begins the message.

    Copies in other folders, and quantised versions whose names begin alike, are the same target.
    """
    verifier = (getattr(drafter.config, "speculators_config", None) or {}).get("verifier") or {}
    architectures = verifier.get("architectures") or ()
    own = {type(target).__name__, *(target.config.architectures or ())}
    named, here = str(verifier.get("name_or_path") or ""), str(target.config.name_or_path or "")
    hint = (
        "If they are the same model, load the drafter alone and say so: drafter = specnb.load_drafter(NAME); "
        "drafter.config.speculators_config = None."
    )
    if architectures and not own & set(architectures):
        raise ValueError(f"{names}: its config names the target {named!r} ({', '.join(architectures)}). {hint}")
    wanted, given = (_model_name(name) for name in (named, here))
    if wanted and given and not (wanted.startswith(given) or given.startswith(wanted)):
        raise ValueError(f"{names}: its config names another target, {named!r}. {hint}")


def _model_name(name: str) -> str:
    """The name of a model on the hub, without its owner; empty for a folder."""
    found = _HUB_ID.fullmatch(name)
    return found[1].casefold() if found and not Path(name).exists() else ""
