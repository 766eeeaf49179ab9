"""MTP layers of families other than GLM-4.5 and DeepSeek-V3.

Some work, with checkpoints named like the released ones. Those whose target cannot be rolled back are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from checks import STEADY, cache_name, no_forward, padded, plain, spec
from safetensors.torch import load_file, save_file
from test_mtp import drafting
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as MASKS

import specnb
from specnb.models.mtp import load_mtp

X = tiny.ids(0, 13)  # longer than the sliding windows
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 2)]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


def known(model_type: str) -> Any:
    """The config class, or a skip where this version of transformers does not have the family."""
    config = transformers.CONFIG_MAPPING
    if model_type not in config:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    if model_type == "mellum" and not hasattr(config[model_type](), "mtp_layer_types"):
        pytest.skip(f"transformers {transformers.__version__} makes no MTP layers for mellum")
    return config[model_type]


def mellum() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = known("mellum")(**SHAPE, num_experts=4, sliding_window=8, layer_types=kinds, num_mtp_layers=1)
    return transformers.MellumForCausalLM(config)


def step3p7() -> PreTrainedModel:
    """A composite class; two MTP layers, of which one slides."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    text = {
        **SHAPE,
        "num_nextn_predict_layers": 2,
        "layer_types": kinds,
        "sliding_window": 8,
        "n_routed_experts": 4,
        "share_expert_dim": 16,
        "num_sliding_attention_heads": 4,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "mlp_ratio": 2.0,
    }
    config = known("step3p7")(text_config=text, vision_config=vision)
    return transformers.Step3p7ForConditionalGeneration(config)


HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
LINEAR = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8) | dict.fromkeys(
    ("linear_num_key_heads", "linear_num_value_heads"), 2
)


def qwen3_5() -> PreTrainedModel:
    config = known("qwen3_5_text")(**SHAPE, **HYBRID, **LINEAR, mtp_num_hidden_layers=1)
    return transformers.Qwen3_5ForCausalLM(config)


def qwen3_5_vision() -> PreTrainedModel:
    """As released: with a vision tower, the text model one level down."""
    text = {**SHAPE, **HYBRID, **LINEAR, "mtp_num_hidden_layers": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    return transformers.Qwen3_5ForConditionalGeneration(known("qwen3_5")(text_config=text, vision_config=vision))


def qwen3_5_moe() -> PreTrainedModel:
    experts = {"num_experts": 4, "shared_expert_intermediate_size": 16}
    config = known("qwen3_5_moe_text")(**SHAPE, **HYBRID, **LINEAR, **experts, mtp_num_hidden_layers=1)
    return transformers.Qwen3_5MoeForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Its config does not say that its checkpoint has an MTP layer."""
    experts = {"num_experts": 4, "shared_expert_intermediate_size": 16}
    return transformers.Qwen3NextForCausalLM(known("qwen3_next")(**SHAPE, **HYBRID, **LINEAR, **experts))


def bailing_hybrid() -> PreTrainedModel:
    """Its MTP layer is one of attention, as the names of its tensors say."""
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"} | {"head_dim": 8, "first_k_dense_replace": 1}
    shape["num_key_value_heads"] = shape["num_attention_heads"]
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = known("bailing_hybrid")(**shape, **latent, **HYBRID, n_routed_experts=4, n_group=1, topk_group=1)
    return transformers.BailingHybridForCausalLM(config)


def mellum_names(name: str) -> str:
    """`mtp.fc`, `mtp.pre_fc_norm_*` and `mtp.norm` beside the block `mtp.layers.0`."""
    parts = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
    }
    for part, own in parts.items():
        if name == f"layers.3.{part}.weight":
            return f"mtp.{own}.weight"
    return "mtp." + name.replace("layers.3.", "layers.0.")


def inkling_text() -> dict[str, Any]:
    """A text config: two dense layers, of which one slides, and a third of experts; short relative positions."""
    return {
        **SHAPE,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 9,
        "log_scaling_n_floor": 5,
        "log_scaling_alpha": 0.5,
        "logits_mup_width_multiplier": 1.5,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "num_mtp_layers": 2,
        "mtp_local_layer_ids": [1],
        "chain_hidden_post_norm": True,
    }


def inkling() -> PreTrainedModel:
    known("inkling_mm_model")
    return transformers.InklingForCausalLM(transformers.InklingTextConfig(**inkling_text()))


def inkling_mm() -> PreTrainedModel:
    """As released: with towers for images and sound."""
    if cache_name(tiny.llama()) != "cache":
        pytest.skip(
            f"transformers {transformers.__version__} does not roll back what prepares its own inputs and slides"
        )
    vision = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4}
    audio = {"n_mel_bins": 4, "mel_vocab_size": 8}
    config = known("inkling_mm_model")(text_config=inkling_text(), vision_config=vision, audio_config=audio)
    return transformers.InklingForConditionalGeneration(config)


def inkling_names(name: str) -> str | None:
    """One norm for all layers, each with its block in `transformer_block`."""
    parts = {"eh_proj": "input_proj", "enorm": "embed_norm", "hnorm": "hidden_norm"}
    number, rest = name.removeprefix("layers.").split(".", 1)
    if rest.startswith("shared_head"):
        return "model.mtp.chain_norm.weight" if number == "3" else None
    own, kind = rest.split(".", 1)
    rest = f"{parts[own]}.{kind}" if own in parts else f"transformer_block.{rest}"
    return f"model.mtp.layers.{int(number) - 3}.{rest}"


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[str], str | None], list[int]]] = {
    "mellum": (mellum, mellum_names, [2]),
    "qwen3_5": (qwen3_5, mellum_names, [2]),
    "qwen3_5_vision": (qwen3_5_vision, mellum_names, [2]),
    "qwen3_5_moe": (qwen3_5_moe, mellum_names, [2]),
    "qwen3_next": (qwen3_next, mellum_names, [2]),
    "bailing_hybrid": (bailing_hybrid, lambda name: f"model.{name}", [2]),
    "step3p7": (step3p7, lambda name: f"model.{name}", [1, 2]),
    "inkling": (inkling, inkling_names, [0, 1]),
    "inkling_mm": (inkling_mm, inkling_names, [0, 1]),
}
"""How to make the model, the names of MTP tensors, and the layers that the MTP layers are copies of."""


def checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """The model, loaded from a checkpoint with MTP tensors beside the others: noisy copies of its layers."""
    make, named, copied = FAMILIES[family]
    if family.startswith("qwen") and cache_name(tiny.llama()) != "cache":
        pytest.skip(f"transformers {transformers.__version__} does not read MTP layers that are stored as mtp.*")
    with torch.random.fork_rng():
        torch.manual_seed(int(family == "inkling_mm"))  # with 0 it never accepts a draft
        model = make().float().eval()
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.08)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.8, 1.2)
        model.save_pretrained(folder)
        file = folder / "model.safetensors"
        saved, more = load_file(file), {}
        for j, like in enumerate(copied):
            for name, value in saved.items():
                if f"layers.{like}." in name and "vision" not in name:
                    rest = name.split(f"layers.{like}.")[1]
                    more[f"layers.{3 + j}.{rest}"] = value + 0.02 * torch.randn(value.shape)
            mixed = [torch.eye(32), 0.1 * torch.randn(32, 32)]
            mixed = mixed[::-1] if family.startswith("inkling") else mixed
            more[f"layers.{3 + j}.eh_proj.weight"] = torch.cat(mixed, 1)
            for part in ("enorm", "hnorm", "shared_head.norm"):
                more[f"layers.{3 + j}.{part}.weight"] = 0.8 + 0.4 * torch.rand(32)
        added = {own: value.contiguous() for name, value in more.items() if (own := named(name)) is not None}
        save_file(saved | added, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    declared = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    assert any(name in json.dumps(config) for name in declared) or family == "qwen3_next"
    return loaded(model, folder)


def loaded(like: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model = type(like).from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


@torch.no_grad()
def clean(model: PreTrainedModel, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, vocab]` of transformers' `MtpModel` over the whole text, with an empty cache.

    For `hybrid_sliding` layers it makes a mask without the window, which the cache of a longer text then has.
    """
    text, end = torch.tensor([ids]), len(ids) - 1
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(kinds := MASKS.get("hybrid_sliding"), dict):
            patch.setitem(kinds, "sliding_attention", MASKS["sliding_attention"])
        for layer, kind in zip(
            load_mtp(model).layers, getattr(load_mtp(model).config, "layer_types", ()), strict=False
        ):
            patch.setattr(layer, "layer_type", kind, raising=False)  # before transformers 5.24 it is looked for here
        theirs, logits, _ = load_mtp(model)(
            input_ids=text[:, 1:],
            last_hidden_states=model.get_decoder()(text).last_hidden_state[:, :end],
            attention_mask=torch.ones_like(text[:, 1:]),
            logits_processor=LogitsProcessorList(),
            full_input_ids=text,
            position_ids=torch.arange(1, 1 + end)[None],
            mtp_cache=MtpCache(config=load_mtp(model).config),
        )
    assert theirs[0, : len(drafted)].tolist() == drafted
    return logits[0, : len(drafted)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_named_as_released_drafts_what_a_clean_pass_drafts(family: str, tmp_path: Path) -> None:
    model = checkpoint(family, tmp_path)
    ids, mask = padded(PROMPTS)
    count = len(FAMILIES[family][2])
    expected = [plain(model, prompt, max_new_tokens=24) for prompt in PROMPTS]
    compared = 0
    for given, more in ((X, {}), (ids, {"attention_mask": mask})):
        with drafting() as drafts:
            result = spec(model, given, max_new_tokens=24, use_mtp=True, **more, **STEADY)
        assert [list(row.ids) for row in result.rows] == expected[: len(result.rows)]
        assert max(len(step.drafted) for step in result.steps) == count
        for text, tokens, logits in drafts:
            theirs = clean(model, text, tokens)
            assert (theirs - logits).abs().max() < 1e-4 * max(1, float(theirs.abs().max()))
            compared += 1
        assert 0 < result.num_accepted_draft_tokens < result.num_draft_tokens
    assert compared > 20
    with drafting() as drafts:
        deep = spec(model, X, max_new_tokens=24, use_mtp=True, num_assistant_tokens=5, **STEADY)
    assert list(deep.ids) == expected[0]
    for text, tokens, logits in drafts:  # the first round through the layers, after the slots of later ones went back
        theirs = clean(model, text, tokens[:count])
        assert (theirs - logits[:count]).abs().max() < 1e-4 * max(1, float(theirs.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_save_pair_keeps_the_layers(family: str, tmp_path: Path) -> None:
    model = checkpoint(family, tmp_path / "released")
    one = spec(model, X, max_new_tokens=16, use_mtp=True, **STEADY)
    specnb.save_pair(specnb.Pair(model, None), tmp_path / "saved")
    two = spec(loaded(model, tmp_path / "saved"), X, max_new_tokens=16, use_mtp=True, **STEADY)
    assert [s.drafted for s in one.steps] == [s.drafted for s in two.steps]


def bailing() -> PreTrainedModel:
    config = known("bailing_hybrid")(**SHAPE, n_routed_experts=4)
    return transformers.BailingHybridForCausalLM(config)


def test_mtp_layers_with_a_running_state_are_refused_by_name() -> None:
    """Its own layers' states are rolled back to a copy; for those of its MTP layers that is not built."""
    model = bailing().eval()
    with no_forward(model), pytest.raises(ValueError, match=r"MTP layers of BailingHybridForCausalLM.*another method"):
        spec(model, X, max_new_tokens=4, use_mtp=True)


def test_a_padded_head_is_sampled_from(tmp_path: Path) -> None:
    """Inkling gives fewer logits than the vocabulary has tokens."""
    model = checkpoint("inkling", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"unpadded_vocab_size": 60}))
    model = loaded(model, tmp_path)
    options = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 24, "use_mtp": True, **STEADY}
    result = specnb.generate(model, X, attention_mask=torch.ones_like(X), seed=1, **options)
    assert len(result.ids) == 24
    assert max(result.ids) < 60
    assert 0 < result.num_accepted_draft_tokens < result.num_draft_tokens


@pytest.mark.parametrize("lost", ["chain_norm.weight", "layers.1.input_proj.weight", "layers.1."])
def test_missing_tensors_of_nested_layers_are_named(lost: str, tmp_path: Path) -> None:
    model = checkpoint("inkling", tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not name.startswith(f"model.mtp.{lost}")}
    save_file(kept, file, {"format": "pt"})
    model, named = loaded(model, tmp_path), f"lacks model.mtp.{lost}" + ("*" if lost.endswith(".") else "")
    with no_forward(model), pytest.raises(ValueError, match=re.escape(named)):
        spec(model, X, max_new_tokens=4, use_mtp=True)


def test_the_embedding_is_not_copied(tmp_path: Path) -> None:
    """transformers copies it, to leave out its norm; the short convolutions stay in float32 as the target's do."""
    model = checkpoint("inkling", tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    mtp = load_mtp(half)
    assert mtp.embed_tokens.weight is half.get_input_embeddings().weight
    ids = torch.arange(8)
    assert torch.equal(mtp.embed_tokens(ids), half.get_input_embeddings().weight[ids])
    own = dict(half.get_decoder().layers[0].named_parameters())
    for name, parameter in mtp.layers[0].mtp_block.named_parameters():
        assert parameter.dtype == own[name].dtype, name
