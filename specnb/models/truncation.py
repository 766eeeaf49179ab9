"""`truncate`: a draft model made of the target's first layers, final norm and head, sharing its weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def truncate(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Make a draft model of the first layers of a model.

    The draft model has modules, config and generation config of its own, so nothing done with it changes `model`. Its
    parameters are those of `model`, so they take no extra memory.

    Args:
        model: a decoder-only model that can be built from its config.
        layers: number of layers of the draft model, from 1 to the model's layers - 1.

    Returns:
        The draft model, in eval mode.

    Raises:
        ValueError: the number of layers is not valid, or the model cannot be truncated. The message says why.
    """
    import torch

    _check_supported(model)
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < total:
        raise ValueError(
            f"a draft of {layers!r} layers cannot be made: this model has {total} layers, so the draft can have 1 to "
            f"{total - 1}."
        )
    config = _truncated_config(model.config, layers)
    try:
        with torch.device("meta"):
            draft: PreTrainedModel = type(model)(config)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be built with {layers} of its {total} layers, so it cannot be truncated: "
            f"{error}"
        ) from error
    _check_depth(model, draft, layers)
    sources = dict(model.named_modules())
    for name, module in draft.named_modules():
        _share_weights(sources.get(name), module, name, layers, total)
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def _check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError for models that cannot be truncated."""
    kind = type(model).__name__
    if getattr(model, "config", None) is None or not hasattr(model.config, "get_text_config"):
        raise ValueError(f"{kind} is not a transformers model, so it cannot be truncated.")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder model: only decoder-only models can be truncated.")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind} has no language-model head: load the model with AutoModelForCausalLM.")
    if not isinstance(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None), int):
        raise ValueError(f"{kind}'s config does not say how many layers it has, so it cannot be truncated.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"{kind}'s weights lie on {', '.join(devices)}: only a model that is whole on one device can be truncated."
        )


def _truncated_config(config: Any, layers: int) -> Any:
    """A copy of `config` for the first `layers` layers, with the per-layer settings cut to the same length.

    The copy is edited and not built anew, since a new config might choose another kind of layer for its last one.
    """
    from specnb.models.mtp import COUNTS

    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    first = next((i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind), 0)
    if layers <= first:
        raise ValueError(
            f"the first {layers} layers of {config.model_type!r} have no attention layer ({kinds[0]}), so they cannot "
            f"run alone: take at least {first + 1}, or use assistant_early_exit={layers}."
        )
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:layers])
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:  # the last layers reuse the keys and values of earlier ones
        text.num_kv_shared_layers = max(0, layers - (total - shared))
    for name in COUNTS:
        if getattr(text, name, None):  # MTP layers need the hidden state after all layers
            setattr(text, name, 0)
    text.num_hidden_layers = layers
    if vars(text).get("decoder_layers") == total:  # in BART-like models, num_hidden_layers is the encoder's
        text.decoder_layers = layers
    return config


def _check_depth(model: PreTrainedModel, draft: PreTrainedModel, layers: int) -> None:
    """Raise ValueError if the draft has another number of layers. Models with unknown layers are not checked."""
    from specnb.runtime.module_view import layers_path

    try:
        path = layers_path(model)
    except ValueError:
        return
    built: Any = draft.get_submodule(path)
    if len(built) != layers:
        raise ValueError(
            f"{type(model).__name__} cannot be truncated: with {layers} layers in its config it is built with "
            f"{len(built)}."
        )


def _share_weights(source: nn.Module | None, module: nn.Module, name: str, layers: int, total: int) -> None:
    """Give a module on the meta device the weights of `source`. Non-persistent buffers and attributes are copied."""
    import torch

    if source is None or type(source) is not type(module):
        found = "nothing" if source is None else type(source).__name__
        raise ValueError(
            f"cannot truncate this model: where its class has {type(module).__name__} ({name or 'the model itself'}) "
            f"it has {found}. Models whose layers were replaced after building (quantised, adapters) cannot be "
            "truncated."
        )
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = _slice_parameter(getattr(source, key), parameter, f"{name}.{key}", layers, total)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            kept = getattr(source, key)
            module._buffers[key] = kept.clone() if key in module._non_persistent_buffers_set else kept
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor):  # an attribute that is neither parameter nor buffer
            vars(module)[key] = getattr(source, key).clone()


def _slice_parameter(parameter: nn.Parameter, like: nn.Parameter, name: str, layers: int, total: int) -> nn.Parameter:
    """The parameter itself, or a view of its first part if one of its dimensions grows with the number of layers."""
    from torch import nn

    if parameter.shape == like.shape:
        return parameter
    view = parameter.data
    if view.dim() == like.dim():
        for dim, (have, want) in enumerate(zip(view.shape, like.shape, strict=True)):
            if have != want and have * layers == want * total:
                view = view.narrow(dim, 0, want)
    if view.shape != like.shape:
        raise ValueError(
            f"cannot truncate this model: {name} is {list(parameter.shape)}, but {list(like.shape)} with {layers} "
            "layers."
        )
    return nn.Parameter(view, requires_grad=parameter.requires_grad)
