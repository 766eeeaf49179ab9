"""Tiny random models of every family in transformers' auto mappings: one generic shrinker, and overrides by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .overrides import BY_CLASS, BY_FAMILY, DECODERS
from .sizes import KEY_VALUE_HEADS, LAYERS, OFF_WHEN_NONE, OFF_WHEN_ZERO, SIZES, SPECIAL_IDS, VOCAB

LARGEST = 60_000_000  # weights; a family whose tiny model has more is not built
CAUSAL, IMAGE_TEXT = "causal", "image-text"


def families(kind: str) -> dict[str, str]:
    """Model types of a kind ("causal" or "image-text"), each with the name of its model class."""
    return dict(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind == CAUSAL
        else modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )


def tiny(cls: type[PretrainedConfig], **given: Any) -> PretrainedConfig:
    """A small configuration of the class `cls`: `given` wins over the overrides, those over the generic sizes.

    A part (`vision_config`, ...) may be given as a dict of what is to win in it, with its `model_type`.
    """
    given = BY_CLASS.get(cls.__name__, {}) | given
    fields = _Fields(cls)
    values: dict[str, Any] = {}
    for name in fields.parts:
        part, wanted = fields.own(name), given.get(name)
        if isinstance(wanted, dict) and "model_type" in wanted:
            wanted = dict(wanted)
            given[name] = tiny(CONFIG_MAPPING[wanted.pop("model_type")], **wanted)
        elif name not in given and part is not None:
            values[name] = tiny(type(part))
    values |= _sizes(fields)
    values |= _key_value_heads(fields)
    values |= {name: 0.0 for name in fields.names if "drop" in name and isinstance(fields.default(name), float)}
    values |= _ids(fields, given)
    values |= _layer_lists(fields, set(values) | set(given))
    return cls(**values | given)


class _Fields:
    """The fields of a configuration class and their defaults, also where a bare instance cannot be made."""

    def __init__(self, cls: type[PretrainedConfig]) -> None:
        self.cls = cls
        try:
            self.instance: Any = cls()
        except Exception:
            self.instance = None
        self.fields = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        self.names = set(self.fields)
        self.parts = dict(getattr(cls, "sub_configs", None) or {})
        self.layers = self.own("num_hidden_layers")

    def own(self, name: str) -> Any:
        """The value of a bare instance."""
        try:
            return getattr(self.instance, name, None)
        except Exception:  # one value per layer, and they differ
            return None

    def default(self, name: str) -> Any:
        """The declared default, else the value of a bare instance."""
        field = self.fields.get(name)
        if field is not None and field.default is not dataclasses.MISSING:
            return field.default
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return self.own(name)


def _sizes(fields: _Fields) -> dict[str, Any]:
    """The generic sizes that the class has a field for, under its own names."""
    wanted = dict(SIZES)
    for standard, real in (getattr(fields.cls, "attribute_map", None) or {}).items():
        if standard in SIZES and real not in SIZES:
            wanted[real] = SIZES[standard]
    values = {}
    for name, value in wanted.items():
        default = fields.default(name)
        off = (default is None and name in OFF_WHEN_NONE) or (default == 0 and name in OFF_WHEN_ZERO)
        if name not in fields.names or name in fields.parts or off or isinstance(default, bool):
            continue
        if isinstance(default, (list, tuple)) and not isinstance(value, (list, tuple)):
            value = type(default)([value] * (LAYERS if len(default) == fields.layers else len(default)))
        values[name] = value
    return values


def _key_value_heads(fields: _Fields) -> dict[str, int]:
    values = {}
    for name in KEY_VALUE_HEADS:
        default = fields.default(name) if name in fields.names else None
        if isinstance(default, int):
            shared = fields.own(name) != fields.own("num_attention_heads")
            values[name] = SIZES["num_attention_heads"] if not shared else 1 if default == 1 else 2
    return values


def _ids(fields: _Fields, given: dict[str, Any]) -> dict[str, int]:
    """Special ids: the usual ones low, those of images and the like from 97 downwards."""
    values = {name: value for name, value in SPECIAL_IDS.items() if name in fields.names}
    free = 97
    for name in sorted(fields.names - set(values) - set(given) - set(fields.parts)):
        default = fields.default(name)
        is_id = name.endswith(("_token_id", "_token_index", "token_ids"))
        if is_id and isinstance(default, int) and not isinstance(default, bool) and default >= 0:
            values[name] = free
            free -= 1
    return values


def _layer_lists(fields: _Fields, known: set[str]) -> dict[str, Any]:
    """Lists with an entry per layer, cut to the small number of layers."""
    values = {}
    for name in sorted(fields.names - known - set(fields.parts)):
        default = fields.default(name)
        if isinstance(default, (list, tuple)) and fields.layers and len(default) == fields.layers > LAYERS:
            values[name] = type(default)(default[:LAYERS])
    return values


def build(family: str, kind: str = CAUSAL, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model of a family, in eval mode, that never stops by itself and pads with 0.

    Args:
        family: a model type of transformers.
        kind: "causal" or "image-text": which of the family's classes.
        seed: of the weights; the global random state is left alone.
        dtype: of the weights.
    """
    config_class = CONFIG_MAPPING[family]
    model_class = getattr(transformers, families(kind)[family])
    config = tiny(config_class, **BY_FAMILY.get(family, {}))
    text = config.get_text_config(decoder=True)
    if kind == CAUSAL and model_class.config_class is not config_class and model_class.config_class is type(text):
        config = text
    if family in DECODERS and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST:
        raise RuntimeError(f"the tiny {family} has {size} weights")
    _spread(model, seed + 1)
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = None, 0, 1
    return model.to(dtype).eval()


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Weights of a size at which texts vary, where the family starts with nearly nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            finite = bool(torch.isfinite(weight).all())
            if not weight.any() and ("gate" in name or "alpha" in name):
                weight.fill_(0.5)  # a gate that is shut: nothing would come through
            if weight.dim() >= 2 and weight.numel() > 1:
                if not finite or float(weight.float().std()) < 0.1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
            elif not finite:
                weight.zero_()


def noisy(model: PreTrainedModel, amount: float, seed: int = 7) -> PreTrainedModel:
    """A copy whose matrices have `amount` * N(0, 1) added: a draft that is right sometimes."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.is_floating_point() and weight.dim() >= 2 and weight.numel() > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
                weight.add_(noise.to(weight.dtype) * amount)
    return other


__all__ = ["CAUSAL", "IMAGE_TEXT", "VOCAB", "build", "families", "noisy", "tiny"]
