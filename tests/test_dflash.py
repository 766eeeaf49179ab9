"""DFlash: blocks are those of the reference implementations, whatever was rejected before, and no text changes."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dflash_checkpoints as made
import pytest
import tiny
import torch
import transformers
from checks import STEADY, configs, consistent, no_forward, padded, plain, spec
from test_mtp import drafting
from torch import Tensor
from transformers import PreTrainedModel

import specnb
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.lm.create import create_lm
from specnb.decoding.lm.model_inputs import CacheSize
from specnb.decoding.schedules import Constant
from specnb.drafters.dflash import DFlash
from specnb.drafters.draft_builder import DraftSampling
from specnb.models.dflash import load_dflash, settings_of

X = made.PROMPT
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 1)]
FORMATS = {"zlab": made.ZLAB, "speculators": made.SPECULATORS}
CASES = [(form, name) for form, variants in FORMATS.items() for name in variants]
RESULTS = Path(__file__).parent / "results"
_FOLDER = TemporaryDirectory(prefix="dflash-")


def load(folder: Path) -> PreTrainedModel:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_dflash(folder.name, str(folder), values)


@cache
def drafter(form: str, name: str, damp: float = made.WEAK) -> PreTrainedModel:
    build = getattr(made, form)
    return load(build(Path(_FOLDER.name) / f"{form} {name} {damp}", made.target(), FORMATS[form][name], damp=damp))


def recorded(form: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"dflash-{form}.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------- the reference implementations
@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), CASES)
def test_blocks_are_those_of_the_reference(form: str, name: str) -> None:
    """After texts short of the window, at it and beyond: the same ids, and the same best logits."""
    expected, draft = recorded(form)[name], drafter(form, name, made.STRONG)
    assert len({tuple(block) for block in expected["drafted"]}) > 3
    for text, tokens, best in zip(made.texts(), expected["drafted"], expected["best"], strict=True):
        with drafting() as drafts:
            spec(made.target(), torch.tensor([text[:-1]]), max_new_tokens=8, assistant_model=draft, **STEADY)
        ids, drafted, logits = drafts[0]
        assert (ids, drafted) == (text, tokens)
        if name != "dflash 2":  # recorded before its selector
            assert torch.allclose(logits.amax(-1), torch.tensor(best), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", made.ZLAB)
def test_steps_are_those_of_the_reference(name: str) -> None:
    """z-lab's own loop accepts the same number of tokens in each step, up to the end, where it shortens its blocks."""
    result = spec(made.target(), X, max_new_tokens=60, assistant_model=drafter("zlab", name), **STEADY)
    consistent(result)
    counts, total = recorded("zlab")[name]["produced"], 0
    for step, count in zip(result.steps[1:], counts, strict=False):
        if (total := total + count) > 60 - made.BLOCK:
            break
        assert len(step.emitted) == count
    assert list(result.ids) == recorded("zlab")[name]["ids"][X.shape[1] :] == plain(made.target(), X, max_new_tokens=60)


# ---------------------------------------------------------------- proposals
@torch.no_grad()
def clean(model: PreTrainedModel, draft: Any, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, vocab]` of the first tokens of the block after `ids`, computed from nothing, one query at a time."""
    settings, anchor, size = settings_of(draft), len(ids) - 1, draft.config.hidden_size
    states = model(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    context = draft.hidden_norm(draft.fc(torch.cat([states[i][0] for i in settings.layers], -1)))
    block = torch.tensor([ids[-1], *[settings.mask_token_id] * (settings.block_size - 1)])
    x = model.get_input_embeddings().weight[block]
    at = torch.arange(anchor + settings.block_size)
    cos, sin = (part[0] for part in draft.rotary_emb(x, at[None]))

    def heads(projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, 8).transpose(0, 1)

    def turned(one: Tensor, where: Tensor) -> Tensor:
        return one * cos[where] + torch.cat([-one[..., 4:], one[..., :4]], -1) * sin[where]

    for layer, window, causal in zip(draft.layers, settings.windows, settings.causal, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([context, normed])
        keys = turned(attention.k_norm(heads(attention.k_proj(both))), at).repeat_interleave(2, 0)
        values = heads(attention.v_proj(both)).repeat_interleave(2, 0)
        queries = turned(attention.q_norm(heads(attention.q_proj(normed))), at[anchor:])
        own = at[anchor:, None]
        seen = at <= own if causal else at >= 0
        if window is not None:
            seen = seen & ((anchor if settings.window_from_anchor else own) - at < window)
        scores = (queries @ keys.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        x = x + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    states = draft.norm(x)[settings.first :][: len(drafted)]
    head = getattr(draft, "lm_head", None)
    assert states.shape[-1] == size
    if head is None:
        return model.get_output_embeddings()(states)  # type: ignore[no-any-return]
    return head(states)  # type: ignore[no-any-return]


_SLOW = pytest.mark.slow
EXACT = [
    pytest.param("zlab", "full", marks=_SLOW),
    ("zlab", "sliding"),
    ("zlab", "sliding, not causal"),
    ("speculators", "sliding"),
    pytest.param("speculators", "sliding, not causal", marks=_SLOW),
    pytest.param("speculators", "draft vocabulary", marks=_SLOW),
    pytest.param("speculators", "from the anchor", marks=_SLOW),
]


@pytest.mark.parametrize(("form", "name"), EXACT)
def test_blocks_equal_those_computed_from_nothing(form: str, name: str) -> None:
    """In every step, after acceptances and rejections of every length, short of the window and far beyond it."""
    lengths, cut = set(), set()
    draft = drafter(form, name)
    for prompt, k in ((X, 6), (PROMPTS[2], 3)):
        how = {"assistant_model": draft, "num_assistant_tokens": k, "prefill_chunk_size": 5, **STEADY}
        with drafting() as drafts:
            result = spec(made.target(), prompt, max_new_tokens=36, **how)
        for ids, tokens, logits in drafts:
            expected = clean(made.target(), draft, ids, tokens)
            assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (len(ids), tokens)
        lengths |= {len(ids) for ids, _, _ in drafts}
        cut |= {step.accepted for step in result.steps}
    assert min(lengths) < made.WINDOW < max(lengths) / 4
    assert {0, 1} <= cut
    assert max(cut) > 2 or not settings_of(draft).first


@pytest.mark.parametrize(("form", "name"), [("zlab", "sliding"), ("speculators", "draft vocabulary")])
def test_blocks_of_rows_equal_those_computed_from_nothing(form: str, name: str) -> None:
    """Rows of different lengths, which end at different times, and a schedule of its own for each."""
    draft = drafter(form, name)
    free = [plain(made.target(), prompt, max_new_tokens=30) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS)
    how = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0}
    with drafting() as drafts:
        result = spec(
            made.target(),
            ids,
            attention_mask=mask,
            max_new_tokens=30,
            eos_token_id=[free[0][4], free[1][15]],
            assistant_model=draft,
            **how,
        )
    for text, tokens, logits in drafts:
        expected = clean(made.target(), draft, text, tokens)
        assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (len(text), tokens)
    ends = sorted(len(row.ids) for row in result.rows)
    assert ends[0] < ends[-1]
    for row, expected_ids in zip(result.rows, free, strict=True):
        assert list(row.ids) == expected_ids[: len(row.ids)]


def test_the_reference_tells_stale_keys_apart() -> None:
    """One state too many, one too few, or one of another token move the logits by far more than the tolerance."""
    draft, ids = drafter("zlab", "full"), [*X[0].tolist(), *plain(made.target(), X, max_new_tokens=20)]
    right = clean(made.target(), draft, ids, [5, 5])
    for wrong in ([*ids[:-1], ids[-2], ids[-1]], [*ids[:-2], ids[-1]], [*ids[:-2], 9, ids[-1]]):
        assert (clean(made.target(), draft, wrong, [5, 5]) - right).abs().max() > 1e-3


# ---------------------------------------------------------------- greedy equality
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "glm4_moe", "hybrid"])
def test_greedy_equals_plain(family: str, tmp_path: Path) -> None:
    """Tied and scaled embeddings, windows, experts, running states; every schedule, the threshold, several rows."""
    model = tiny.hybrid() if family == "hybrid" else tiny.family(family)
    draft = load(made.zlab(tmp_path, model, made.ZLAB["sliding"]))
    expected = [plain(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS)
    ways: list[dict[str, Any]] = [
        {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0},
        {"num_assistant_tokens_schedule": "adaptive", "assistant_confidence_threshold": 0.2},
    ]
    for i, how in enumerate([STEADY, *ways]):
        result = spec(model, PROMPTS[i], max_new_tokens=20, assistant_model=draft, **how)
        assert (result.method, list(result.ids)) == ("dflash", expected[i])
        consistent(result)
    result = spec(model, ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, **STEADY)
    assert [list(row.ids) for row in result.rows] == expected


def test_logits_processors_and_dflash_2() -> None:
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 46, 23]}):
        expected = plain(made.target(), X, max_new_tokens=16, **options)
        how = {"assistant_model": drafter("zlab", "dflash 2"), "top_logprobs": 3, **options, **STEADY}
        assert list(spec(made.target(), X, max_new_tokens=16, **how).ids) == expected


# ---------------------------------------------------------------- options
def test_the_length_is_a_block_unless_asked_for() -> None:
    draft = drafter("zlab", "full")
    for form, name, most in (("zlab", "full", made.BLOCK - 1), ("speculators", "from the anchor", made.BLOCK)):
        result = spec(made.target(), X, max_new_tokens=20, assistant_model=drafter(form, name), **STEADY)
        assert result.options["num_assistant_tokens"] == most == len(result.steps[1].drafted)
    for asked, drafted in ((2, 2), (30, made.BLOCK - 1)):  # a longer draft is capped
        how = {"assistant_model": draft, "num_assistant_tokens": asked, **STEADY}
        assert len(spec(made.target(), X, max_new_tokens=20, **how).steps[1].drafted) == drafted
    free = spec(made.target(), X, max_new_tokens=4, assistant_model=draft)
    assert free.options["num_assistant_tokens_schedule"] == "adaptive"


def test_a_threshold_ends_drafts() -> None:
    how = {"assistant_model": drafter("zlab", "full"), "num_assistant_tokens_schedule": "constant"}
    counts = []
    for threshold in (0.0, 1.0):
        with drafting() as drafts:
            result = spec(made.target(), X, max_new_tokens=20, assistant_confidence_threshold=threshold, **how)
        counts.append(result.num_draft_tokens / len(drafts))
    assert counts[0] > 3 > counts[1] == 1


def test_the_law_of_a_draft_is_true() -> None:
    """Each token is drawn from the processed logits of its position, given the tokens drafted before it."""
    seen: list[tuple[list[int], list[int], Tensor, Tensor]] = []
    original = DFlash.propose

    def record(self: Any, rows: Any, most: Any) -> Any:
        found = original(self, rows, most)
        seen.extend((list(row.ids), one.tokens, one.probs, None) for row, one in zip(rows, found, strict=True))
        return found

    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.8)
    with drafting() as drafts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlash, "propose", record)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "repetition_penalty": 1.8, "seed": 1}
        draft = drafter("speculators", "draft vocabulary")
        specnb.generate(made.target(), X, max_new_tokens=16, assistant_model=draft, **how, **STEADY)
    kept = torch.arange(len(draft.d2t)) + draft.d2t
    drawn = [one for one in seen if one[1]]
    assert len(drawn) == len(drafts) > 3
    for (ids, tokens, probs, _), (_, _, logits) in zip(drawn, drafts, strict=True):
        for i, scores in enumerate(logits):
            whole = torch.full((made.VOCAB,), -torch.inf).index_copy(0, kept, scores)
            expected = penalty(torch.tensor([ids + tokens[:i]]), whole[None])[0].softmax(-1)
            assert torch.allclose(probs[i], expected, atol=1e-6)


# ---------------------------------------------------------------- loading and misfits
def test_load_finds_drafters_of_every_format(tmp_path: Path) -> None:
    words = tiny.word_tokenizer([f"w{i}" for i in range(61)])
    made.target().save_pretrained(tmp_path / "target")
    words.save_pretrained(tmp_path / "target")
    made.zlab(tmp_path / "zlab", made.target(), made.ZLAB["dflash 2"])
    made.speculators(tmp_path / "speculators", made.target(), made.SPECULATORS["draft vocabulary"])
    expected = plain(made.target(), X, max_new_tokens=12)
    for form, name in (("zlab", "dflash 2"), ("speculators", "draft vocabulary")):
        pair = specnb.load(tmp_path / "target", tmp_path / form)
        result = specnb.generate(pair, X, max_new_tokens=12, do_sample=False, **STEADY)
        assert (result.method, list(result.ids)) == ("dflash", expected)
        assert (
            result.steps[1].drafted
            == spec(made.target(), X, max_new_tokens=12, assistant_model=drafter(form, name), **STEADY).steps[1].drafted
        )
        specnb.save_pair(pair, tmp_path / f"saved {form}")
        again = specnb.load(tmp_path / f"saved {form}")
        assert (
            specnb.generate(again, X, max_new_tokens=12, do_sample=False, **STEADY).steps[1].drafted
            == result.steps[1].drafted
        )
        with pytest.raises(OSError, match="cannot generate alone"):
            specnb.load(tmp_path / form)
        assert settings_of(specnb.load_drafter(tmp_path / form)) == settings_of(pair.assistant)
    values = json.loads((tmp_path / "speculators" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "speculators" / "config.json").write_text(json.dumps(values | {"speculators_model_type": "dspark"}))
    with pytest.raises(OSError, match="type 'dspark'"):
        specnb.load(tmp_path / "target", tmp_path / "speculators")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    place = made.zlab(tmp_path, made.target(), {})
    values = json.loads((place / "config.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(OSError, match=r"there is no layers\.2"):
        specnb.load_drafter(place)
    (place / "config.json").write_text(json.dumps({**values, "dflash_config": {}}), encoding="utf-8")
    with pytest.raises(OSError, match="mask_token_id"):
        specnb.load_drafter(place)


MISFITS: dict[str, Any] = {
    "states of size 32": lambda: tiny.llama(hidden=64),
    "its vocabulary has 64 tokens": lambda: tiny.llama(vocab=80),
    "a target of 4 layers": lambda: tiny.llama(layers=6),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_misfits_are_refused_by_name(reason: str) -> None:
    model, draft = MISFITS[reason](), drafter("zlab", "full")
    before = configs(model)
    with no_forward(model), pytest.raises(ValueError, match=reason) as error:
        spec(model, X, max_new_tokens=4, assistant_model=draft)
    assert "LlamaForCausalLM" in str(error.value)
    assert "zlab full" in str(error.value)
    assert configs(model) == before
    with no_forward(model), pytest.raises(ValueError, match="cannot generate alone"):
        specnb.generate(draft, X, max_new_tokens=4)


def test_another_verifier_is_refused(tmp_path: Path) -> None:
    place = made.speculators(tmp_path, made.target(), {}, verifier="someone/other-9b")
    values = json.loads((place / "config.json").read_text(encoding="utf-8"))
    values["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    (place / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match="someone/other-9b"):
        spec(made.target(), X, max_new_tokens=4, assistant_model=load(place))


def test_embeddings_are_scaled_as_the_format_means_it(tmp_path: Path) -> None:
    """z-lab's own scale, else the target's (a Gemma's); speculators trains with the bare embedding."""
    model = tiny.gemma3()
    root = model.get_input_embeddings().embed_scale
    wanted = [("zlab", {}, float(root)), ("zlab", {"input_embedding_scale": 1.5}, 1.5), ("speculators", {}, 1.0)]
    for i, (form, options, scale) in enumerate(wanted):
        draft = load(getattr(made, form)(tmp_path / str(i), model, options))
        row = Row(0, [3], 4, torch.Generator(), Processors(transformers.LogitsProcessorList()), Constant(1))
        sampling = DraftSampling(False, False, 0.0, False, torch.device("cpu"), made.VOCAB)
        assert DFlash(draft, create_lm(model, [row], CacheSize(8)), [row], 8, sampling)._scale == pytest.approx(scale)


# ---------------------------------------------------------------- transformers' own
def muse_glimmer() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny Muse Glimmer and its assistant."""
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": 6,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.MuseGlimmerConfig(
            text_config=text,
            vision_config=vision | {"pos_emb_height": 4, "pos_emb_width": 4},
            out_hidden_size=64,
            projector_hidden_size=32,
            image_token_id=60,
            video_token_id=61,
        )
        model = transformers.MuseGlimmerForConditionalGeneration(config).float().eval()
        shape = {name: text[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")}
        assistant = transformers.MuseGlimmerAssistantModel(
            transformers.MuseGlimmerAssistantConfig(
                **{**shape, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256},
                sliding_window=6,
                block_size=5,
                mask_token_id=62,
                target_layer_ids=[0, 2],
            )
        )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(assistant.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model, assistant.float().eval()


@pytest.mark.skipif(not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="this transformers has no DFlash")
def test_transformers_own_drafter_drafts_what_it_drafts_there() -> None:
    """The same blocks in every step as with transformers' `speculation_type="dflash"`; and the option is honoured."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    model, assistant = muse_glimmer()
    theirs: list[list[int]] = []
    candidates = DFlashTokenCandidateGenerator.get_candidates

    def record(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = candidates(self, input_ids, *args, **kwargs)
        theirs.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    length = {"max_new_tokens": 24, "attention_mask": torch.ones_like(X)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record)
        out = model.generate(X, do_sample=False, assistant_model=assistant, speculation_type="dflash", **length)
    for how in ({}, {"speculation_type": "dflash"}, {"method": "dflash"}):
        with drafting() as drafts:
            result = spec(model, X, assistant_model=assistant, **how, **length, **STEADY)
        assert result.method == "dflash"
        assert list(result.ids) == out[0, X.shape[1] :].tolist()
        full = [tokens for _, tokens, _ in drafts if len(tokens) == 4]  # the last ones are cut
        assert full == [tokens for tokens in theirs if tokens][: len(full)]
        assert len(full) > 10
    decoder = specnb.decoder(assistant_model=assistant)
    again = model.generate(X, do_sample=False, speculation_type="dflash", custom_generate=decoder, **length)
    assert torch.equal(again, out)
    assert decoder.result is not None
    assert decoder.result.method == "dflash"


def test_speculation_type_asks_for_the_method() -> None:
    """In a call, and in the configs; where the target's own config has it, calls without a draft model go on."""
    draft, other = drafter("zlab", "full"), tiny.llama(seed=7)
    expected = plain(made.target(), X, max_new_tokens=8)
    result = spec(made.target(), X, max_new_tokens=8, assistant_model=draft, speculation_type="dflash")
    assert (result.method, list(result.ids)) == ("dflash", expected)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("needs assistant_model", {"speculation_type": "dflash"}),
        ("speculation_type='dflash'", {"speculation_type": "dflash", "assistant_model": other}),
        ("speculation_type='other'", {"speculation_type": "other", "assistant_model": draft}),
        ("speculation_type='dflash'", {"speculation_type": "dflash", "method": "prompt_lookup"}),
    ]
    for message, how in calls:
        with no_forward(made.target()), pytest.raises(ValueError, match=message):
            spec(made.target(), X, max_new_tokens=8, **how)
    model = copy.copy(made.target())
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.speculation_type = "dflash"
    for method, how in (
        ("plain", {}),
        ("prompt_lookup", {"method": "prompt_lookup"}),
        ("dflash", {"assistant_model": draft}),
    ):
        result = spec(model, X, max_new_tokens=8, **how)
        assert (result.method, list(result.ids)) == (method, expected)
    with no_forward(made.target()), pytest.raises(ValueError, match="the target's generation config"):
        spec(model, X, max_new_tokens=8, assistant_model=other)
