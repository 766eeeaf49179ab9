"""Creates the LM of a model: the fast one, or one that runs the model as transformers does, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.lm.base import LM, LMOptions
from specnb.decoding.lm.cached_lm import CachedLM, custom_masks_reason
from specnb.decoding.lm.kv_cache import standard_cache_layers, unsupported_cache_layers
from specnb.decoding.lm.minimax import is_minimax, takes_masks
from specnb.decoding.lm.model_inputs import (
    PER_TOKEN,
    CacheSize,
    ModelInputs,
    PreparedInputs,
    custom_preparation,
    drops_cache,
    forward_parameters,
    has_custom_cache,
    has_custom_positions,
    has_first_pass_token_types,
)
from specnb.decoding.lm.prepared_lm import PreparedLM, prepare_arguments
from specnb.decoding.lm.rowwise_lm import RowwiseLM
from specnb.decoding.lm.snapshots import has_states, is_replaced, is_restored
from specnb.decoding.padding import align_position_ids

_DRAFT_MARGIN = 64  # number of tokens that a draft may reach past a row's end


def create_lm(
    model: PreTrainedModel,
    rows: Sequence[Row],
    size: CacheSize,
    *,
    prepared: PreparedInputs | None = None,
    role: str = "target",
    rolls_back: bool = True,
    options: LMOptions = LMOptions(),
    cached: Callable[..., CachedLM] = CachedLM,
) -> LM:
    """The LM for `rows` of `model`.

    Args:
        size: of a kv cache.
        prepared: what `generate()` prepared; None for a draft model, which then prepares its own inputs.
        role: "target" or "draft model", for messages.
        rolls_back: whether drafts will be rejected.
        options: what a drafter needs.
        cached: makes the LM of a model that `fits_cached_lm`.

    Raises:
        Unsupported: the model or its rows cannot be decoded exactly; the message says why.
    """
    if rolls_back:
        check_rollback(model, role)
    inputs = prepared.inputs if prepared else ModelInputs()
    past = prepared.past if prepared else None
    if not fits_cached_lm(model, _max_row_length(rows)):
        if role == "target" and size.prefill_chunk_size is not None:
            raise Unsupported(
                f"prefill_chunk_size={size.prefill_chunk_size} cannot be followed with {type(model).__name__}, which "
                "prepares its own inputs: leave it out."
            )
        if len(rows) == 1:
            arguments = prepared.arguments_for(rows[0]) if prepared else None
            extras = inputs.with_positions()
            return PreparedLM(
                model, rows, arguments=arguments, extras=extras, past=past, rolls_back=rolls_back, options=options
            )
        inputs_by_row = {
            row.index: select_row_inputs(model, inputs, r, row).with_positions() for r, row in enumerate(rows)
        }
        lms: dict[int, LM] = {
            row.index: PreparedLM(model, [row], extras=inputs_by_row[row.index], rolls_back=rolls_back, options=options)
            for row in rows
        }
        return RowwiseLM(lms)
    if prepared is None:
        inputs = _draft_model_inputs(model, rows)
    if len(rows) > 1 and (has_running_states(model) or custom_masks_reason(model, inputs)):
        return RowwiseLM(
            {
                row.index: cached(
                    model, [row], size, PreparedInputs(inputs=select_row_inputs(model, inputs, r, row)), options
                )
                for r, row in enumerate(rows)
            }
        )
    return cached(model, rows, size, PreparedInputs(inputs=inputs, past=past if len(rows) == 1 else None), options)


def check_target(model: PreTrainedModel, rows: Sequence[Row], prepared: PreparedInputs, rolls_back: bool) -> None:
    """Check whether a target and its rows can be decoded exactly, without running it.

    Raises:
        Unsupported: they cannot.
    """
    standard = fits_cached_lm(model, _max_row_length(rows))
    if rolls_back:
        check_rollback(model, "target")
        if not standard:
            check_context_switch(model)
    if len(rows) > 1 and (not standard or has_running_states(model) or custom_masks_reason(model, prepared.inputs)):
        for r, row in enumerate(rows):
            select_row_inputs(model, prepared.inputs, r, row)


def _max_row_length(rows: Sequence[Row]) -> int:
    """A number of tokens that no row with its drafts will exceed."""
    return max(len(row.ids) + getattr(row, "remaining_tokens", 0) for row in rows) + _DRAFT_MARGIN


def fits_cached_lm(model: PreTrainedModel, max_length: int | None = None) -> bool:
    """Whether `CachedLM` can run the model: it has transformers' standard inputs and cache.

    Args:
        max_length: the most tokens of a row; None if unknown.
    """
    if custom_preparation(model, max_length) or has_custom_cache(model) or unsupported_cache_layers(model.config):
        return False
    return compat.cache_keyword(parameters := forward_parameters(type(model))) in parameters


def check_rollback(model: PreTrainedModel, role: str) -> None:
    """Raise Unsupported if rejected drafts cannot be rolled back; the message names the layers."""
    name = type(model).__name__
    stateful = compat.is_stateful(model) or (
        has_custom_cache(model) and any(map(has_states, standard_cache_layers(model.config)))
    )
    if stateful and not has_running_states(model):
        kinds = ", ".join(sorted({*unsupported_cache_layers(model.config).values()} - {"DynamicIndexedLayer"}))
        kinds = kinds or "kept outside the cache"
        raise Unsupported(
            f"the {role} ({name}) has layers with a running state ({kinds}) that cannot be rolled back after a "
            "rejection: "
            + ("use method='plain', or another target." if role == "target" else "use another draft model.")
        )


def has_running_states(model: PreTrainedModel) -> bool:
    """Whether the layers of the model's cache hold running states that can be copied, and no others of unknown kind."""
    parameters = forward_parameters(type(model))
    if compat.is_stateful(model) and "state" in parameters:  # RWKV's, see StateList
        return True
    if is_minimax(model):
        return takes_masks(model)
    if has_custom_cache(model) or compat.cache_keyword(parameters) not in parameters:
        return False
    layers = standard_cache_layers(model.config)
    others = [layers[i] for i in unsupported_cache_layers(model.config)]
    known = all(is_replaced(layer) or type(layer).__name__ == "DynamicIndexedLayer" for layer in others)
    return known and any(map(is_restored, layers))


def check_context_switch(model: PreTrainedModel) -> None:
    """Check a text that may outgrow `original_max_position_embeddings`.

    Raises:
        Unsupported: transformers would lose the beginning of the text there.
    """
    if drops_cache(model) and compat.cache_keyword(forward_parameters(type(model))) == "past_key_values":
        limit = model.config.get_text_config(decoder=True).original_max_position_embeddings
        raise Unsupported(
            f"the text may outgrow {limit} tokens (original_max_position_embeddings), where {type(model).__name__} "
            "drops its cache, and this transformers loses what was in it: give a smaller max_new_tokens, update "
            "transformers, or use method='plain'."
        )


def _draft_model_inputs(model: PreTrainedModel, rows: Sequence[Row]) -> ModelInputs:
    """The position ids that a draft model prepares itself, if it does."""
    if not has_custom_positions(model) or custom_preparation(model):
        return ModelInputs()
    by_row = [prepare_arguments(model, row.ids)["position_ids"] for row in rows]
    width = max(one.shape[-1] for one in by_row)
    table = torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in by_row], -2)
    position_ids = align_position_ids(table, [row.ids for row in rows], [0] * len(rows))
    return ModelInputs(position_ids=position_ids, prompt_lengths=[len(row.ids) for row in rows])


def select_row_inputs(model: PreTrainedModel, inputs: ModelInputs, r: int, row: Row) -> ModelInputs:
    """The inputs of one of several rows.

    Args:
        r: the row's place in the batch.

    Raises:
        Unsupported: an input cannot be separated by row.
    """
    n, extras = len(row.ids), {}
    for name, value in inputs.extras.items():
        if name not in PER_TOKEN:
            raise Unsupported(
                f"several rows with {name} cannot be decoded with {type(model).__name__}, which takes one row at a "
                "time here: generate the prompts one by one."
            )
        extras[name] = value[min(r, len(value) - 1) :][:1, :n]
    position_ids = (
        None
        if inputs.position_ids is None
        else inputs.position_ids[..., min(r, inputs.position_ids.shape[-2] - 1), None, :n]
    )
    return ModelInputs(extras, position_ids, has_first_pass_token_types(model), [n])
