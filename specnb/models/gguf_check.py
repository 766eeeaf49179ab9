"""Checks for what transformers ignores in GGUF files: tensors that it does not map, and scaled rotary positions."""

from __future__ import annotations

import copy
import math
from typing import Any

from specnb.models.errors import LoadError

_MAX_LISTED = 4  # tensors that a message lists
_FREQS = "rope_freqs.weight"
_HUGE = 1e20  # a rotary frequency divided by this or more means a dimension that is not rotated
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters, beside the factor, from which llama.cpp's converter computes `rope_freqs` of Llama 3.1 to 3.3."""


def check(name: str, reader: Any, model: Any) -> dict[str, Any] | None:
    """Check that nothing in a GGUF file was ignored.

    Args:
        name: the name of the model, for messages.
        reader: a `gguf.GGUFReader` of the file.
        model: the model that transformers loaded from it.

    Returns:
        Rotary parameters that are in the file but not in the model's config; None if there are none.

    Raises:
        LoadError: the file has tensors or settings that the model would need.
    """
    surplus = _unmapped_tensors(reader, model)
    if surplus:
        listed = ", ".join(surplus[:_MAX_LISTED])
        listed += f" and {len(surplus) - _MAX_LISTED} more" if len(surplus) > _MAX_LISTED else ""
        raise LoadError(
            f"{name!r} cannot be loaded: the file has tensors that transformers' {type(model).__name__} has no place "
            f"for ({listed}), so its text would be another one. Load the model in transformers' format."
        )
    return _rope_parameters(name, reader, model.config)


def _unmapped_tensors(reader: Any, model: Any) -> list[str]:
    """The tensors of the file that the model does not have. Only looked for if the file has more numbers."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    given = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if not tensor.name.startswith("rope_f")
        and ".nextn." not in tensor.name
        and not (tied and tensor.name == "output.weight")
    }
    held = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    if sum(given.values()) <= sum(held.values()):
        return []
    known = _mapped_names(reader, model)
    return [tensor for tensor in given if tensor not in known and "_exps." not in tensor] or [
        f"{sum(given.values()) - sum(held.values()):,} numbers more than the model"
    ]


def _mapped_names(reader: Any, model: Any) -> set[str]:
    """The names of the tensors that transformers reads from the file."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    architecture = reader.get_field("general.architecture").contents()
    processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=model.config.to_dict())
    return set(theirs.get_gguf_hf_weights_map(model, processor))


def _rope_parameters(name: str, reader: Any, config: Any) -> dict[str, Any] | None:
    """The rotary parameters of a file with scaled frequencies; None if they are not scaled."""
    own = getattr(config, "rope_parameters", None) or {}
    architecture = reader.get_field("general.architecture").contents()
    scaling = reader.get_field(f"{architecture}.rope.scaling.type")
    kind = "none" if scaling is None else str(scaling.contents())
    if kind != "none" and "rope_theta" in own and own.get("rope_type", "default") != kind:
        raise _rope_error(name, f"{architecture}.rope.scaling.type = {kind}")
    stretched = [tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if not stretched or all(
        float(value) == 1 or value >= _HUGE for tensor in stretched for value in tensor.data.flatten()
    ):
        return None
    if [tensor.name for tensor in stretched] != [_FREQS] or "rope_theta" not in own:
        raise _rope_error(name, stretched[0].name)
    found = _llama3_rope(own, stretched[0].data, config)
    if found is None:
        raise _rope_error(name, _FREQS)
    return found


def _llama3_rope(own: dict[str, Any], divisors: Any, config: Any) -> dict[str, Any] | None:
    """Rotary parameters of Llama 3.1 whose scaling equals `divisors`; None if no factor gives them."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = torch.as_tensor(divisors.copy(), dtype=torch.float64).flatten()
    plain = float(own["rope_theta"]) ** (-torch.arange(len(wanted), dtype=torch.float64) / len(wanted))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    # Rotations of the slowest dimension, which is scaled most, over the original context
    turns = float(_LLAMA3["original_max_position_embeddings"] * plain[-1] / (2 * math.pi))
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    rest = 1 / float(wanted[-1]) - smooth
    if smooth == 1 or rest <= 0:
        return None
    trial = copy.deepcopy(config)
    trial.rope_parameters = own | _LLAMA3 | {"rope_type": "llama3", "factor": round((1 - smooth) / rest, 4)}
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, device=torch.device("cpu"))
    same = len(inverse) == len(wanted) and torch.allclose(plain / wanted, inverse.double(), rtol=1e-4, atol=0)
    return dict(trial.rope_parameters) if same else None


def _rope_error(name: str, what: str) -> LoadError:
    return LoadError(
        f"{name!r} cannot be loaded: its positions are stretched ({what}) in a way that transformers does not read "
        "from GGUF files, so its text would be another one. Load the model in transformers' format."
    )
