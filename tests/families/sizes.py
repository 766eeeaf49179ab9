"""Small values for the fields of transformers' configurations, by the field's name."""

from __future__ import annotations

from typing import Any


def each(names: str, value: Any = None) -> dict[str, Any]:
    """The same value for every one of the names, which blanks separate."""
    return dict.fromkeys(names.split(), value)


VOCAB = 99
LAYERS = 4

_WIDTH = each(
    "hidden_size d_model n_embd dim emb_dim lru_width word_embed_proj_dim embedding_size conv_dim block_dim "
    "projection_dim out_hidden_size",
    32,
)
_FEED_FORWARD = each(
    "intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim d_inner dff ffn_hidden_size feed_forward_size "
    "block_ff_dim",
    64,
)
_LAYERS = each("num_hidden_layers decoder_layers n_layer num_layers n_layers", LAYERS)
_HEADS = each("num_attention_heads encoder_attention_heads decoder_attention_heads n_head num_heads n_heads", 4) | each(
    "head_dim d_head attention_head_size", 8
)
_POSITIONS = each("max_position_embeddings max_sequence_length n_positions", 128)
_WINDOWS = each(
    "sliding_window local_window_size sliding_window_size attention_window_size window_size attn_window_size", 6
) | each("attention_chunk_size lsh_attn_chunk_length local_attn_chunk_length chunk_size", 8)
_EXPERTS = (
    each("num_experts num_local_experts n_routed_experts moe_num_experts", 4)
    | each("num_experts_per_tok moe_k moe_topk top_k_experts", 2)
    | each("n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace", 1)
    | each(
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_intermediate_size expert_ffn_hidden_size",
        16,
    )
    | {"num_dense_layers": 1}
)
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
}
_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "n_mamba_heads": 2,
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel": 3,
}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "mm_tokens_per_image": 16,
    "depth": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
    "encoder_layers": 2,
}
_OTHER = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "query_pre_attn_scalar": 8,
    "num_kv_shared_layers": 0,
    "rotary_dim": 4,
    "num_buckets": 8,
    "axial_pos_shape": (8, 16),
    "axial_pos_embds_dim": (16, 16),
    "num_hashes": 1,
    "codebook_size": 16,
    "initializer_range": 0.2,
    "init_std": 0.2,
}
SIZES: dict[str, Any] = (
    _WIDTH
    | _FEED_FORWARD
    | _LAYERS
    | _HEADS
    | _POSITIONS
    | _WINDOWS
    | _EXPERTS
    | _LATENT
    | _RECURRENT
    | _VISION
    | _OTHER
)

OFF_WHEN_NONE = frozenset(
    each(
        "sliding_window attention_chunk_size q_lora_rank head_dim n_shared_experts num_shared_experts attention_window_size "
        "n_group topk_group num_kv_shared_layers num_global_key_value_heads rotary_dim num_experts num_local_experts "
        "word_embed_proj_dim embedding_size mamba_dt_rank mamba_d_head num_experts_per_tok moe_intermediate_size "
        "hidden_size_per_layer_input top_k_experts"
    )
)
"""Fields whose default None means that the family has no such thing: left as it is."""
OFF_WHEN_ZERO = frozenset(
    each(
        "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts shared_intermediate_size "
        "shared_expert_intermediate_size hidden_size_per_layer_input num_kv_shared_layers sliding_window"
    )
)
"""The same for a default of 0."""
KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "multi_query_group_num",
    "swa_num_key_value_heads",
)
"""Numbers of key and value heads: all four where the family has as many as heads, one where it has one, else two."""
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
