"""Greedy output is the target's own, token for token; rows are their single runs; rollback is recomputation."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, cache_name, consistent, no_forward, padded, plain, spec
from families.build import build
from transformers import PreTrainedModel, WatermarkingConfig

from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.model_inputs import CacheSize
from specnb.decoding.schedules import Constant

VOCAB = 64
DRAWS = 38  # per family; 9 families
FAMILIES = list(tiny.FAMILIES)


@cache
def target(family: str) -> PreTrainedModel:
    return tiny.family(family, seed=0)


@cache
def draft(family: str, kind: str) -> PreTrainedModel:
    """A draft for the family's target: its noisy copy, another seed of the family, or another architecture."""
    if kind == "unrelated":
        return tiny.family(family, seed=7)
    if kind == "other family":
        return tiny.gpt2(seed=3) if family != "gpt2" else tiny.llama(seed=3)
    return tiny.noisy(target(family), float(kind))


def some(rng: random.Random, n: int) -> list[int]:
    return rng.sample(range(3, VOCAB), n)


def an_option(rng: random.Random, new: int) -> dict[str, Any]:
    """One of the options of generate() that change the text."""
    a, b, c = some(rng, 3)
    eos = some(rng, 8)
    return rng.choice(
        [
            {"repetition_penalty": rng.choice([0.8, 1.2, 1.5])},
            {"no_repeat_ngram_size": rng.choice([1, 2, 3])},
            {"bad_words_ids": [[a], [b, c]]},
            {"sequence_bias": {(a,): 4.0, (b, c): -5.0, (a, a): -6.0}},
            {"min_new_tokens": rng.randint(1, new), "eos_token_id": eos},
            {"min_length": rng.randint(1, 50), "eos_token_id": eos},
            {"eos_token_id": eos},
            {"suppress_tokens": some(rng, 20)},
            {"begin_suppress_tokens": some(rng, 30)},
            {"forced_eos_token_id": rng.choice([2, [2, a]])},
            {"exponential_decay_length_penalty": (rng.randint(0, 6), 1.4), "eos_token_id": eos},
            {"encoder_repetition_penalty": 1.4},
            {"encoder_no_repeat_ngram_size": 2},
            {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5, bias=3.0)},
            {"remove_invalid_values": True, "renormalize_logits": True},
        ]
    )


def drafting(rng: random.Random, family: str) -> dict[str, Any]:
    """A method with options of its own."""
    options: dict[str, Any] = {"num_assistant_tokens": rng.randint(1, 16)}
    if rng.random() < 0.3:
        options["num_assistant_tokens_schedule"] = "heuristic"
    if rng.random() < 0.35:
        options["prefill_chunk_size"] = rng.choice([1, 3, 4, 8])
    if rng.random() < 0.4:
        return options | {"method": "prompt_lookup", "max_matching_ngram_size": rng.randint(1, 5)}
    kind = rng.choice(["0", "0", "0.03", "0.03", "0.5", "unrelated", "other family"])
    threshold = rng.choice([0, 0, 0.2, 0.4, 1])
    return options | {"assistant_model": draft(family, kind), "assistant_confidence_threshold": threshold}


def a_prompt(rng: random.Random) -> torch.Tensor:
    n = rng.randint(1, 40)
    if rng.random() < 0.4:  # one that repeats itself
        period = rng.randint(1, 5)
        return tiny.ids(rng.randrange(10**6), period).repeat(1, n)[:, :n]
    return tiny.ids(rng.randrange(10**6), n)


@pytest.mark.parametrize(
    "family", [name if name in ("llama", "gemma4") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_greedy_equals_plain(family: str) -> None:
    for draw in range(DRAWS):
        rng = random.Random(f"{family} {draw}")
        new = rng.randint(1, 24)
        options: dict[str, Any] = {"max_new_tokens": new}
        for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
            options |= an_option(rng, new)
        how, prompt = drafting(rng, family), a_prompt(rng)
        expected = plain(target(family), prompt, **options)
        result = spec(target(family), prompt, **options, **how)
        assert list(result.ids) == expected, (draw, prompt.tolist(), options, how)
        assert result.sequences.tolist() == [prompt[0].tolist() + expected]
        consistent(result)


@pytest.mark.slow
def test_the_draws_have_teeth() -> None:
    """Options change the text, and drafts are both accepted and rejected: the comparisons have something to find."""
    changed = drafted = accepted = 0
    for draw in range(30):
        rng = random.Random(f"llama {draw}")
        prompt = a_prompt(rng)
        options = {"max_new_tokens": 20} | an_option(rng, 20)
        changed += plain(target("llama"), prompt, **options) != plain(target("llama"), prompt, max_new_tokens=20)
        result = spec(target("llama"), prompt, **options, **drafting(rng, "llama"))
        drafted, accepted = drafted + result.num_draft_tokens, accepted + result.num_accepted_draft_tokens
    assert changed > 10
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize("variant", ["shared keys", "per-layer embeddings", "eager"])
def test_gemma4_variants_equal_plain(variant: str) -> None:
    model = tiny.gemma4(shared=2 if variant == "shared keys" else 0, per_layer=0 if variant == "eager" else 8)
    if variant == "eager":
        model.set_attn_implementation("eager")
    prompts = [tiny.ids(seed, n) for seed, n in enumerate((3, 9, 17))]
    expected = [plain(model, prompt, max_new_tokens=20) for prompt in prompts]
    ids, mask = padded(prompts)
    for how in (
        {"method": "prompt_lookup"},
        {"assistant_model": tiny.noisy(model, 0.03), "assistant_confidence_threshold": 0},
    ):
        result = spec(model, ids, attention_mask=mask, max_new_tokens=20, **how)
        assert [list(row.ids) for row in result.rows] == expected
        for prompt, ids_alone in zip(prompts, expected, strict=True):
            assert list(spec(model, prompt, max_new_tokens=20, **how).ids) == ids_alone


# ---------------------------------------------------------------- rows
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_their_single_runs(family: str) -> None:
    """Left-padded prompts of different lengths that end at different times, with and without options."""
    model = target(family)
    for draw in range(5):
        rng = random.Random(f"rows {family} {draw}")
        prompts = [a_prompt(rng) for _ in range(rng.choice([2, 3, 4]))]
        options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": some(rng, 6)}
        if draw % 2:
            extra = an_option(rng, 16)
            options = (extra if not any(key.startswith("encoder") for key in extra) else {}) | options
        how = drafting(rng, family)
        ids, mask = padded(prompts)
        result = spec(model, ids, attention_mask=mask, **options, **how)
        expected = [plain(model, prompt, **options) for prompt in prompts]
        assert [list(row.ids) for row in result.rows] == expected, (draw, [p.tolist() for p in prompts], options, how)
        width = max(map(len, expected))
        pad = model.generation_config.pad_token_id
        assert result.sequences.tolist() == [
            row + new + [pad] * (width - len(new)) for row, new in zip(ids.tolist(), expected, strict=True)
        ]
        for row, prompt in zip(result.rows, prompts, strict=True):
            assert list(row.prompt_ids) == prompt[0].tolist()
        consistent(result)


ROW_OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
    "min_new_tokens one": {"min_new_tokens": 1, "eos_token_id": list(range(3, 60))},
    "forced_eos": {"forced_eos_token_id": 2},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 50))},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": list(range(3, 10))},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5, bias=3.0)},
    "chunks": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("name", ROW_OPTIONS)
def test_rows_keep_the_meaning_of_options(name: str) -> None:
    """Options that count tokens or look at the prompt see each row's own."""
    model, options = target("llama"), ROW_OPTIONS[name] | {"max_new_tokens": 14}
    prompts = [tiny.ids(1, 3), tiny.ids(2, 9), tiny.ids(3, 6), tiny.ids(4, 1)]
    ids, mask = padded(prompts)
    reference = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
    expected = [plain(model, prompt, **reference) for prompt in prompts]
    if (
        name == "encoder_repetition_penalty"
    ):  # before transformers 5.24 it counts the padding's id as one of the prompt's
        batch = model.generate(ids, attention_mask=mask, do_sample=False, **reference)
        expected = batch[:, ids.shape[1] :].tolist()
    for how in (
        {"method": "prompt_lookup"},
        {"assistant_model": draft("llama", "0.03"), "assistant_confidence_threshold": 0},
    ):
        result = spec(model, ids, attention_mask=mask, **options, **how)
        assert [list(row.ids) for row in result.rows] == expected


def test_right_padding_is_cut_off() -> None:
    model, prompts = target("llama"), [tiny.ids(1, 4), tiny.ids(2, 8)]
    ids = torch.cat([torch.nn.functional.pad(p, (0, 8 - p.shape[1])) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (0, 8 - p.shape[1])) for p in prompts])
    result = spec(model, ids, attention_mask=mask, max_new_tokens=12, method="prompt_lookup")
    assert [list(row.ids) for row in result.rows] == [plain(model, p, max_new_tokens=12) for p in prompts]


# Where a model builds masks or positions of its own, rows are refused; what runs is right.
OTHERS: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    "GPTNeoForCausalLM": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "FalconForCausalLM": {"alibi": True, "new_decoder_architecture": False},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "use_cache": True},
    "BartForCausalLM": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "decoder_attention_heads": 4,
        "init_std": 0.3,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "Llama4ForCausalLM": {
        "head_dim": 8,
        "attention_chunk_size": 6,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "Gemma2ForCausalLM": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "GptOssForCausalLM": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Phi3ForCausalLM": {"sliding_window": 6},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "OpenAIGPTLMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.5},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_exact_or_refused(name: str) -> None:
    model = tiny._build(name, 0, **{**tiny._shape(VOCAB, layers=2), **OTHERS[name]})
    prompts = [tiny.ids(1, 5), tiny.ids(2, 12), tiny.ids(3, 8)]
    expected = [plain(model, prompt, max_new_tokens=16) for prompt in prompts]
    ids, mask = padded(prompts)
    for how in (
        {"method": "prompt_lookup"},
        {"assistant_model": tiny.noisy(model, 0.02), "assistant_confidence_threshold": 0},
    ):
        for prompt, alone in zip(prompts, expected, strict=True):
            assert list(spec(model, prompt, max_new_tokens=16, **how).ids) == alone
        try:
            result = spec(model, ids, attention_mask=mask, max_new_tokens=16, **how)
        except ValueError as refusal:
            assert "cannot be" in str(refusal)  # noqa: PT017
        else:
            assert [list(row.ids) for row in result.rows] == expected


RECURRENT: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "RecurrentGemmaForCausalLM": {
        "lru_width": 32,
        "attention_window_size": 6,
        "block_types": ["recurrent", "attention"],
    },
    "JambaForCausalLM": {
        "num_experts": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    """They are drafted for and draft. RecurrentGemma, whose states are in its modules, is refused by name, and so are
    Mamba 1 and 2 before transformers 5.24, which takes their states under another name there."""
    refuses = name == "RecurrentGemmaForCausalLM" or (name.startswith("Mamba") and cache_name(tiny.llama()) != "cache")
    model = tiny._build(name, 0, **{**tiny._shape(VOCAB, layers=2), **RECURRENT[name]})
    llama, ids = tiny.llama(), tiny.ids(0, 5)
    expected = plain(model, ids, max_new_tokens=12)
    assert list(spec(model, ids, max_new_tokens=12, method="plain").ids) == expected
    for role, target, how in (
        ("target", model, {"method": "prompt_lookup"}),
        ("target", model, {"assistant_model": llama}),
        ("draft model", llama, {"assistant_model": model}),
    ):
        if refuses:
            refused = pytest.raises(ValueError, match=f"the {role} \\({name}\\).*running state")
            with no_forward(model), refused as refusal:
                spec(target, ids, max_new_tokens=12, **how)
            assert "\n" not in str(refusal.value)
        else:
            right = expected if target is model else plain(llama, ids, max_new_tokens=12)
            assert list(spec(target, ids, max_new_tokens=12, **how).ids) == right


def test_conv_states_are_rolled_back() -> None:
    """LFM2's states are kept until a draft is verified, as in transformers' own assisted decoding."""
    model = tiny._build("Lfm2ForCausalLM", 0, **tiny._shape(VOCAB, layers=2), layer_types=["conv", "full_attention"])
    prompts = [tiny.ids(seed, n) for seed, n in ((1, 5), (2, 12), (3, 8))]
    expected = [plain(model, prompt, max_new_tokens=16) for prompt in prompts]
    ids, mask = padded(prompts)
    for how in (
        {"method": "prompt_lookup"},
        {"assistant_model": tiny.noisy(model, 0.02), **EAGER},
        {"assistant_early_exit": 1, **EAGER},
    ):
        result = spec(model, ids, attention_mask=mask, max_new_tokens=16, **how)
        assert [list(row.ids) for row in result.rows] == expected
        assert list(spec(model, prompts[0], max_new_tokens=16, **how).ids) == expected[0]


# ---------------------------------------------------------------- rollback
def a_row(index: int, ids: list[int]) -> Row:
    return Row(index, list(ids), 10**6, torch.Generator().manual_seed(index), Processors(), Constant(0))


def differences(
    model: PreTrainedModel, rows: list[Row], extra: list[list[int]], keep: list[int], out: list[torch.Tensor]
) -> float:
    """Largest difference from a forward of the whole text without any cache, relative to the logits' scale."""
    worst = 0.0
    for row, more, k, logits in zip(rows, extra, keep, out, strict=True):
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([row.ids + more]), use_cache=False).logits[0, -k:]
        assert logits.shape == whole.shape
        worst = max(worst, float((logits - whole).abs().max() / whole.abs().max().clamp(min=1)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1], [9], [5, 12, 8], [2, 30]], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4 shared"])
def test_rollback_equals_recomputation(family: str, lengths: list[int]) -> None:
    """Random drafts of which random prefixes are accepted; rows leave midway. The window (6) is passed many times."""
    model = tiny.gemma4(shared=2, per_layer=8) if family == "gemma4 shared" else target(family)
    rng = random.Random(f"{family} {lengths}")
    rows = [a_row(i, tiny.ids(i + 20, n)[0].tolist()) for i, n in enumerate(lengths)]
    lm = CachedLM(model, rows, CacheSize(rng.choice([0, 8, 200]), rng.choice([None, 4])))
    for turn in range(14):
        if turn == 9 and len(rows) > 1:
            rows.pop(rng.randrange(len(rows)))
        extra = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 7))] for _ in rows]
        keep = [rng.randint(1, len(more) + 1) for more in extra]
        assert differences(model, rows, extra, keep, lm.logits(rows, extra, keep)) < 1e-5
        for row, more in zip(rows, extra, strict=True):
            accepted = rng.randint(0, len(more))
            row.ids += [*more[:accepted], rng.randrange(3, VOCAB)] if rng.random() < 0.9 else more[:accepted]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma4"])
@pytest.mark.parametrize("length", [4, 5, 6, 7, 11, 12, 13])
def test_rollback_at_and_across_the_window(family: str, length: int) -> None:
    """The window is 6: grow by a block, take all of it back, and grow differently, around every multiple of it."""
    model = target(family)
    for other in (None, 3, 14):
        rows = [
            a_row(i, tiny.ids(i, n)[0].tolist()) for i, n in enumerate([length] if other is None else [length, other])
        ]
        lm = CachedLM(model, rows)
        for turn in range(4):
            for block in ([5] * 8, [7, 9], []):
                extra = [list(block) for _ in rows]
                keep = [len(block) + 1] * len(rows)
                assert differences(model, rows, extra, keep, lm.logits(rows, extra, keep)) < 1e-5
            for row in rows:
                row.ids += [11 + turn, 12] if row.index else [13]


def test_a_model_without_a_cache_reads_the_whole_text_in_each_pass() -> None:
    model = build("openai-gpt")
    for seed in range(4):
        ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
        expected = plain(model, ids, max_new_tokens=20)
        for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model, **EAGER}, {"assistant_early_exit": 1}):
            assert list(spec(model, ids, max_new_tokens=20, **how).ids) == expected
