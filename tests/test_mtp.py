"""MTP layers of a checkpoint: found by the config, loaded once; their drafts are those of a pass without a cache."""

from __future__ import annotations

import copy
import inspect
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import tiny
import torch
from checkpoints import load, mtp_folder, mtp_model, write_mtp
from checks import STEADY, configs, consistent, drafting, no_forward, padded, plain, spec
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.modeling_layers import MtpModel

import specnb
from specnb.models.mtp import load_mtp

KINDS = ["glm4_moe", "deepseek_v3"]
X = tiny.ids(0, 7)
PROMPTS = [X, tiny.ids(3, 15), tiny.ids(4, 1)]


# ---------------------------------------------------------------- the reference
@torch.no_grad()
def clean(model: PreTrainedModel, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, vocab]` of what the MTP layers draft after `ids`, given the tokens they did draft; without any cache.

    At slot s, layer m reads token s + 1 + m and the state at s of the target (layer 0) or of layer m - 1. Further
    tokens go through the layers again, each in one more slot of layer i mod n.
    """
    mtp, k = load_mtp(model), len(drafted)
    depth, end = len(mtp.layers), len(ids) - 1
    name = "cache" if "cache" in inspect.signature(mtp.layers[0].forward).parameters else "past_key_values"

    def layer(m: int, tokens: list[int], states: Tensor, positions: list[int]) -> Tensor:
        at, n = torch.tensor([positions]), len(tokens)
        embedded = mtp.embed_tokens(torch.tensor([tokens]))
        angles = mtp.rotary_emb(embedded, position_ids=at)
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        out: Tensor = mtp.layers[m](
            embedded, states, position_embeddings=angles, position_ids=at, attention_mask=mask, **{name: None}
        )
        return out

    text = [*ids, *drafted]
    states = model.model(torch.tensor([ids])).last_hidden_state[:, :end]
    inputs, last, outs = [], states[:, -1:], []
    for m in range(depth):
        inputs.append((text[1 + m : 1 + m + end], states, list(range(1 + m, 1 + m + end))))
        if m < k:
            states = layer(m, *inputs[m])
            last = states[:, -1:]
            outs.append(last)
    for i in range(depth, k):
        tokens, before, positions = inputs[i % depth]
        inputs[i % depth] = [*tokens, drafted[i - 1]], torch.cat([before, last], 1), [*positions, end + i]
        last = layer(i % depth, *inputs[i % depth])[:, -1:]
        outs.append(last)
    logits: Tensor = mtp._project_to_logits(torch.cat(outs, 1))[0]
    return logits


# ---------------------------------------------------------------- equality
@pytest.mark.slow
@pytest.mark.parametrize("mtp", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain(kind: str, mtp: int) -> None:
    """k up to 16, that is up to 16 rounds through the layers; one row and several that end at different times."""
    model = mtp_model(kind, 3, mtp)
    options = {"max_new_tokens": 24, "eos_token_id": [5, 9, 33, 50]}
    expected = [plain(model, prompt, **options) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS)
    for k in (1, 2, 3, 5, 8, 16):
        how: dict[str, Any] = {"use_mtp": True, "num_assistant_tokens": k, **STEADY}
        if k % 5 == 2:
            how |= {"prefill_chunk_size": 3, "num_assistant_tokens_schedule": "heuristic"}
        if k % 5 == 3:
            how |= {"assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "adaptive"}
        single = spec(model, PROMPTS[k % 3], **options, **how)
        assert list(single.ids) == expected[k % 3], k
        result = spec(model, ids, attention_mask=mask, **options, **how)
        assert [list(row.ids) for row in result.rows] == expected, k
        consistent(result)
        assert result.method == "mtp_layers"


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_right_often(kind: str) -> None:
    model = mtp_model(kind, 3, 2)
    ids, mask = padded(PROMPTS)
    result = spec(model, ids, attention_mask=mask, max_new_tokens=60, use_mtp=True, **STEADY)
    assert 0.1 < result.draft_acceptance_rate < 0.95
    assert max(len(step.drafted) for step in result.steps) == 2  # as many as layers, where nothing is asked for
    assert result.options["num_assistant_tokens"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_options_and_attentions(kind: str) -> None:
    model = mtp_model(kind, 2, 2)
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 24, 44]}):
        expected = plain(model, X, max_new_tokens=20, **options)
        assert list(spec(model, X, max_new_tokens=20, use_mtp=True, **options, **STEADY).ids) == expected
    eager = load(mtp_folder(kind, 2, 2))
    eager.set_attn_implementation("eager")
    ids, mask = padded(PROMPTS)
    with drafting() as drafts:
        result = spec(
            eager, ids, attention_mask=mask, max_new_tokens=20, use_mtp=True, num_assistant_tokens=3, **STEADY
        )
    assert [list(row.ids) for row in result.rows] == [plain(model, p, max_new_tokens=20) for p in PROMPTS]
    for text, tokens, logits in drafts:
        assert (clean(model, text, tokens) - logits).abs().max() < 1e-4


# ---------------------------------------------------------------- proposals
@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 1, 2, 7])
@pytest.mark.parametrize("mtp", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_equal_a_clean_pass_in_every_round(kind: str, mtp: int, k: int | None) -> None:
    """After acceptances and rejections of every length, for one row and for rows that leave on the way."""
    model = mtp_model(kind, 2, mtp)
    length = {} if k is None else {"num_assistant_tokens": k}
    batch, mask = padded(PROMPTS)
    rejected = accepted = 0
    for ids, more in ((X, {}), (batch, {"attention_mask": mask, "eos_token_id": [5, 9, 33, 50, 58]})):
        with drafting() as drafts:
            result = spec(model, ids, max_new_tokens=30, use_mtp=True, prefill_chunk_size=4, **length, **more, **STEADY)
        assert len(drafts) == sum(bool(step.drafted) for step in result.steps)
        for text, tokens, logits in drafts:
            assert (clean(model, text, tokens) - logits).abs().max() < 1e-4, (text, tokens)
            assert logits.argmax(-1).tolist() == tokens
        accepted += result.num_accepted_draft_tokens
        rejected += result.num_draft_tokens - result.num_accepted_draft_tokens
    assert accepted > 5
    assert rejected > 5


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_equal_transformers_own_clean_pass(kind: str) -> None:
    """The reference above is transformers' MtpModel on the whole text with a fresh cache, as far as its layers go."""
    from transformers.cache_utils import MtpCache

    for mtp in (1, 2, 3):
        model = mtp_model(kind, 2, mtp)
        with drafting() as drafts:
            spec(model, X, max_new_tokens=24, use_mtp=True, **STEADY)
        full = [draft for draft in drafts if len(draft[1]) == mtp]
        assert len(full) > 5
        for ids, tokens, logits in full:
            n, text = len(ids), torch.tensor([ids])
            with torch.no_grad():
                states = model.model(text).last_hidden_state[:, : n - 1]
                drafted, theirs, _ = load_mtp(model)(
                    input_ids=text[:, 1:],
                    last_hidden_states=states,
                    attention_mask=torch.ones_like(text[:, 1:]),
                    logits_processor=LogitsProcessorList(),
                    full_input_ids=text,
                    position_ids=torch.arange(1, n)[None],
                    mtp_cache=MtpCache(config=model.config.get_mtp_config()),
                )
            assert (theirs[0] - logits).abs().max() < 1e-4
            assert drafted[0].tolist() == tokens


@pytest.mark.parametrize("mtp", [2, 3])
def test_MTP_03_each_layer_drafts_its_own_token(mtp: int) -> None:
    """One call per layer and round; the prompt goes through once, then only slots that are not settled."""
    model = mtp_model("glm4_moe", 2, mtp)
    spec(model, X, max_new_tokens=2, use_mtp=True)
    widths: list[list[int]] = [[] for _ in range(mtp)]
    handles = [
        layer.register_forward_pre_hook(lambda module, args, own=own: own.append(args[0].shape[1]))
        for layer, own in zip(load_mtp(model).layers, widths, strict=True)
    ]
    try:
        result = spec(model, X, max_new_tokens=30, use_mtp=True, **STEADY)
    finally:
        for handle in handles:
            handle.remove()
    rounds = sum(bool(step.drafted) for step in result.steps)
    assert [len(own) for own in widths] == [rounds] * mtp
    for own in widths:
        assert own[0] == 7  # positions 0 to 6 have a token after them
        assert max(own[1:]) <= 2 * mtp + 1
    assert max(len(step.drafted) for step in result.steps) == mtp
    first, second = (load_mtp(model).layers[i].eh_proj.weight for i in (0, 1))
    assert not torch.equal(first, second)


def test_MTP_03_more_drafts_than_layers_only_when_asked_for() -> None:
    model = mtp_model("glm4_moe", 2, 2)
    by_default = spec(model, X, max_new_tokens=30, use_mtp=True, assistant_confidence_threshold=0)
    assert max(len(step.drafted) for step in by_default.steps) == 2
    asked = spec(model, X, max_new_tokens=30, use_mtp=True, num_assistant_tokens=5, **STEADY)
    assert max(len(step.drafted) for step in asked.steps) == 5
    assert asked.options["num_assistant_tokens"] == 5


@pytest.mark.parametrize("mtp", [2, 3])
def test_MTP_03_STP_01_an_end_in_the_middle_of_a_block_ends_it(mtp: int) -> None:
    model = mtp_model("glm4_moe", 2, mtp)
    free = spec(model, X, max_new_tokens=30, use_mtp=True, **STEADY)
    blocks = [step for step in free.steps if step.accepted == mtp == len(step.drafted)]
    tried = 0
    for step in blocks:
        for i in range(mtp + 1):
            eos = step.emitted[i]
            expected = plain(model, X, max_new_tokens=30, eos_token_id=eos)
            result = spec(model, X, max_new_tokens=30, use_mtp=True, eos_token_id=eos, **STEADY)
            assert list(result.ids) == expected
            assert result.finish_reason == "eos"
            tried += 1
    assert tried > 3


# ---------------------------------------------------------------- MTP-02
VARIANTS: dict[str, dict[str, Any]] = {
    "2 layers": {"layers": 2},
    "3 layers": {"layers": 3},
    "3 layers, 2 MTP": {"layers": 3, "mtp": 2},
    "sharded": {"layers": 2, "mtp": 2, "shards": True},
    "without model.": {"layers": 2, "mtp": 2, "prefix": False},
    "46 layers": {"layers": 46, "mtp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_MTP_02_found_by_the_config(kind: str, variant: str, tmp_path: Path) -> None:
    shape = VARIANTS[variant]
    model = load(write_mtp(tmp_path / "checkpoint", kind, **shape))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = spec(model, X, max_new_tokens=24, use_mtp=True, **STEADY)
    assert list(result.ids) == plain(model, X, max_new_tokens=24)
    assert result.num_accepted_draft_tokens > 0
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with drafting() as drafts:
        spec(model, X, max_new_tokens=24, use_mtp=True, **STEADY)
    for text, tokens, logits in drafts:
        assert (clean(model, text, tokens) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_MTP_02_every_tensor_is_the_one_in_the_file(kind: str, tmp_path: Path) -> None:
    """The right layer, the right place: also the experts, one tensor each in the file, fused in memory."""
    folder = write_mtp(tmp_path / "checkpoint", kind, 3, 2)
    saved, model = load_file(folder / "model.safetensors"), load(folder)
    mtp = load_mtp(model)
    for j, layer in enumerate(mtp.layers):
        own = f"model.layers.{3 + j}."
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
        for theirs, ours in names.items():
            assert torch.equal(saved[f"{own}{theirs}.weight"], getattr(layer, ours).weight), theirs
        block, seen = layer.mtp_block.state_dict(), 0
        for name, value in block.items():
            if name == "mlp.experts.gate_up_proj":
                for e, fused in enumerate(value):
                    pair = [saved[f"{own}mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")]
                    assert torch.equal(torch.cat(pair), fused)
            elif name == "mlp.experts.down_proj":
                for e, part in enumerate(value):
                    assert torch.equal(saved[f"{own}mlp.experts.{e}.down_proj.weight"], part)
            else:
                assert torch.equal(saved[own + name], value), name
            seen += 1
        assert seen > 8
    assert mtp.embed_tokens is model.get_input_embeddings()
    assert mtp.shared_head is model.get_output_embeddings()


# ---------------------------------------------------------------- MTP-01
def refused(folder: Path, *words: str) -> None:
    """An error before the first token that names the checkpoint and all the words."""
    model = load(folder)
    with no_forward(model), pytest.raises(ValueError) as caught:  # noqa: PT011
        spec(model, X, max_new_tokens=4, use_mtp=True)
    for word in (str(folder), *words):
        assert word in str(caught.value), str(caught.value)
    assert list(spec(model, X, max_new_tokens=4).ids) == plain(model, X, max_new_tokens=4)


@pytest.mark.parametrize(
    "drop", ["", "eh_proj", "enorm", "shared_head.norm", "self_attn.o_proj", "mlp.experts.2.", "layers.4."]
)
@pytest.mark.parametrize("kind", KINDS)
def test_MTP_01_missing_tensors_are_named(kind: str, drop: str, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "checkpoint", kind, 3, 2, drop=drop)
    named = drop if drop in ("eh_proj", "enorm", "shared_head.norm") else "decoder block"
    lost = {"": "layers.3.*", "layers.4.": "layers.4.*", "mlp.experts.2.": "layers.3.mlp.experts.2.down_proj.weight"}
    refused(
        folder,
        "layers.3.",
        "layers.4.",
        "original checkpoint",
        named,
        f"lacks model.{lost.get(drop, f'layers.3.{drop}.weight')}",
    )


def test_MTP_01_no_layers_in_the_config(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "checkpoint", "glm4_moe", 2, 1)
    text = (folder / "config.json").read_text()
    assert '"num_nextn_predict_layers": 1' in text
    (folder / "config.json").write_text(text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0'))
    refused(folder, "num_nextn_predict_layers", "0")
    for model in (tiny.llama(), tiny.gemma3()):
        with no_forward(model), pytest.raises(ValueError, match=f"{type(model).__name__}.*no MTP layers"):
            spec(model, X, max_new_tokens=4, use_mtp=True)


def test_MTP_01_a_model_that_was_never_loaded() -> None:
    model = tiny.glm4_moe()
    model.config.num_mtp_layers = 1
    with (
        no_forward(model),
        pytest.raises(ValueError, match=r"not loaded from a checkpoint.*layers\.4\..*from_pretrained"),
    ):
        spec(model, X, max_new_tokens=4, use_mtp=True)


def test_MTP_01_a_config_that_was_loaded_lends_no_layers_to_other_weights(tmp_path: Path) -> None:
    loaded = load(write_mtp(tmp_path / "checkpoint", "glm4_moe", 2, 1))
    model = type(loaded)(loaded.config).eval()  # random weights; the config says where it came from
    assert model.config.name_or_path
    with no_forward(model), pytest.raises(ValueError, match=r"weights were not loaded from there.*from_pretrained"):
        spec(model, X, max_new_tokens=4, use_mtp=True)
    assert list(spec(loaded, X, max_new_tokens=4, use_mtp=True).ids) == plain(loaded, X, max_new_tokens=4)


# ---------------------------------------------------------------- MTP-05
def test_MTP_05_read_once_and_kept_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls read the file once; afterwards the folder may be renamed or gone."""
    model, reads = load(write_mtp(tmp_path / "checkpoint", "glm4_moe", 2, 2)), []
    original = MtpModel.from_pretrained.__func__

    def counting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        reads.append(args)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(counting))
    first = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    second = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
    shutil.rmtree(tmp_path / "elsewhere")
    third = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
    assert first.ids == second.ids == third.ids
    assert first.num_accepted_draft_tokens == third.num_accepted_draft_tokens > 0
    assert len(reads) == 1


def test_MTP_05_a_folder_gone_before_the_first_call_is_named(tmp_path: Path) -> None:
    model = load(write_mtp(tmp_path / "checkpoint", "glm4_moe"))
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    with no_forward(model), pytest.raises(ValueError, match="checkpoint"):
        spec(model, X, max_new_tokens=4, use_mtp=True)


def test_MTP_05_saving_does_not_change_the_model_in_memory(tmp_path: Path) -> None:
    model = load(write_mtp(tmp_path / "checkpoint", "glm4_moe"))
    model.save_pretrained(tmp_path / "early")  # before the layers were read
    before = configs(model)
    one = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
    model.save_pretrained(tmp_path / "late")
    two = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
    assert one.ids == two.ids
    assert [s.drafted for s in one.steps] == [s.drafted for s in two.steps]
    assert configs(model) == before
    specnb.save_pair(specnb.Pair(model, None), tmp_path / "whole")  # keeps them
    kept = spec(load(tmp_path / "whole"), X, max_new_tokens=20, use_mtp=True, **STEADY)
    assert [s.drafted for s in kept.steps] == [s.drafted for s in two.steps]
    assert configs(model) == before
    for copied in ("early", "late"):  # transformers leaves the tensors out: said, not silently random
        refused(tmp_path / copied, "save_pretrained")


def test_the_layers_follow_the_model_to_another_number_format(tmp_path: Path) -> None:
    """16 bits and back; there ties may fall either way, so texts are compared at 32 bits."""
    model = load(write_mtp(tmp_path / "checkpoint", "glm4_moe"))
    spec(model, X, max_new_tokens=8, use_mtp=True)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        result = spec(model, X, max_new_tokens=20, use_mtp=True, **STEADY)
        if dtype == torch.float32:
            assert list(result.ids) == plain(model, X, max_new_tokens=20)
        assert result.num_accepted_draft_tokens


def test_a_model_in_training_mode_stays_so(tmp_path: Path) -> None:
    model = load(write_mtp(tmp_path / "checkpoint", "glm4_moe")).train()
    spec(model, X, max_new_tokens=8, use_mtp=True)
    assert all(module.training for module in model.modules())


def test_nothing_is_registered_on_the_model(tmp_path: Path) -> None:
    model = load(write_mtp(tmp_path / "checkpoint", "deepseek_v3", 2, 2))
    ignored = copy.deepcopy(model._keys_to_ignore_on_load_unexpected), type(model)._keys_to_ignore_on_load_unexpected
    before, names = configs(model), [name for name, _ in model.named_modules()]
    own = [sorted(vars(module)) for module in model.modules()]
    spec(model, X, max_new_tokens=8, use_mtp=True)
    assert configs(model) == before
    assert [name for name, _ in model.named_modules()] == names
    assert [sorted(vars(module)) for module in model.modules()] == own
    assert (model._keys_to_ignore_on_load_unexpected, type(model)._keys_to_ignore_on_load_unexpected) == ignored
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_go_when_they_are_dropped(tmp_path: Path) -> None:
    import gc
    import weakref

    model = load(write_mtp(tmp_path / "checkpoint", "glm4_moe"))
    spec(model, X, max_new_tokens=4, use_mtp=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_two_threads_load_and_draft_at_once(tmp_path: Path) -> None:
    model, results = load(write_mtp(tmp_path / "checkpoint", "glm4_moe", 2, 2)), {}
    expected = [plain(model, prompt, max_new_tokens=20) for prompt in PROMPTS]

    def work(i: int) -> None:
        results[i] = [list(spec(model, PROMPTS[i], max_new_tokens=20, use_mtp=True, **STEADY).ids) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [expected[i]] * 3 for i in range(3)}


def test_one_load_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces functions of its classes while it loads; overlapping loads would leave them replaced."""
    models = [load(write_mtp(tmp_path / str(i), "glm4_moe")) for i in range(2)]
    tie, at_once, most = PreTrainedModel.tie_weights, [0], [0]

    def slowly(original: Any) -> Any:
        def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            time.sleep(0.05)
            try:
                return original(cls, *args, **kwargs)
            finally:
                at_once[0] -= 1

        return classmethod(run)

    for owner in (MtpModel, AutoModelForCausalLM):
        monkeypatch.setattr(owner, "from_pretrained", slowly(owner.from_pretrained.__func__))
    works = [
        lambda: load_mtp(models[0]),
        lambda: load_mtp(models[1]),
        lambda: specnb.load("tiny-llama", "tiny-llama-draft"),
    ]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and PreTrainedModel.tie_weights is tie


# ---------------------------------------------------------------- transformers' own ways in
def test_given_to_generate_itself_or_bound() -> None:
    model = mtp_model("glm4_moe", 2, 2)
    expected = plain(model, X, max_new_tokens=20)
    mask = torch.ones_like(X)
    given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
    eager = {"assistant_confidence_threshold": 0.0}
    bound = specnb.decoder(use_mtp=True, **eager)
    assert model.generate(X, custom_generate=bound, **given)[0, 7:].tolist() == expected
    called = specnb.decoder(**eager)
    assert model.generate(X, custom_generate=called, use_mtp=True, **given)[0, 7:].tolist() == expected
    for decoder in (bound, called):
        assert decoder.result is not None
        assert decoder.result.method == "mtp_layers"
        assert decoder.result.num_accepted_draft_tokens
        assert max(len(step.drafted) for step in decoder.result.steps) == 2
    config = copy.deepcopy(model.generation_config)
    config.update(use_mtp=True, max_new_tokens=20, do_sample=False)
    result = specnb.generate(model, X, attention_mask=mask, generation_config=config, **STEADY)
    assert (result.method, list(result.ids)) == ("mtp_layers", expected)


def test_a_filled_cache_is_continued() -> None:
    from checks import cache_name
    from transformers import DynamicCache

    model = mtp_model("glm4_moe", 2, 2)
    for first in ({}, {"use_mtp": True, **STEADY}):
        past = DynamicCache(config=model.config)
        one = spec(model, X, max_new_tokens=6, **{cache_name(model): past}, **first)
        prompt = torch.cat([one.sequences, tiny.ids(9, 3)], 1)
        two = spec(model, prompt, max_new_tokens=16, use_mtp=True, **{cache_name(model): past}, **STEADY)
        assert list(two.ids) == plain(model, prompt, max_new_tokens=16)
        assert past.get_seq_length() == prompt.shape[1] + 16 - 1


def test_weights_of_two_checkpoints_are_not_mixed_up() -> None:
    models = [mtp_model("glm4_moe", 2, 1), load(mtp_folder("glm4_moe", 2, 1, seed=77))]
    drafted = []
    for model in models:
        with drafting() as drafts:
            spec(model, X, max_new_tokens=16, use_mtp=True, **STEADY)
        for text, tokens, logits in drafts:
            assert (clean(model, text, tokens) - logits).abs().max() < 1e-4
        drafted.append(drafts[0][2])
    assert not torch.allclose(*drafted)
    assert drafted[0].shape[-1] == checkpoints.VOCAB
