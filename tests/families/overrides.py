"""What the generic sizes get wrong, by hand: per configuration class, and per family."""

from __future__ import annotations

from typing import Any

from .sizes import VOCAB, each

_LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
_LOCAL_AND_FULL = ["sliding_attention", "full_attention"] * 2
_CONV_AND_FULL = ["conv", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _planes(*sections: int, name: str = "mrope_section", **more: Any) -> dict[str, Any]:
    """Rotary positions of several planes over a head of 8."""
    return {"rope_parameters": _ROPE | {name: list(sections)} | more}


DECODERS = frozenset(
    each(
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer bigbird_pegasus trocr "
        "prophetnet"
    )
)
"""Families whose configuration has to be told that they write text."""

_FOUR_ENCODER_LAYERS = each(
    "BartConfig BigBirdPegasusConfig BlenderbotConfig BlenderbotSmallConfig MBartConfig MvpConfig PegasusConfig "
    "PLBartConfig",
    {"encoder_layers": 4},
)
_WINDOWED_VISION = each(
    "Qwen2_5_VLVisionConfig Qwen2_5OmniVisionEncoderConfig Exaone4_5_VisionConfig",
    {
        "window_size": 32,
        "depth": 2,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
        "hidden_size": 32,
        "num_heads": 4,
    },
)
_ROTARY_PLANES = (
    each(
        "Qwen2VLTextConfig Qwen2_5_VLTextConfig Qwen2_5OmniTextConfig PaddleOCRTextConfig Ernie4_5_VLMoeTextConfig",
        _planes(1, 1, 2),
    )
    | each(
        "Glm4vTextConfig Glm46VTextConfig Glm4vMoeTextConfig GlmOcrTextConfig",
        _planes(1, 1, 2, partial_rotary_factor=1.0),
    )
    | each("Cosmos3EdgeTextConfig HYV4VLTextConfig", _planes(2, 1, 1))
)
_INKLING = {
    "unpadded_vocab_size": VOCAB,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}

_TEXT: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": {"layer_group_size": 2},
    "BambaConfig": {"attn_layer_indices": [1, 3], "mamba_d_head": "auto"},
    "BltConfig": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [2, 3],
        "local_attention_window_len": 16,
    },
    "CohereCompassTextConfig": {
        "layer_types": _LOCAL_AND_FULL,
        "rope_parameters": {kind: dict(_ROPE) for kind in _LOCAL_AND_FULL[:2]},
    },
    "DbrxAttentionConfig": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "sliding_window": 6,
        "head_dim": 24,
        "num_key_value_heads": 4,
        "index_topk": 64,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "GraniteMoeHybridConfig": {"layer_types": _LINEAR_AND_FULL, "mamba_d_head": "auto", "num_key_value_heads": 2},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8, "moe_topk": 2},
    "HunYuanVLTextConfig": {"head_dim": 8} | _planes(1, 1, 1, 1, name="xdrope_section"),
    "Inkling2LoopTextConfig": _INKLING,
    "Inkling2TextConfig": _INKLING,
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": {"layer_types": _LINEAR_AND_FULL, "v_head_dim": 16},
    "Lfm2Config": {"layer_types": _CONV_AND_FULL},
    "Lfm2MoeConfig": {"layer_types": _CONV_AND_FULL},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "MarianConfig": {"encoder_layers": 4, "decoder_vocab_size": VOCAB},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": 8},
    "NemotronHConfig": {"layers_block_type": ["mamba", "attention", "moe", "attention"], "n_groups": 1},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 128,
        "hc_lowrank": 8,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2,
    },
    "Step3p7TextConfig": {"sliding_window": 6},
    "WhisperConfig": {
        "encoder_layers": 4,
        "max_source_positions": 64,
        "max_target_positions": 128,
        "num_mel_bins": 8,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
    "XmodConfig": {"default_language": "en_XX", "languages": ["en_XX"]},
    "Zamba2Config": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
    },
    "ZambaConfig": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "attention_head_dim": 16,
    },
    "ZayaConfig": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "xLSTMConfig": {
        "num_heads": 2,
        "qk_dim_factor": 1.0,
        "v_dim_factor": 1.0,
        "num_blocks": 4,
        "embedding_dim": 32,
        "chunk_size": 16,
        "hidden_size": 64,
    },
}

_ONE_TILE = {"image_grid_pinpoints": [[32, 32]]}
_IMAGE_AND_VIDEO = {"image_token_id": 97, "video_token_id": 96}

_VISION: dict[str, dict[str, Any]] = {
    "Blip2Config": {"image_token_index": 97},
    "InstructBlipConfig": {"image_token_index": 97},
    "JanusVQVAEConfig": {"base_channels": 32, "num_embeddings": 16},
    "MuseGlimmerConfig": {"projector_hidden_size": 32},
    "MuseSparkConfig": {"projector_hidden_size": 32},
    "MuseSparkTextConfig": {"moe_hidden_size": 32},
    "MuseSparkAudioConfig": {"hidden_sizes": [16, 16, 32, 32]},
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    "ChameleonVQVAEConfig": {"resolution": 32, "base_channels": 32, "num_embeddings": 16},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "Dots3NoteAudioConfig": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "Gemma3nVisionConfig": {"architecture": "resnet18", "hidden_size": 512},
    "Gemma4UnifiedVisionConfig": {
        "mm_embed_dim": 32,
        "output_proj_dims": 32,
        "mm_posemb_size": 64,
        "pooling_kernel_size": 1,
    },
    "Gemma4VisionConfig": {"num_key_value_heads": 4, "position_embedding_size": 64},
    "Inkling2LoopVisionConfig": {"text_hidden_size": 32},
    "Inkling2VisionConfig": {"text_hidden_size": 32},
    "Kimi_K25Config": {"projection_hidden_size": 32},
    "Llama4VisionConfig": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "LlavaNextConfig": _ONE_TILE,
    "LlavaNextVideoConfig": _ONE_TILE,
    "LlavaOnevisionConfig": _ONE_TILE,
    "MiniCPMOcrConfig": _IMAGE_AND_VIDEO,
    "MiniCPMV4_6Config": _IMAGE_AND_VIDEO,
    "MiniCPMV4_7Config": _IMAGE_AND_VIDEO,
    "MllamaTextConfig": {"cross_attention_layers": [1, 3]},
    "MllamaVisionConfig": {
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 96,
        "hidden_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "attention_heads": 4,
    },
    "Molmo2VisionConfig": {"image_size": [32, 32]},
    "Molmo2VitConfig": {"image_size": [32, 32]},
    "Qwen2VLVisionConfig": {
        "embed_dim": 32,
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 4,
        "patch_size": 8,
        "mlp_ratio": 2,
    },
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2]},
}

BY_CLASS: dict[str, dict[str, Any]] = _FOUR_ENCODER_LAYERS | _WINDOWED_VISION | _ROTARY_PLANES | _TEXT | _VISION


def _letters(number: int) -> str:
    """A code as Chameleon writes it: A for 0, B for 1, ..."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


BY_FAMILY: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 97, **{f"IMGIMG{_letters(i)}Z": 60 + i for i in range(16)}}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90, "vision_end_token_id": 89},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90, "vision_end_token_id": 89},
}
