"""Every field of transformers' GenerationConfig and every parameter of `generate()`, and what becomes of it here.

What is in neither table is of a newer transformers: not set, it does no harm; set, it is refused by name (`refusals`).
"""

from __future__ import annotations

from inspect import signature

from transformers import GenerationConfig, GenerationMixin

FIELDS: dict[str, str] = {
    # ---- honoured: generate() makes a criterion, a processor or an id of it, and the engine asks those at every token
    **dict.fromkeys(
        (
            "max_length",
            "max_new_tokens",
            "min_length",
            "min_new_tokens",
            "max_time",
            "stop_strings",
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "top_h",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "repetition_penalty",
            "encoder_repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "renormalize_logits",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "remove_invalid_values",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "sequence_bias",
            "watermarking_config",
            "num_return_sequences",
            "return_dict_in_generate",
            "output_scores",
            "output_logits",
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
            "prefill_chunk_size",
        ),
        "honoured",
    ),
    # ---- drafting: specnb's to handle (`options`, `resolve`)
    **dict.fromkeys(
        (
            "use_mtp",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "assistant_early_exit",
            "assistant_ensemble_weight",
        ),
        "drafting",
    ),
    # ---- harmless: of beams not asked for, a cache's size, speed, another engine, encoder-decoder models
    **dict.fromkeys(
        (
            "early_stopping",
            "length_penalty",
            "diversity_penalty",
            "num_beam_groups",
            "low_memory",
            "cache_config",
            "max_cache_len",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "decoder_start_token_id",
            "assistant_lookbehind",
            "target_lookbehind",  # how transformers aligns two tokenizers
            "is_assistant",  # marks a model that drafts: its confidence ends a draft, and never a text
        ),
        "harmless",
    ),
    # ---- refused by name where they are set (`refusals`)
    **dict.fromkeys(
        (
            "num_beams",
            "penalty_alpha",
            "guidance_scale",
            "dola_layers",
            "constraints",
            "force_words_ids",
            "use_cache",
            "token_healing",
            "output_attentions",
            "output_hidden_states",
            "speculation_type",
            "cache_implementation",
        ),
        "refused",
    ),
    **dict.fromkeys(
        ("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash"), "metadata"
    ),
}
PARAMETERS: dict[str, str] = {
    **dict.fromkeys(
        (
            "self",
            "inputs",
            "generation_config",
            "logits_processor",
            "stopping_criteria",
            "prefix_allowed_tokens_fn",
            "assistant_model",
            "streamer",
            "kwargs",
        ),
        "honoured",
    ),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask"), "harmless"),
    **dict.fromkeys(("synced_gpus", "custom_generate"), "refused"),
}

STATIC_LIKE = ("static", "sliding_window", "hybrid", "hybrid_chunked")
"""Values of `cache_implementation` that store what a DynamicCache does: the engine's own buffers stand for them."""
CACHES_REFUSED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked", "quantized", "paged")
NEW_FIELDS = frozenset(vars(GenerationConfig()).keys() - FIELDS.keys())
NEW_PARAMETERS = frozenset(signature(GenerationMixin.generate).parameters.keys() - PARAMETERS.keys())
