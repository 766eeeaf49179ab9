"""Every field of GenerationConfig and every parameter of `generate()`, and how specnb handles it.

- "supported": generate() makes a criterion, a processor or an id of it, which is used at every token.
- "drafting": specnb handles it (`specnb.options`, `method_selection`).
- "harmless": it does not change the text: options of beam search, cache sizes, speed, encoder-decoder models.
- "unsupported": specnb cannot do it; a value other than the default is an error (`unsupported`).
- "metadata": not an option.

A name in neither table comes from a newer transformers. It is an error only if it is set.
"""

from __future__ import annotations

from inspect import signature

from transformers import GenerationConfig, GenerationMixin


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """A table from name to handling, from a table of handling to names."""
    return {name: handling for handling, listed in names.items() for name in listed.split()}


FIELDS: dict[str, str] = _by_name(
    {
        "supported": (
            "max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k "
            "top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
            "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id "
            "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
            "begin_suppress_tokens sequence_bias watermarking_config num_return_sequences return_dict_in_generate "
            "output_scores output_logits pad_token_id bos_token_id eos_token_id prefill_chunk_size"
        ),
        "drafting": (
            "use_mtp num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
            "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_ensemble_weight "
            "speculation_type"
        ),
        # assistant_lookbehind, target_lookbehind: how transformers aligns two tokenizers
        # is_assistant: the model also serves as a draft model; this ends drafts and never a text
        "harmless": (
            "early_stopping length_penalty diversity_penalty num_beam_groups low_memory cache_config max_cache_len "
            "compile_config disable_compile continuous_batching_config decoder_start_token_id assistant_lookbehind "
            "target_lookbehind is_assistant"
        ),
        "unsupported": (
            "num_beams penalty_alpha guidance_scale dola_layers constraints force_words_ids use_cache token_healing "
            "output_attentions output_hidden_states cache_implementation"
        ),
        "metadata": "transformers_version _from_model_config _commit_hash _original_object_hash",
    }
)

PARAMETERS: dict[str, str] = _by_name(
    {
        "supported": (
            "self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn "
            "assistant_model streamer kwargs"
        ),
        "harmless": "negative_prompt_ids negative_prompt_attention_mask",
        "unsupported": "synced_gpus custom_generate",
    }
)

LOOP_ARGUMENTS = (
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_params",  # the cache of recurrent models before transformers 5.24
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""Arguments that `generate()` prepares for its own loop; specnb's kv cache makes its own."""
STATIC_LIKE = ("static", "sliding_window", "hybrid", "hybrid_chunked")
"""Values of `cache_implementation` with the same content as a DynamicCache; specnb's own kv cache replaces them."""
UNSUPPORTED_CACHES = (
    "offloaded",
    "offloaded_static",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "quantized",
    "paged",
)
NEW_FIELDS = frozenset(vars(GenerationConfig()).keys() - FIELDS.keys())
NEW_PARAMETERS = frozenset(signature(GenerationMixin.generate).parameters.keys() - PARAMETERS.keys())
