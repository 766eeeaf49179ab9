"""EAGLE-3: its drafts are those of the library that trains such drafters, whatever was rejected before."""

from __future__ import annotations

import inspect
import itertools
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import eagle3_reference as reference
import pytest
import tiny
import torch
from checks import (
    EAGER,
    STEADY,
    cache_name,
    configs,
    consistent,
    drafting,
    no_forward,
    padded,
    plain,
    run_cell,
    shell,
    spec,
)
from eagle3_checkpoints import drafter_folder, safeai_folder
from families.build import IMAGE_TEXT, build
from families.images import image_inputs
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import specnb
from specnb.decoding.distributions import BlockDistributions
from specnb.drafters.draft_builder import DraftBuilder
from specnb.models.eagle3 import Eagle3Drafter
from specnb.models.eagle3_files import load_eagle3
from specnb.notebook.availability import available_methods

NEW = "cache" in inspect.signature(tiny.llama().forward).parameters  # transformers 5.24: states go back to a copy
X = tiny.ids(0, 7)
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 1)]
FOLDER = Path(mkdtemp())


# ---------------------------------------------------------------- the reference
def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


@torch.no_grad()
def clean(target: PreTrainedModel, drafter: Eagle3Drafter, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, draft vocab]` of what is drafted after `ids`, given those tokens; no cache, no module of ours.

    The states of all tokens but the last are the target's; entry i reads token i + 1.
    """
    w, config = drafter.state_dict(), drafter.config
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    states = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    parts = [states[i][0, : len(ids) - 1] for i in config.target_layers(depth)]
    if config.fc_norm:
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    joined = torch.cat(parts, -1)
    if config.norm_before_fc:
        joined = rms(joined, w["input_norm.weight"])
    g = joined @ w["fc.weight"].T
    embedding = (drafter.embed_tokens or target.get_input_embeddings()).weight
    tokens, out = [*ids[1:], *drafted], []
    for step in range(len(drafted)):
        n = len(ids) - 1 + step
        h, embedded, at = g, embedding[tokens[:n]], torch.arange(n)
        for i in range(config.num_hidden_layers):
            own = {name.removeprefix(f"layers.{i}."): w[name] for name in w if name.startswith(f"layers.{i}.")}
            x = rms(h if i else embedded, own["input_layernorm.weight"])
            residual = h
            if i == 0:
                normed = rms(h, own["hidden_norm.weight"])
                residual = normed if config.norm_before_residual else h
                x = torch.cat([x, normed], -1)
            q, k, v = ((x @ own[f"self_attn.{name}_proj.weight"].T).view(n, -1, 8).transpose(0, 1) for name in "qkv")
            if "self_attn.q_norm.weight" in own:
                q, k = rms(q, own["self_attn.q_norm.weight"]), rms(k, own["self_attn.k_norm.weight"])
            q, k, v = rotated(q, at), rotated(k, at).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
            scores = (q @ k.transpose(1, 2)) / 8**0.5 + torch.full((n, n), -torch.inf).triu(1)
            a = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
            h = residual + a @ own["self_attn.o_proj.weight"].T
            y = rms(h, own["post_attention_layernorm.weight"])
            y = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
            h = h + y @ own["mlp.down_proj.weight"].T
        normed = rms(h, w["norm.weight"])
        out.append(normed[-1] @ w["lm_head.weight"].T)
        g = torch.cat([g, (normed if config.norm_output else h)[-1:]])
    return torch.stack(out)


def check(drafts: list[tuple[list[int], list[int], Tensor]], target: PreTrainedModel, drafter: Eagle3Drafter) -> None:
    assert drafts
    ids_of = drafter.target_ids()
    for ids, tokens, logits in drafts:
        expected = clean(target, drafter, ids, tokens)
        assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max())), (len(ids), tokens)
        assert ids_of[logits.argmax(-1)].tolist() == tokens


# ---------------------------------------------------------------- models
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"draft": 40},
    "all tokens, default layers": {"read": None},
    "3.1": {"draft": 40, "fc_norm": True, "norm_output": True, "kind": "qwen3"},
    "two layers": {
        "draft": 40,
        "layers": 2,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "read": (0, 2, 4, 5),
    },
}


@cache
def target(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny.llama(layers=5).to(dtype)


def made(model: PreTrainedModel, **shape: Any) -> Eagle3Drafter:
    """A new drafter for `model`."""
    return load_eagle3("drafter", str(drafter_folder(Path(mkdtemp(dir=FOLDER)), model, **shape)), model.dtype)


@cache
def drafter(name: str = "plain", dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    return made(target(dtype), **DRAFTERS[name])


# ---------------------------------------------------------------- speculators
@pytest.fixture(scope="module")
def reference_target() -> PreTrainedModel:
    config = LlamaConfig(num_hidden_layers=8, tie_word_embeddings=False, **reference.SHAPE)
    model: PreTrainedModel = reference.fill(LlamaForCausalLM(config))
    return model


def reference_drafter(model: PreTrainedModel, given: dict[str, Any]) -> Eagle3Drafter:
    """The drafter of `tests/peers/eagle3.py`, read from a folder."""
    flags = dict(given)
    kind, layers, read = (
        flags.pop("kind", "llama"),
        flags.pop("layers", 1),
        flags.pop("target_layers", reference.LAYERS),
    )
    layer = {"model_type": kind, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, **reference.SHAPE}
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": reference.DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": read,
        "transformer_layer_config": layer,
        **flags,
    }
    place = Path(mkdtemp(dir=FOLDER))
    (place / "config.json").write_text(json.dumps(config))
    from specnb.models.eagle3_files import eagle3_config

    blank = reference.fill(Eagle3Drafter(eagle3_config("blank", config)))
    save_file(blank.state_dict() | {"t2d": reference.T2D, "d2t": reference.D2T}, place / "model.safetensors")
    return load_eagle3("reference", str(place))


@pytest.mark.parametrize("variant", reference.VARIANTS)
@torch.no_grad()
def test_drafts_equal_those_of_speculators(variant: str, reference_target: PreTrainedModel) -> None:
    """The ids at every position, and the logits at one, for three steps in which the true tokens follow."""
    model = reference_drafter(reference_target, reference.VARIANTS[variant])
    expected, ids = reference.expected()[variant], reference.IDS
    for end in range(len(ids) - 1):
        steps = [step for step in range(reference.STEPS) if end + 1 + step < len(ids)]
        text, follow = ids[: end + 2], ids[end + 2 : end + 2 + len(steps)]
        logits = clean_reference(reference_target, model, text, [*follow, 0][: len(steps)])
        assert logits.argmax(-1).tolist() == [expected["drafted"][step][end] for step in steps]
        if end == 10:
            assert torch.allclose(logits, torch.tensor(expected["logits"]), atol=2e-4)


def clean_reference(target: PreTrainedModel, model: Eagle3Drafter, ids: list[int], follow: list[int]) -> Tensor:
    """What our drafter gives after `ids`, fed with `follow`, through its own propose()."""
    from specnb.decoding.contracts import Row
    from specnb.decoding.distributions import Processors
    from specnb.decoding.lm.base import LMOptions
    from specnb.decoding.lm.create import create_lm
    from specnb.decoding.lm.model_inputs import CacheSize
    from specnb.decoding.schedules import Constant
    from specnb.drafters.draft_builder import DraftSampling
    from specnb.drafters.eagle3 import Eagle3

    row = Row(0, list(ids[:-1]), 10**6, torch.Generator(), Processors(), Constant(len(follow)))
    lm = create_lm(
        target, [row], CacheSize(64), options=LMOptions(hidden_states="all", layers=model.config.target_layers(8))
    )
    sampling = DraftSampling(False, False, 0.0, False, torch.device("cpu"), reference.VOCAB)
    drafter, seen = Eagle3(model, lm, [row], 64, sampling), []
    lm.logits([row], [[]], [1])
    row.ids.append(ids[-1])

    def forced(self: DraftBuilder, logits: Tensor, ids: Tensor | None = None) -> None:
        seen.append(logits.clone())
        self.tokens.append(follow[len(self.tokens)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftBuilder, "add", forced)
        drafter.propose([row], [len(follow)])
    return torch.stack(seen)


# ---------------------------------------------------------------- drafts and texts
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_equal_a_recomputation_and_texts_are_plain_decodings(name: str) -> None:
    """After acceptances and rejections of every length; one row, and rows that leave on the way."""
    model, small = target(torch.float64), drafter(name, torch.float64)  # rounding is not to hide a wrong entry
    options: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": [5, 9]}
    expected = [plain(model, prompt, **options) for prompt in PROMPTS]
    how: dict[str, Any] = {"assistant_model": small, **STEADY}
    ids, mask = padded(PROMPTS)
    with drafting() as drafts:
        single = spec(model, PROMPTS[1], prefill_chunk_size=4, num_assistant_tokens=3, **options, **how)
    assert list(single.ids) == expected[1]
    check(drafts, model, small)
    with drafting() as drafts:
        result = spec(model, ids, attention_mask=mask, num_assistant_tokens=4, **options, **how)
    assert [list(row.ids) for row in result.rows] == expected
    check(drafts, model, small)
    consistent(result)
    assert result.method == "eagle3"
    accepted = single.num_accepted_draft_tokens + result.num_accepted_draft_tokens
    assert 0 < accepted < single.num_draft_tokens + result.num_draft_tokens


def test_accepted_drafts_of_any_length() -> None:
    """A text of few tokens, which the drafter often guesses."""
    model, small = target(torch.float64), drafter("plain", torch.float64)
    allowed = [int(i) for i in small.target_ids()[::16]]
    how: dict[str, Any] = {"suppress_tokens": [i for i in range(64) if i not in allowed], "max_new_tokens": 40}
    with drafting() as drafts:
        result = spec(model, X, assistant_model=small, num_assistant_tokens=2, **how, **STEADY)
    assert list(result.ids) == plain(model, X, **how)
    assert {step.accepted for step in result.steps} == {0, 1, 2}
    for ids, tokens, logits in drafts:
        expected = clean(model, small, ids, tokens)
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_prompts_in_chunks_and_steps_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """States wait for the next draft, or are run when many have gathered."""
    model, small = target(torch.float64), drafter("plain", torch.float64)
    monkeypatch.setattr("specnb.drafters.eagle3._CHUNK", 4)
    monkeypatch.setattr("specnb.drafters.eagle3._MAX_PENDING", 2)
    lengths = itertools.cycle([0, 0, 3, 0, 2, 0, 0, 0, 0])
    monkeypatch.setattr("specnb.decoding.schedules.Constant.length", lambda self, match_length=0: next(lengths))
    ids, mask = padded(PROMPTS)
    with drafting() as drafts:
        result = spec(model, ids, attention_mask=mask, max_new_tokens=16, assistant_model=small, **STEADY)
    assert [list(row.ids) for row in result.rows] == [plain(model, prompt, max_new_tokens=16) for prompt in PROMPTS]
    check(drafts, model, small)
    assert len(drafts) < sum(map(len, (row.steps for row in result.rows))) / 2


FAMILIES: dict[str, Any] = {
    "gemma3": tiny.gemma3,
    "qwen3": lambda: tiny.family("qwen3"),
    "hybrid": tiny.hybrid,
    "falcon": lambda: build("falcon"),  # rows one by one
    "own inputs": lambda: build("ctrl"),
    "vision": lambda: build("qwen3_vl", IMAGE_TEXT),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_of_other_families(name: str) -> None:
    if name == "hybrid" and not NEW:
        pytest.skip("rolled back since transformers 5.24")
    model = FAMILIES[name]()
    text = model.config.get_text_config(decoder=True)
    depth, ids = text.num_hidden_layers, [tiny.ids(3, n, 60) for n in (9, 4)]
    small = made(model, draft=30, read=(1, depth // 2, depth - 1))
    batch, mask = padded(ids)
    expected = [plain(model, prompt, max_new_tokens=14) for prompt in ids]
    with drafting() as drafts:
        result = spec(model, batch, attention_mask=mask, max_new_tokens=14, assistant_model=small, **STEADY)
    assert [list(row.ids) for row in result.rows] == expected
    check(drafts, model, small)
    if name == "vision":
        inputs = image_inputs(model)
        prompt = inputs.pop("input_ids")
        expected = plain(model, prompt, max_new_tokens=12, **inputs)
        result = spec(model, prompt, max_new_tokens=12, assistant_model=small, **inputs, **STEADY)
        assert list(result.ids) == expected
        assert result.num_draft_tokens > 0


def test_one_pass_of_the_drafter_per_drafted_token() -> None:
    """The prompt once, then the tokens of the last step with the first draft, and one entry for each further one."""
    from specnb.drafters.eagle3 import Eagle3

    widths: list[int] = []
    run = Eagle3._run

    def record(self: Any, tokens: Any, states: Tensor, slots: Any, angles: Any) -> Tensor:
        widths.append(states.shape[1])
        return run(self, tokens, states, slots, angles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "_run", record)
        result = spec(target(), PROMPTS[1], max_new_tokens=20, assistant_model=drafter(), **STEADY)
    drafted = [step for step in result.steps if step.drafted]
    assert len(widths) == sum(len(step.drafted) for step in drafted)
    firsts = [widths.pop(0)]
    for before, step in itertools.pairwise(drafted):
        del widths[: len(before.drafted) - 1]
        firsts.append(widths.pop(0))
        assert firsts[-1] == before.accepted + 1, step
    assert firsts[0] == 21
    assert result.target_passes == len(result.steps)


# ---------------------------------------------------------------- options
def test_lengths_schedules_and_the_confidence_threshold() -> None:
    how: dict[str, Any] = {"assistant_model": drafter(), "max_new_tokens": 20}
    expected = plain(target(), X, max_new_tokens=20)
    for k in (1, 16):
        result = spec(target(), X, num_assistant_tokens=k, **how, **STEADY)
        assert max(len(step.drafted) for step in result.steps) == k
        assert list(result.ids) == expected
    for schedule in ("heuristic", "adaptive"):
        result = spec(target(), X, num_assistant_tokens_schedule=schedule, **how, **EAGER)
        assert list(result.ids) == expected
    drafted = []
    for threshold in (0.0, 0.2, 1.0):
        more = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": threshold}
        with drafting() as drafts:
            result = spec(target(), X, num_assistant_tokens=6, **how, **more)
        assert list(result.ids) == expected
        drafted.append(result.num_draft_tokens / len(drafts))
        for _, tokens, logits in drafts:
            sure = logits.softmax(-1).max(-1).values
            assert bool((sure[:-1] >= threshold - 1e-5).all())
            assert len(tokens) == len(logits)
    assert drafted[0] > drafted[1] >= drafted[2] == 1


def test_processors_apply_to_drafts_too() -> None:
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 44, 23]}):
        expected = plain(target(), X, max_new_tokens=14, **options)
        result = spec(target(), X, max_new_tokens=14, assistant_model=drafter(), **options, **STEADY)
        assert list(result.ids) == expected
    suppressed = [int(i) for i in drafter().target_ids()[:20]]
    result = spec(target(), X, max_new_tokens=20, assistant_model=drafter(), suppress_tokens=suppressed, **STEADY)
    assert not set(suppressed) & {token for step in result.steps for token in step.drafted}


def test_an_ensemble_and_probabilities_are_reported() -> None:
    result = spec(target(), X, max_new_tokens=16, assistant_model=drafter(), assistant_ensemble_weight=0.5, **STEADY)
    assert result.lossy
    decoder = specnb.decoder(assistant_model=drafter(), probabilities=True, top_logprobs=3, **STEADY)
    out = target().generate(X, custom_generate=decoder, max_new_tokens=16, do_sample=False)
    assert out[0, 7:].tolist() == plain(target(), X, max_new_tokens=16)
    allowed = set(drafter().target_ids().tolist())
    for step in decoder.result.steps:
        assert set(step.drafted) <= allowed


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 6, "temperature": 0.7, "top_p": 0.9}], ids=str)
def test_the_law_of_a_sampled_token_is_the_targets(settings: dict[str, Any]) -> None:
    """Enumerated over what may be drafted; q is the processed law of the drafter's own logits, 0 for other tokens."""
    from test_sampling import warpers

    from specnb.decoding.verifiers import acceptance, residual

    model, small = target(torch.float64), drafter("plain", torch.float64)
    processors, ids_of = warpers(settings), small.target_ids()
    checked, blocks = 0, []
    init = BlockDistributions.__init__

    def kept(self: BlockDistributions, row: Any, draft: Any, logits: Tensor, weight: Any) -> None:
        init(self, row, draft, logits, weight)
        blocks.append((list(row.ids), draft))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockDistributions, "__init__", kept)
        specnb.generate(
            model, X, do_sample=True, seed=3, max_new_tokens=10, assistant_model=small, **settings, **STEADY
        )
    for ids, draft in blocks:
        if not draft.tokens:
            continue
        logits = clean(model, small, ids, draft.tokens).float()
        whole = model(torch.tensor([ids + draft.tokens])).logits[0, len(ids) - 1 :].float()
        for i in range(len(draft.tokens)):
            text = torch.tensor([ids + draft.tokens[:i]])
            spread = torch.full((64,), -torch.inf).index_copy(0, ids_of, logits[i])
            q = processors(text, spread[None])[0].softmax(-1)
            assert (draft.probs[i] - q).abs().max() < 1e-5
            assert float(q.sum()) == pytest.approx(1)
            p, q = processors(text, whole[i][None])[0].softmax(-1).double(), draft.probs[i].double()
            law = torch.zeros(64, dtype=torch.float64)
            for x in q.nonzero()[:, 0].tolist():
                a = acceptance(p, q, x)
                law[x] += q[x] * a
                law += q[x] * (1 - a) * residual(p, q, x)
            assert (law - p).abs().max() < 1e-6
            checked += 1
    assert checked > 10


# ---------------------------------------------------------------- caches and interrupts
def test_a_second_turn_goes_on_from_a_filled_cache() -> None:
    """The target's states of the cached tokens are gone: the drafter reads from the first token after them."""
    model = target()
    past = DynamicCache(config=model.config)
    first = spec(model, X, max_new_tokens=6, assistant_model=drafter(), **{cache_name(model): past}, **STEADY)
    prompt = torch.cat([X, torch.tensor([first.ids]), tiny.ids(8, 5)], 1)
    expected = plain(model, prompt, max_new_tokens=16)
    with drafting() as drafts:
        two = spec(model, prompt, max_new_tokens=16, assistant_model=drafter(), **{cache_name(model): past}, **STEADY)
    assert list(two.ids) == expected
    assert past.get_seq_length() == prompt.shape[1] + 15
    assert two.num_draft_tokens > 10
    held = X.shape[1] + len(first.ids) - 1
    ids, tokens, logits = drafts[0]
    whole = clean(model, drafter(), ids, tokens)
    assert (logits - whole).abs().max() > 1e-3  # with all tokens it would draft otherwise
    assert len(ids) - 1 - held == 6


def test_an_interrupt_keeps_the_text_and_the_next_call_is_right() -> None:
    model, expected = target(), plain(target(), X, max_new_tokens=20)

    def stop(step: Any) -> None:
        if step.position > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        spec(model, X, max_new_tokens=20, assistant_model=drafter(), on_step=stop, **STEADY)
    partial = caught.value.partial_result  # type: ignore[attr-defined]
    assert 5 < len(partial.ids) < 20
    assert list(partial.ids) == expected[: len(partial.ids)]
    assert list(spec(model, X, max_new_tokens=20, assistant_model=drafter(), **STEADY).ids) == expected


def test_nothing_is_changed_in_either_model() -> None:
    model, small = tiny.llama(layers=5), made(tiny.llama(layers=5), draft=40)
    before = configs(model)
    weights = [{name: value.clone() for name, value in m.state_dict().items()} for m in (model, small)]
    config = small.config.to_dict()
    spec(model, X, max_new_tokens=12, assistant_model=small, **STEADY)
    specnb.generate(model, X, do_sample=True, seed=1, max_new_tokens=12, assistant_model=small, **STEADY)
    assert configs(model) == before
    assert small.config.to_dict() == config
    for m, old in zip((model, small), weights, strict=True):
        assert all(torch.equal(old[name], value) for name, value in m.state_dict().items())
        assert not any(x._forward_hooks or x._forward_pre_hooks for x in m.modules())


# ---------------------------------------------------------------- files
def saved_target(place: Path) -> Path:
    """`target()` with a tokenizer in a folder."""
    target().save_pretrained(place)
    tiny.word_tokenizer([f"w{i}" for i in range(61)]).save_pretrained(place)
    return place


def test_load_save_and_load_again(tmp_path: Path) -> None:
    home = saved_target(tmp_path / "target")
    folder = drafter_folder(tmp_path / "drafter", target(), draft=40, fc_norm=True, norm_output=True)
    pair = specnb.load(home, folder)
    assert isinstance(pair.assistant, Eagle3Drafter)
    assert "Eagle3Drafter, 1 layers" in pair.describe()
    expected = plain(target(), X, max_new_tokens=20)
    with drafting() as drafts:
        result = spec(pair.target, X, max_new_tokens=20, assistant_model=pair.assistant, **STEADY)
    assert (result.method, list(result.ids)) == ("eagle3", expected)
    check(drafts, pair.target, pair.assistant)
    before = pair.assistant.config.to_dict()
    specnb.save_pair(pair, tmp_path / "pair")
    assert pair.assistant.config.to_dict() == before
    again = specnb.load(tmp_path / "pair")
    assert all(torch.equal(value, again.assistant.state_dict()[k]) for k, value in pair.assistant.state_dict().items())
    written = json.loads((tmp_path / "pair" / "assistant" / "config.json").read_text())
    original = json.loads((folder / "config.json").read_text())
    for key in ("speculators_model_type", "eagle_aux_hidden_state_layer_ids", "norm_output", "fc_norm"):
        assert written[key] == original[key]
    assert written["transformer_layer_config"]["model_type"] == "llama"
    alone = specnb.load_drafter(folder, dtype="bfloat16")
    assert alone.dtype is torch.bfloat16
    with pytest.raises(specnb.LoadError, match="is a drafter.*cannot generate alone"):
        specnb.load(folder)
    with pytest.raises(specnb.LoadError, match="is no EAGLE-3"):
        specnb.load_drafter(home)


def test_in_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder = saved_target(tmp_path / "target"), drafter_folder(tmp_path / "drafter", target(), draft=40)
    with shell(tmp_path, monkeypatch) as ip:
        assert run_cell(ip, f"%specload {home} --assistant {folder}") == ""
        assert run_cell(ip, "%%specgen --max-new-tokens 12 -o run\nw1 w2 w3 w4") == ""
        assert ip.user_ns["run"].method == "eagle3"
        pair = specnb.load(home, folder)
        fits = {name for name, reason in available_methods(pair).items() if reason is None}
        assert fits == {"plain", "prompt_lookup", "suffix", "early_exit", "eagle3", "suffix+eagle3"}
        said = run_cell(ip, "%%specgen --method suffix+draft_model\nw1 w2")
        assert "for method 'eagle3', " in said and "choose 'suffix+eagle3'" in said
        assert "it is for eagle3 and suffix+eagle3" in run_cell(ip, "%%specbench suffix+draft_model\nw1 w2")


@pytest.mark.parametrize("read", [None, (1, 3, 4)])
def test_the_format_of_safeailab_and_specforge(read: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Pickled, the layer called `midlayer`, the layers numbered by whose output is read; its own embedding."""
    source = drafter_folder(tmp_path / "speculators", target(), draft=40, read=read)
    folder = safeai_folder(tmp_path / "safeai", source)
    small = load_eagle3("safeai", str(folder))
    assert small.config.target_layers(5) == (read or (2, 2, 2))
    same = load_eagle3("speculators", str(source))
    results = [spec(target(), X, max_new_tokens=20, assistant_model=m, **STEADY) for m in (small, same)]
    assert [step.drafted for step in results[0].steps] == [step.drafted for step in results[1].steps]
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    stored["embed_tokens.weight"] = torch.randn(64, 32)
    del stored["t2d"]
    torch.save(stored, folder / "pytorch_model.bin")
    own = load_eagle3("safeai", str(folder))
    with drafting() as drafts:
        spec(target(), X, max_new_tokens=12, assistant_model=own, **STEADY)
    check(drafts, target(), own)
    assert torch.equal(own.t2d, same.t2d)


def test_pickles_that_would_run_code_are_refused(tmp_path: Path) -> None:
    folder = safeai_folder(tmp_path / "safeai", drafter_folder(tmp_path / "source", target()))
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(specnb.LoadError, match="pickle"):
        specnb.load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_layer_config.model_type": "gemma3_text"}, "has gemma3_text layers.*llama and qwen3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "only the target's last state"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"draft_vocab_size": 30}, r"lm_head.weight is \[40, 32\], the config asks for \[30, 32\]"),
        ({"fc_norm": True}, "there is no fc_norm.0.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight is \[32, 96\], the config asks for \[32, 64\]"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = drafter_folder(tmp_path / "drafter", target(), draft=40)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = config
        for part in path:
            inner = inner[part]
        inner[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(specnb.LoadError, match=message) as caught:
        specnb.load_drafter(folder)
    assert str(folder) in str(caught.value)


def test_a_drafter_of_another_target_is_refused_naming_both() -> None:
    small = drafter()
    other: dict[str, tuple[Any, str]] = {
        "size": (tiny.llama(hidden=48, layers=5), "reads states of size 32, the target's have 48"),
        "vocabulary": (tiny.llama(vocab=70, layers=5), "its vocabulary has 64 tokens, the target's 70"),
        "layers": (tiny.llama(layers=2), "states of layers 1, 2, 3, the target has 2 layers"),
        "family": (tiny.family("qwen3"), r"names the target '/somewhere/else' \(LlamaForCausalLM\)"),
    }
    for model, message in other.values():
        with no_forward(model), pytest.raises(ValueError, match=message) as caught:
            spec(model, X, max_new_tokens=4, assistant_model=small)
        assert "'drafter'" in str(caught.value) and type(model).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("verifier", "here", "fits"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", False),
        ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/Llama-3.1-8B-Instruct-bnb-4bit", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "/models/copy", True),
        ("/training/target", "Qwen/Qwen3-8B", True),
        (None, "Qwen/Qwen3-8B", True),
    ],
)
def test_the_target_that_its_config_names(verifier: str | None, here: str, fits: bool) -> None:
    from specnb.models import check_pair

    model, small = tiny.llama(layers=5), made(tiny.llama(layers=5))
    model.config.name_or_path = here
    small.config.speculators_config["verifier"]["name_or_path"] = verifier
    if fits:
        check_pair(model, None, small)
    else:
        with pytest.raises(ValueError, match=f"names another target, '{verifier}'"):
            check_pair(model, None, small)
        small.config.speculators_config = None
        check_pair(model, None, small)


def test_d2t_must_give_different_ids_of_the_target() -> None:
    small = made(target(), draft=40)
    small.d2t[5] += 40
    with pytest.raises(ValueError, match="d2t"):
        spec(target(), X, max_new_tokens=4, assistant_model=small)


def teardown_module() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
