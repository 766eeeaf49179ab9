"""Cases about models: their inputs, their caches, edits made to them. Each test is named after the id of its case."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from checks import STEADY, cache_name, no_forward, padded, plain, spec
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import specnb
from specnb.decoding.lm import block_check

X = tiny.ids(0, 7)
OLD = cache_name(tiny.llama()) == "past_key_values"  # transformers before 5.24
HOWS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "plain": lambda model: {"method": "plain"},
    "lookup": lambda model: {"prompt_lookup_num_tokens": 4},
    "draft": lambda model: {"assistant_model": tiny.noisy(model, 0.02), **STEADY},
    "exit": lambda model: {"assistant_early_exit": 2, **STEADY},
}


def same(model: PreTrainedModel, ids: torch.Tensor, n: int, how: str, **more: Any) -> None:
    """specnb's text is transformers' own."""
    mask = more.pop("attention_mask", torch.ones_like(ids))
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": n, **more}
    expected = model.generate(ids, **options)
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 1  # a text that says something
    assert torch.equal(specnb.generate(model, ids, **HOWS[how](model), **options).sequences, expected)


# ---------------------------------------------------------------- VL-01: positions in several planes
def qwen_vl() -> PreTrainedModel:
    text = {**tiny._shape(64), "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": 2,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 8, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
        ).eval()
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape) * 0.3 if parameter.dim() > 1 else parameter.data
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def pictured(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths with an image each, as a processor makes them."""
    prompts, types = [], []
    for r in range(rows):
        words = torch.randint(1, 59, (1, 9 + 3 * r), generator=torch.Generator().manual_seed(r))
        image = torch.tensor([[62] + [60] * 4 + [63]])
        prompts.append(torch.cat([words[:, :2], image, words[:, 2:]], 1))
        types.append((prompts[-1] == 60).long())
    ids, mask = padded(prompts)
    pixels = torch.randn(16 * rows, 12, generator=torch.Generator().manual_seed(2))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": padded(types)[0],
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
    }


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("how", HOWS)
def test_VL_01_positions_of_an_image(how: str, rows: int) -> None:
    model, given = qwen_vl(), pictured(rows)
    ids = given.pop("input_ids")
    same(model, ids, 16, how, **given)
    same(model, tiny.ids(1, 9), 16, how)  # and text alone, after an image


def test_VL_01_the_image_is_seen() -> None:
    model, given = qwen_vl(), pictured(1)
    texts = [specnb.generate(model, **given, max_new_tokens=8, do_sample=False, method="plain").ids]
    given["pixel_values"] = given["pixel_values"] * -2
    texts.append(specnb.generate(model, **given, max_new_tokens=8, do_sample=False, method="plain").ids)
    assert texts[0] != texts[1]


def test_VL_01_positions_of_the_users_own() -> None:
    """Any positions that are given are used, and go on one by one."""
    model = tiny.llama()
    same(model, X, 12, "lookup", position_ids=torch.tensor([[0, 1, 2, 10, 11, 12, 13]]))
    same(model, X, 12, "draft", position_ids=torch.arange(7)[None] * 2)


# ---------------------------------------------------------------- RP-01: rotary embeddings that follow the length
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "factor": 8.0,
    "long_factor": [1.5, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": 12,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("length", [7, 11, 12, 13, 20])
def test_RP_01_long_rope(how: str, length: int) -> None:
    """No block crosses the length at which the factors change, nor does a cache of the one kind serve the other."""
    own = {"rope_parameters": LONG, "original_max_position_embeddings": 12}
    model = tiny._build("Phi3ForCausalLM", 0, **{**tiny._shape(64), **own})
    if OLD and how != "plain":  # transformers itself loses the beginning of the text there
        with no_forward(model), pytest.raises(ValueError, match=r"may outgrow 12 tokens.*smaller max_new_tokens"):
            spec(model, tiny.ids(3, length), max_new_tokens=16, **HOWS[how](model))
        return
    same(model, tiny.ids(3, length), 16, how)
    same(model, tiny.ids(3, 4), 8, how)  # which stays below, and is fed as most models are


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_RP_01_in_a_model_that_keeps_its_cache(how: str, kind: str) -> None:
    rope = {**LONG, "rope_type": kind} if kind == "longrope" else {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    own = {"rope_parameters": rope, "max_position_embeddings": 96 if kind == "longrope" else 12}
    same(tiny._build("LlamaForCausalLM", 0, **{**tiny._shape(64), **own}), tiny.ids(3, 8), 20, how)


# ---------------------------------------------------------------- PI-01: preparations of one's own
def doubled(given: dict[str, Any]) -> dict[str, Any]:
    given["position_ids"] = given["position_ids"] * 2
    return given


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_PI_01_of_a_subclass(how: str, family: str) -> None:
    model = tiny.family(family, 5)

    class Own(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return doubled(super().prepare_inputs_for_generation(*args, **kwargs))

    model.__class__ = Own
    if OLD and family == "gemma3" and how != "plain":
        with pytest.raises(ValueError, match=r"has sliding windows.*newer transformers"):
            spec(model, X, max_new_tokens=24, **HOWS[how](model), on_step=lambda step: pytest.fail("a token came"))
        return
    same(model, X, 24, how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_PI_01_of_an_instance(how: str, family: str) -> None:
    model = tiny.family(family)
    theirs = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: doubled(theirs(*args, **kwargs))
    options = {"attention_mask": torch.ones_like(X), "do_sample": False, "max_new_tokens": 16}
    expected = model.generate(X, **options)
    if OLD and family == "gemma3" and how != "plain":
        with pytest.raises(ValueError, match=r"has sliding windows.*newer transformers"):
            spec(model, X, max_new_tokens=16, **HOWS["lookup"](model), on_step=lambda step: pytest.fail("a token came"))
        return
    hows = HOWS if how != "draft" else {"draft": lambda model: {"assistant_model": tiny.family(family), **STEADY}}
    assert torch.equal(specnb.generate(model, X, **hows[how](model), **options).sequences, expected)


def test_PI_01_in_several_rows() -> None:
    model = tiny.llama()

    class Own(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return doubled(super().prepare_inputs_for_generation(*args, **kwargs))

    model.__class__ = Own
    ids, mask = padded([X, tiny.ids(4, 11)])
    same(model, ids, 12, "lookup", attention_mask=mask)


# ---------------------------------------------------------------- AC-01: autocast
@pytest.mark.parametrize("how", ["plain", "lookup", "exit"])
def test_AC_01_packed_weights_under_autocast(how: str) -> None:
    model = tiny.llama(hidden=512)
    specnb.pack(model)
    with torch.autocast("cpu", torch.bfloat16):
        result = spec(model, X, max_new_tokens=6, **HOWS[how](model))
    assert result.num_emitted_tokens == 6


# ---------------------------------------------------------------- RN-01: norms that are unlike others
@pytest.mark.parametrize("how", HOWS)
def test_RN_01_norms_without_weights(how: str) -> None:
    same(tiny._build("DiffLlamaForCausalLM", 0, **tiny._shape(64)), X, 12, how)


class ShyRMSNorm(nn.Module):
    """Takes inputs of its own width only, and says so with an error of its own."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[-1] != 32 or hidden_states.shape[-2] > 40 or hidden_states.abs().max() > 50:
            raise LookupError("not for me")
        return nn.functional.rms_norm(hidden_states, (32,), self.weight, self.variance_epsilon)


def test_RN_01_norms_that_raise_when_tried() -> None:
    model = tiny.llama()
    for layer in model.model.layers:
        layer.input_layernorm = ShyRMSNorm(layer.input_layernorm)
    same(model, X, 12, "lookup")


# ---------------------------------------------------------------- OF-01: offloaded models
@pytest.mark.parametrize("how", HOWS)
def test_OF_01_offloaded(how: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = plain(tiny.llama(), X, max_new_tokens=12)
    kept = HOWS[how](tiny.llama())
    model = accelerate.cpu_offload(tiny.llama(), execution_device=torch.device("cpu"))
    assert list(spec(model, X, max_new_tokens=12, **kept).ids) == expected


@pytest.mark.parametrize("how", HOWS)
def test_OF_01_offloaded_with_running_states(how: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    if cache_name(tiny.llama()) != "cache":
        pytest.skip("transformers < 5.24")
    expected = plain(tiny.hybrid(), X, max_new_tokens=12)
    model = accelerate.cpu_offload(tiny.hybrid(), execution_device=torch.device("cpu"))
    assert list(spec(model, X, max_new_tokens=12, **HOWS[how](tiny.hybrid())).ids) == expected


# ---------------------------------------------------------------- CK-01: models in training mode
def training(**rates: float) -> PreTrainedModel:
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = tiny._build("GPT2LMHeadModel", 0, vocab_size=64, **shape, **rates)
    model.train()
    return model


def test_CK_01_gradient_checkpointing() -> None:
    model = training(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    assert list(spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=3).ids) == plain(model, X, max_new_tokens=8)
    model.gradient_checkpointing_enable()
    with no_forward(model), pytest.raises(ValueError, match=r"gradient checkpointing.*model\.eval\(\)"):
        spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=3)
    model.eval()
    assert list(spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=3).ids) == plain(model, X, max_new_tokens=8)


def test_CK_01_dropout() -> None:
    model = training(resid_pdrop=0.1, embd_pdrop=0, attn_pdrop=0)
    with no_forward(model), pytest.raises(ValueError, match=r"drops values at random.*model\.eval\(\)"):
        spec(model, X, max_new_tokens=8, method="plain")
    llama = tiny._build("LlamaForCausalLM", 0, **tiny._shape(64), attention_dropout=0.2)
    llama.train()
    with no_forward(llama), pytest.raises(ValueError, match=r"self_attn drops values at random"):
        spec(llama, X, max_new_tokens=8, method="plain")


# ---------------------------------------------------------------- FA-01: attention functions of one's own
def looks_for_linear(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """As transformers' flash attention does, to find out its dtype."""
    assert next(child for child in module.modules() if isinstance(child, nn.Linear)).weight.dtype is torch.float32
    more.pop("is_causal", None)
    return sdpa_attention_forward(module, q, k, v, mask, **more)


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_FA_01_an_attention_without_masks(how: str, prepacked: bool) -> None:
    """transformers makes no mask for it, so a block would not be causal."""
    AttentionInterface.register("looks_for_linear", looks_for_linear)
    model = tiny.llama(hidden=128 if prepacked else 32)
    model.config._attn_implementation = "looks_for_linear"
    if prepacked:
        specnb.pack(model)
    same(model, X, 16, how)
    ids, mask = padded([X, tiny.ids(5, 7)])
    same(model, ids, 8, how, attention_mask=mask)


# ---------------------------------------------------------------- the net: models that nobody tested
class Leaky(nn.Module):
    """Scales by the largest value of the whole pass, as dynamic quantisation does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 7
        return self.layer((x / scale).round() * scale)


def test_a_layer_that_mixes_tokens_is_refused_before_the_first() -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.down_proj = Leaky(model.model.layers[1].mlp.down_proj)
    for how in ("lookup", "draft", "exit"):
        with pytest.raises(ValueError, match=r"another result for a block.*one by one \(logits differ") as refusal:
            spec(model, X, max_new_tokens=8, **HOWS[how](model), on_step=lambda step: pytest.fail("a token came"))
        assert "\n" not in str(refusal.value)
    same(model, X, 8, "plain")  # which takes the tokens one by one


def test_an_exchanged_layer_that_does_not_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twin(nn.Linear):
        pass

    model, checked = tiny.llama(), []
    twin = Twin(64, 32, bias=False)
    twin.weight = model.model.layers[0].mlp.down_proj.weight
    theirs = block_check._difference
    monkeypatch.setattr(block_check, "_difference", lambda *given: checked.append(1) or theirs(*given))
    same(model, X, 8, "lookup")
    assert not checked  # a tested family, as transformers makes it
    model.model.layers[0].mlp.down_proj = twin
    same(model, X, 8, "lookup")
    same(model, X, 8, "lookup")
    assert len(checked) == 1
    model.model.layers[2].mlp.down_proj = copy.deepcopy(twin)
    same(model, X, 8, "lookup")
    assert len(checked) == 2


def test_a_model_that_fails_in_the_block_check_is_refused_in_one_line() -> None:
    model = tiny.llama()

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] in (2, 3, 4):
                raise RuntimeError("no blocks\nof this size")
            return x

    model.model.norm = nn.Sequential(model.model.norm, Failing())
    with pytest.raises(ValueError, match="RuntimeError: no blocks of this size") as refusal:
        spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=3)
    assert "\n" not in str(refusal.value)


def test_the_block_check_leaves_the_random_state_alone() -> None:
    model = tiny.llama()
    model.model.norm = nn.Sequential(model.model.norm)
    state = torch.get_rng_state()
    spec(model, X, max_new_tokens=4, prompt_lookup_num_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- caches of another kind
@pytest.mark.parametrize("how", HOWS)
def test_sparse_attention_with_an_indexer(how: str) -> None:
    """Its cache keeps keys of the indexer, too, and can be taken back."""
    from families.build import build

    model = build("deepseek_v32")
    same(model, torch.tensor([[5, 17, 23, 42, 5, 17, 61, 5, 17]]), 12, how)


def test_layers_that_hold_an_image_stay() -> None:
    """Mllama's cross attention keeps the image's keys: a rejected draft removes none of them."""
    from families.build import IMAGE_TEXT, build
    from families.images import image_inputs

    model = build("mllama", IMAGE_TEXT)
    given = image_inputs(model)
    options = {**given, "do_sample": False, "max_new_tokens": 20}
    expected = model.generate(**options)
    result = specnb.generate(model, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(result.sequences, expected)
    assert result.num_draft_tokens > result.num_accepted_draft_tokens


def test_several_rows_with_an_image_that_cannot_be_told_apart_are_refused() -> None:
    from families.build import IMAGE_TEXT, build
    from families.images import two_rows

    model = build("mllama", IMAGE_TEXT)
    given = two_rows(model)
    with no_forward(model), pytest.raises(ValueError, match=r"several rows with .*generate the prompts one by one"):
        specnb.generate(model, **given, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)


# ---------------------------------------------------------------- what the fuzzer found
@pytest.mark.parametrize("how", ["plain", "lookup"])
def test_masks_in_float64(how: str) -> None:
    """seed 101, draw 502: the lowest number of float64 has no place in float32."""
    own = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
    model = tiny._build("Gemma2ForCausalLM", 0, **{**tiny._shape(64, layers=2), **own}).double()
    prompts = [tiny.ids(seed, n) for seed, n in ((1, 5), (2, 12))]
    ids, mask = padded(prompts)
    result = spec(model, ids, attention_mask=mask, max_new_tokens=16, **HOWS[how](model))
    assert [list(row.ids) for row in result.rows] == [plain(model, p, max_new_tokens=16) for p in prompts]


def test_block_verification_does_not_go_by_the_clock() -> None:
    """seed 101, draw 741: its text depends on the lengths of the drafts."""
    model = tiny.llama()
    options = {"prompt_lookup_num_tokens": None, "method": "prompt_lookup", "do_sample": True, "seed": 1}
    result = specnb.generate(model, X, max_new_tokens=8, verification="block", **options)
    assert result.options["num_assistant_tokens_schedule"] == "constant"
    result = specnb.generate(model, X, max_new_tokens=8, **options)
    assert result.options["num_assistant_tokens_schedule"] == "adaptive"


def test_drafts_of_a_family_that_counts_its_decoders_layers() -> None:
    """seed 707: a truncated Marian was built with more layers than its config said."""
    from families.build import build

    model = build("marian")
    draft = specnb.truncate(model, 2)
    ids = torch.tensor([[5, 17, 23, 42, 5, 17]])
    expected = plain(model, ids, max_new_tokens=12)
    assert list(spec(model, ids, max_new_tokens=12, assistant_model=draft, **STEADY).ids) == expected


def test_mtp_layers_of_an_offloaded_model_are_refused() -> None:
    """seed 505, draw 1308: they share the embedding and the head, which are elsewhere."""
    accelerate = pytest.importorskip("accelerate")
    model = specnb.load("tiny-glm4-moe").target
    model = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"MTP layers of Glm4MoeForCausalLM.*offloaded"):
        spec(model, X, max_new_tokens=4, use_mtp=True, on_step=lambda step: pytest.fail("a token came"))


def test_a_cache_without_use_cache_is_refused() -> None:
    """seed 202, draw 182: transformers would feed the whole text into it again and again."""
    from transformers import DynamicCache

    model = tiny._build("MptForCausalLM", 0, vocab_size=64, d_model=32, n_heads=4, n_layers=2, use_cache=False)
    assert list(spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=3).ids) == plain(model, X, max_new_tokens=8)
    if not OLD:  # nothing says there that a cache was given
        with no_forward(model), pytest.raises(ValueError, match="use_cache=False: leave the cache out"):
            spec(model, X, max_new_tokens=8, method="plain", cache=DynamicCache())
