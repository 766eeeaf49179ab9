"""MTP layers of families other than GLM-4.5 and DeepSeek-V3.

Some work, with checkpoints named like the released ones. Those whose target cannot be rolled back are refused by name.
"""

from __future__ import annotations

import json
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
from transformers import PreTrainedModel

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


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[str], str], int]] = {
    "mellum": (mellum, mellum_names, 1),
    "qwen3_5": (qwen3_5, mellum_names, 1),
    "qwen3_5_vision": (qwen3_5_vision, mellum_names, 1),
    "qwen3_5_moe": (qwen3_5_moe, mellum_names, 1),
    "qwen3_next": (qwen3_next, mellum_names, 1),
    "bailing_hybrid": (bailing_hybrid, lambda name: f"model.{name}", 1),
    "step3p7": (step3p7, lambda name: f"model.{name}", 2),
}


def checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """The model, loaded from a checkpoint with MTP tensors beside the others: noisy copies of its last layer."""
    make, named, count = FAMILIES[family]
    if family.startswith("qwen") and cache_name(tiny.llama()) != "cache":
        pytest.skip(f"transformers {transformers.__version__} does not read MTP layers that are stored as mtp.*")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().float().eval()
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.08)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.8, 1.2)
        model.save_pretrained(folder)
        file = folder / "model.safetensors"
        saved, more = load_file(file), {}
        for j in range(count):
            like = 1 if j == 0 and family == "step3p7" else 2  # the first of them slides
            for name, value in saved.items():
                if f"layers.{like}." in name and "vision" not in name:
                    rest = name.split(f"layers.{like}.")[1]
                    more[f"layers.{3 + j}.{rest}"] = value + 0.02 * torch.randn(value.shape)
            mixed = torch.cat([torch.eye(32), 0.1 * torch.randn(32, 32)], 1)
            more[f"layers.{3 + j}.eh_proj.weight"] = mixed
            for part in ("enorm", "hnorm", "shared_head.norm"):
                more[f"layers.{3 + j}.{part}.weight"] = 0.8 + 0.4 * torch.rand(32)
        save_file(saved | {named(name): value.contiguous() for name, value in more.items()}, file, {"format": "pt"})
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
    """Logits `[k, vocab]` from transformers' own layers and masks, over the whole text and without a cache."""
    mtp, text, end = load_mtp(model), [*ids, *drafted], len(ids) - 1
    states = model.get_decoder()(torch.tensor([ids])).last_hidden_state[:, :end]
    logits = []
    for m in range(len(drafted)):
        at = torch.arange(1 + m, 1 + m + end)[None]
        states = mtp.forward_layer(m, states, at, None, input_ids=torch.tensor([text[1 + m : 1 + m + end]]))
        logits.append(mtp._project_to_logits(states[:, -1])[0])
    return torch.stack(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_named_as_released_drafts_what_a_clean_pass_drafts(family: str, tmp_path: Path) -> None:
    model = checkpoint(family, tmp_path)
    ids, mask = padded(PROMPTS)
    count = FAMILIES[family][2]
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
    deep = spec(model, X, max_new_tokens=24, use_mtp=True, num_assistant_tokens=5, **STEADY)
    assert list(deep.ids) == expected[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pair_keeps_the_layers(family: str, tmp_path: Path) -> None:
    model = checkpoint(family, tmp_path / "released")
    one = spec(model, X, max_new_tokens=16, use_mtp=True, **STEADY)
    specnb.save_pair(specnb.Pair(model, None), tmp_path / "saved")
    two = spec(loaded(model, tmp_path / "saved"), X, max_new_tokens=16, use_mtp=True, **STEADY)
    assert [s.drafted for s in one.steps] == [s.drafted for s in two.steps]


def inkling() -> PreTrainedModel:
    known("inkling_mm_model")
    from transformers.models.inkling.configuration_inkling import InklingTextConfig

    return transformers.InklingForCausalLM(
        InklingTextConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, num_mtp_layers=2)
    )


def bailing() -> PreTrainedModel:
    config = known("bailing_hybrid")(**SHAPE, n_routed_experts=4)
    return transformers.BailingHybridForCausalLM(config)


def test_mtp_layers_with_a_running_state_are_refused_by_name() -> None:
    """Its own layers' states are rolled back to a copy; for those of its MTP layers that is not built."""
    model = bailing().eval()
    with no_forward(model), pytest.raises(ValueError, match=r"MTP layers of BailingHybridForCausalLM.*another method"):
        spec(model, X, max_new_tokens=4, use_mtp=True)


def test_mtp_layers_with_conv_states_are_refused_by_name() -> None:
    """Inkling's layers can be rolled back, but its MTP layers keep more than keys and values."""
    model = inkling().eval()
    with no_forward(model), pytest.raises(ValueError, match=r"MTP layers of InklingForCausalLM.*another method"):
        spec(model, X, max_new_tokens=4, use_mtp=True)
    if cache_name(model) == "cache":  # before transformers 5.24 its windows do not roll back
        expected = plain(model, X, max_new_tokens=12)
        assert list(spec(model, X, max_new_tokens=12, prompt_lookup_num_tokens=3).ids) == expected
