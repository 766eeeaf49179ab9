"""DFlash drafters (Chen et al. 2602.06036; DFlash 2, Inco AI 2026): known by their config, read, and checked.

Three formats: z-lab's checkpoints, those of speculators (vllm-project), and transformers' own assistant of Muse
Glimmer. They differ in how layers are numbered, in what a window is and in which position drafts the first token.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from specnb.models.dflash_layers import CandidateSelector, DFlashLayer
from specnb.models.eagle3 import check_verifier
from specnb.models.report import load_report

_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_SPECULATORS = ("dflash", "dflash2")
_TRANSFORMERS = ("MuseGlimmerAssistantModel",)
_SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings"),
)
"""What is taken over from the config of the layers."""
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class DFlashSettings:
    """What a drafter needs beside its weights.

    Args:
        block_size: number of positions that it computes at once: the last token (the anchor) and masks.
        mask_token_id: the token of the masks.
        layers: of the target, whose states it reads, numbered as in transformers' `hidden_states`.
        windows: per layer, how many tokens a position sees, itself included; None for all.
        causal: per layer, whether a position sees only those before it in the block.
        window_from_anchor: windows count from the anchor and end in front of it; the block sees itself.
        first: the position of the block that drafts the first token: 1, or 0 for the anchor.
        embedding_scale: the factor of the target's embedding; None for the target's own.
        output_multiplier: the factor of the logits.
        final_logit_softcapping: the soft cap of the logits; None for none.
        num_target_layers: of the target that it was made for; None if unknown.
    """

    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    window_from_anchor: bool = False
    first: int = 1
    embedding_scale: float | None = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_target_layers: int | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens of a draft."""
        return self.block_size - self.first


class DFlashConfig(Qwen3Config):
    """The config of a `DFlashDrafter`: the shape of its layers, its settings, and the checkpoint's own config."""

    model_type = "specnb_dflash"


class DFlashDrafter(PreTrainedModel):
    """The weights of a DFlash drafter. `specnb.drafters.dflash` runs it; embedding and head are the target's.

    Args:
        config: made by `dflash_config`.
    """

    config_class = DFlashConfig
    _keys_to_ignore_on_load_unexpected = (r"^embed_tokens\.", r"^verifier_(lm_head|norm)\.", r"^t2d$")

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.settings = settings_from(config.settings)
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in range(config.num_hidden_layers)])
        self.fc = nn.Linear(len(self.settings.layers) * size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        if config.draft_vocab_size != config.vocab_size:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.generation_config = GenerationConfig()  # options for drafting are read from it, as from a draft model's
        self.post_init()

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save the tensors, and the config as the checkpoint had it, so that others can read it too."""
        super().save_pretrained(save_directory, **kwargs)
        source = json.dumps(self.config.source_config, indent=2)
        (Path(save_directory) / "config.json").write_text(source, encoding="utf-8")


def is_dflash_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash drafter, of any format."""
    kind = values.get("speculators_model_type")
    if kind is not None:
        return kind in _SPECULATORS
    return any(name in (*_ARCHITECTURES, *_TRANSFORMERS) for name in values.get("architectures") or ())


def load_dflash(
    name: str, place: str, values: Mapping[str, Any], dtype: Any = "auto", device: Any = None, **options: Any
) -> PreTrainedModel:
    """Load a drafter, in eval mode.

    Args:
        name: its name, for messages.
        place: a folder or hub id.
        values: the contents of its config.json.
        dtype: as in transformers; "auto" is that of the stored weights.
        device: where to put it; None is the CPU.
        options: for transformers' look-up of files on the hub.

    Raises:
        LoadError: its weights and its config do not fit.
        ValueError: its config lacks something.
    """
    given = {"dtype": dtype, "device_map": None if device is None else {"": device}, **options}
    kind: Any = AutoModel
    if not any(one in _TRANSFORMERS for one in values.get("architectures") or ()):
        kind, given["config"] = DFlashDrafter, dflash_config(values)
    with load_report(name) as loading:
        model, info = kind.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **given
        )
        loading.check(name, model, info)
    loaded: PreTrainedModel = model.eval()
    return loaded


def is_dflash(model: Any) -> bool:
    """Whether a model is a DFlash drafter: ours, or transformers' own."""
    return isinstance(model, DFlashDrafter) or type(model).__name__ in _TRANSFORMERS


def dflash_config(values: Mapping[str, Any]) -> DFlashConfig:
    """The config of a drafter, from the config.json of its checkpoint.

    Raises:
        ValueError: it lacks something; the message says what.
    """
    speculators = values.get("speculators_model_type") in _SPECULATORS
    shape = _layer_config(values["transformer_layer_config"] if speculators else values, speculators)
    settings = (_speculators_settings if speculators else _zlab_settings)(values, shape)
    found = values.get("dflash_config") or {}
    second = values.get("speculators_model_type") == "dflash2" or "DFlash2DraftModel" in (
        values.get("architectures") or ()
    )
    extra = {name: found.get(name, values.get(name)) if second else None for name in _DFLASH2}
    if second and not all(extra.values()):
        raise ValueError(f"the config of a DFlash 2 drafter must give {', '.join(_DFLASH2)}, but it gives {extra}.")
    return DFlashConfig(
        **{name: getattr(shape, name) for name in _SHAPE},
        rope_parameters=_flat_rope(shape.rope_parameters),
        dtype=values.get("dtype") or values.get("torch_dtype"),
        tie_word_embeddings=False,
        draft_vocab_size=int(values.get("draft_vocab_size") or shape.vocab_size) if speculators else shape.vocab_size,
        settings=asdict(settings),
        speculators_config=values.get("speculators_config"),
        source_config=copy.deepcopy(dict(values)),
        **extra,
    )


def settings_from(values: Mapping[str, Any]) -> DFlashSettings:
    """The settings, from a config that may have been through JSON."""
    read: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return DFlashSettings(**read)


def settings_of(model: Any) -> DFlashSettings:
    """The settings of a drafter of any format."""
    if isinstance(model, DFlashDrafter):
        return model.settings
    config = model.config  # transformers' own class: bidirectional windows that include both ends
    windows = [config.sliding_window + 1 if kind == "sliding_attention" else None for kind in config.layer_types]
    return DFlashSettings(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        layers=tuple(i + 1 for i in config.target_layer_ids),
        windows=tuple(windows),
        causal=(False,) * len(windows),
    )


def target_ids(model: Any) -> Tensor | None:
    """The target's ids `[draft vocab]` of a drafter's tokens; None for a drafter without a vocabulary of its own."""
    offsets = getattr(model, "d2t", None)
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)


def _layer_config(values: Mapping[str, Any], speculators: bool) -> Any:
    """The config of the layers. speculators writes only what differs from the defaults of its `model_type`."""
    if not speculators:
        left_out = ("model_type", "architectures", "auto_map", "dflash_config")
        return Qwen3Config(**{name: value for name, value in values.items() if name not in left_out})
    kind = values.get("model_type")
    config = AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k != "model_type"}) if kind else None
    return Qwen3Config(**values) if config is None else config


def _flat_rope(rope: Mapping[str, Any] | None) -> Any:
    """One set of rope parameters. Where a config has one per layer type, drafters use that of sliding layers."""
    return dict(rope["sliding_attention"] if rope and "sliding_attention" in rope else rope or {}) or None


def _zlab_settings(values: Mapping[str, Any], shape: Any) -> DFlashSettings:
    """z-lab's format: layer i means the output of layer i, and sliding layers are causal unless `is_causal` says so."""
    found = values.get("dflash_config") or {}

    def value(name: str, default: Any = None) -> Any:
        return found.get(name, values.get(name, default))

    depth, layers = values.get("num_target_layers"), value("target_layer_ids")
    if layers is None and depth is not None:
        layers = _spread_layers(int(depth), shape.num_hidden_layers)
    if layers is None or value("mask_token_id") is None:
        raise ValueError("the config of a DFlash drafter must give target_layer_ids and mask_token_id (dflash_config).")
    sliding = [kind == "sliding_attention" for kind in _layer_types(shape)]
    causal = values.get("is_causal")
    scale = value("input_embedding_scale")
    return DFlashSettings(
        block_size=int(value("block_size", 16)),
        mask_token_id=int(value("mask_token_id")),
        layers=tuple(int(i) + 1 for i in layers),
        windows=tuple(shape.sliding_window if one else None for one in sliding),
        causal=tuple(one if causal is None else bool(causal) for one in sliding),
        embedding_scale=None if scale is None else float(scale),
        output_multiplier=float(value("output_multiplier", 1.0)),
        final_logit_softcapping=value("final_logit_softcapping") or None,
        num_target_layers=depth,
    )


def _speculators_settings(values: Mapping[str, Any], shape: Any) -> DFlashSettings:
    """speculators' format: layers as in `hidden_states`, and windows of so many tokens in front of the anchor."""
    layers, mask = values.get("aux_hidden_state_layer_ids"), values.get("mask_token_id")
    if not layers or mask is None:
        raise ValueError("the config of a DFlash drafter must give aux_hidden_state_layer_ids and mask_token_id.")
    window: Any = getattr(shape, "sliding_window", None)
    both = values.get("sliding_window_non_causal", values["speculators_model_type"] == "dflash2")
    sliding = [window is not None and kind == "sliding_attention" for kind in _layer_types(shape)]
    return DFlashSettings(
        block_size=int(values.get("block_size", 8)),
        mask_token_id=int(mask),
        layers=tuple(map(int, layers)),
        windows=tuple(window + 1 if one else None for one in sliding),
        causal=tuple(one and not both for one in sliding),
        window_from_anchor=True,
        first=0 if values.get("sample_from_anchor") else 1,
    )


def _layer_types(shape: Any) -> list[str]:
    return list(getattr(shape, "layer_types", None) or ["full_attention"] * shape.num_hidden_layers)


def _spread_layers(depth: int, count: int) -> list[int]:
    """z-lab's default: layers spread evenly from the second to the third but last."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def check_dflash(target: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Check that a drafter was made for the target.

    Raises:
        ValueError: it was made for another one. The message names both and what differs.
    """
    config, own, settings = target.config.get_text_config(decoder=True), drafter.config, settings_of(drafter)
    mine, theirs = own.name_or_path or type(drafter).__name__, target.config.name_or_path or type(target).__name__
    names = f"the DFlash drafter {mine!r} cannot draft for {theirs!r} ({type(target).__name__})"
    advice = "use the drafter that was made for this target."
    vocab, depth = int(config.vocab_size), int(config.num_hidden_layers)
    if own.hidden_size != config.hidden_size:
        raise ValueError(f"{names}: it reads states of size {own.hidden_size}, not {config.hidden_size}; {advice}")
    if getattr(own, "vocab_size", vocab) != vocab:
        raise ValueError(f"{names}: its vocabulary has {own.vocab_size} tokens, the target's {vocab}; {advice}")
    if settings.num_target_layers not in (None, depth):
        raise ValueError(
            f"{names}: it was made for a target of {settings.num_target_layers} layers, this one has {depth}; {advice}"
        )
    if not all(0 <= layer <= depth for layer in settings.layers):
        listed = ", ".join(map(str, settings.layers))
        raise ValueError(f"{names}: it reads the states of layers {listed}, but the target has {depth}; {advice}")
    rows = int(target.get_input_embeddings().weight.shape[0])
    if not 0 <= settings.mask_token_id < rows:
        raise ValueError(
            f"{names}: its mask token has id {settings.mask_token_id}, but the target has {rows} embeddings; {advice}"
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"{names}: it shares the target's head, and the target has none.")
    ids = target_ids(drafter)
    if ids is not None and not ids.is_meta and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"{names}: it drafts ids up to {int(ids.max())}, but the target's vocabulary has {vocab}.")
    check_verifier(target, drafter, names)
