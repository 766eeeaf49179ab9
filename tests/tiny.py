"""Tiny, seeded models and tokenizers for the tests: no network, milliseconds to build.

Every model is float32, in eval mode, with a generation config that never stops by itself (no eos) and pads with 0.
The same arguments always give the same weights, and no builder disturbs the global random state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def _build(name: str, seed: int, **config: Any) -> PreTrainedModel:
    """A causal LM called `name` with seeded random weights."""
    model_class = getattr(transformers, name)
    common = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(model_class.config_class(**common, **config))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.float().eval()


def _shape(vocab: int, hidden: int = 32, layers: int = 4, positions: int = 256, std: float = 0.2) -> dict[str, Any]:
    """What llama-like configurations have in common."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "initializer_range": std,
    }


def llama(
    seed: int = 0, vocab: int = 64, hidden: int = 32, layers: int = 4, positions: int = 256, std: float = 0.2
) -> PreTrainedModel:
    """A tiny Llama."""
    return _build("LlamaForCausalLM", seed, **_shape(vocab, hidden, layers, positions, std))


def hybrid(seed: int = 0, vocab: int = 64, layers: int = 4, std: float = 0.2) -> PreTrainedModel:
    """A tiny Qwen3.5: layers of linear attention and of full attention in turn."""
    return _build(
        "Qwen3_5ForCausalLM",
        seed,
        **_shape(vocab, layers=layers, std=std),
        head_dim=8,
        layer_types=(["linear_attention", "full_attention"] * layers)[:layers],
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    )


def _qwen2(seed: int, vocab: int) -> PreTrainedModel:
    return _build("Qwen2ForCausalLM", seed, **_shape(vocab), tie_word_embeddings=True)


def _qwen3(seed: int, vocab: int) -> PreTrainedModel:
    return _build("Qwen3ForCausalLM", seed, **_shape(vocab), head_dim=8)


def mistral(seed: int = 0, vocab: int = 64, window: int = 6) -> PreTrainedModel:
    """A tiny Mistral with a sliding window on every layer."""
    return _build("MistralForCausalLM", seed, **_shape(vocab, layers=3), sliding_window=window)


_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2


def gemma3(seed: int = 0, vocab: int = 64, window: int = 6) -> PreTrainedModel:
    """A tiny Gemma 3 (text): windowed and full layers in turn, tied embeddings."""
    own = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": window, "layer_types": list(_LOCAL_GLOBAL)}
    return _build("Gemma3ForCausalLM", seed, **_shape(vocab), **own)


def gemma4(seed: int = 0, vocab: int = 64, window: int = 6, shared: int = 0, per_layer: int = 0) -> PreTrainedModel:
    """A tiny Gemma 4 (text): `shared` last layers reuse earlier keys and values, `per_layer` input embeddings."""
    own = {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": window,
        "layer_types": list(_LOCAL_GLOBAL),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": vocab if per_layer else 0,
        "num_kv_shared_layers": shared,
        "enable_moe_block": False,
        "use_double_wide_mlp": bool(shared),
    }
    return _build("Gemma4ForCausalLM", seed, **_shape(vocab), **own)


_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}


def glm4_moe(seed: int = 0, vocab: int = 64, layers: int = 4) -> PreTrainedModel:
    """A tiny GLM-4 MoE: one dense layer, then mixtures of experts."""
    own = {"head_dim": 8, "use_qk_norm": True}
    return _build("Glm4MoeForCausalLM", seed, **_shape(vocab, layers=layers), **_EXPERTS, **own)


def deepseek_v3(seed: int = 0, vocab: int = 64, layers: int = 4) -> PreTrainedModel:
    """A tiny DeepSeek-V3: latent attention, one dense layer, then grouped mixtures of experts."""
    own = {"n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
    own |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
    return _build("DeepseekV3ForCausalLM", seed, **{**_shape(vocab, layers=layers), **_EXPERTS, **own})


def gpt2(seed: int = 0, vocab: int = 64, layers: int = 3, positions: int = 256) -> PreTrainedModel:
    """A tiny GPT-2: learned absolute positions, tied embeddings."""
    shape = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": positions, "initializer_range": 0.3}
    return _build("GPT2LMHeadModel", seed, vocab_size=vocab, **shape)


FAMILIES: dict[str, Callable[[int, int], PreTrainedModel]] = {
    "llama": llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": mistral,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "gpt2": gpt2,
}


def family(name: str, seed: int = 0, vocab: int = 64) -> PreTrainedModel:
    """A tiny model of the family `name`, one of FAMILIES."""
    return FAMILIES[name](seed, vocab)


def noisy(model: PreTrainedModel, eps: float, seed: int = 1) -> PreTrainedModel:
    """A copy with `eps` * N(0, 1) added to every weight: a draft that is right sometimes, always for eps = 0."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(eps * torch.randn(parameter.shape, generator=generator))
    return copied


def ids(seed: int, n: int, vocab: int = 64) -> torch.Tensor:
    """Random prompt ids `[1, n]` without the special ids 0 to 2."""
    return torch.randint(3, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- tokenizers
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a small boat sails on the blue lake at noon",
    "numbers 1 2 3 4 5 and 10 20 30",
    "Ünïcödé and emoji 😀 🎉 are here too",
    "def add(a, b): return a + b",
    "the dog sails over the lake; the fox sits",
] * 20


def byte_tokenizer(size: int = 330) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (GPT-2's kind): no text is unknown to it, no token is added by itself."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def sp_tokenizer(size: int = 400, bos: bool = True) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer: leading-space marks, byte fallback, a bos put in front unless `bos` is False."""
    tokenizer = Tokenizer(tokenizer_models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """One id per word, after <unk>, <s> and </s>: small vocabularies for tests of distributions."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
