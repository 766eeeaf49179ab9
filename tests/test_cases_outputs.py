"""Cases OS, RD, ST, VR and log-probabilities: what generate() returns beside the ids, and the trace of each token."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, mtp_model
from checks import EAGER, STEADY, Recorder, cache_name, consistent, plain, spec
from test_cases_processors import EOS, MASK, PAD_IDS, PADDED, ROWS, WAYS, D, T, X
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput

import specnb
from specnb.decoding.verifiers import acceptance, block_acceptance
from specnb.trace import GenerationResult

KEPT = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with an end": {"eos_token_id": EOS},
    "with processors": {"repetition_penalty": 1.4, "eos_token_id": EOS},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
}


# ---------------------------------------------------------------- OS-01
@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("setting", ["greedy", "with an end", "with processors"])
def test_OS_01_scores_and_logits_are_those_of_generate(setting: str, rows: str) -> None:
    ids, mask = ROWS[rows]
    given = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False} | SETTINGS[setting]
    want = T.generate(ids, **given, **KEPT)
    for way in WAYS.values():
        result = specnb.generate(T, ids, **given, output_scores=True, output_logits=True, **way)
        decoder = specnb.decoder(**way)
        out = T.generate(ids, custom_generate=decoder, **given, **KEPT)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        for found in (result, out):
            assert found.sequences.tolist() == want.sequences.tolist()
            for ours, theirs in ((found.scores, want.scores), (found.logits, want.logits)):
                assert isinstance(ours, tuple)
                assert len(ours) == want.sequences.shape[1] - 7
                for a, b in zip(ours, theirs, strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype)
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("rows", ["one", "rows", "padded rows"])
def test_OS_01_sampled_scores_are_a_forward_over_the_text(rows: str, verification: str) -> None:
    ids, mask = ROWS[rows]
    given = {"attention_mask": mask, "max_new_tokens": 10, "seed": 4} | SETTINGS["sampled"]
    result = specnb.generate(
        T, ids, **given, verification=verification, output_scores=True, output_logits=True, **WAYS["draft"]
    )
    assert result.num_accepted_draft_tokens
    raw = logits_of(T, result)
    for r, logits in enumerate(raw):
        for i, own in enumerate(logits):
            torch.testing.assert_close(result.logits[i][r], own, atol=1e-4, rtol=1e-4)
            best = (own / 0.7).topk(20)
            expected = torch.full_like(own, -torch.inf).scatter(0, best.indices, best.values)
            torch.testing.assert_close(result.scores[i][r], expected, atol=1e-4, rtol=1e-4)


def test_OS_01_nothing_is_kept_unasked() -> None:
    result = spec(T, X[:1], max_new_tokens=5, output_scores=True, **WAYS["lookup"])
    assert len(result.scores) == 5 and result.logits is None
    result = spec(T, X[:1], max_new_tokens=5, **WAYS["lookup"])
    assert result.scores is result.logits is None
    out = T.generate(
        X[:1],
        attention_mask=MASK[:1],
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=specnb.decoder(**WAYS["lookup"]),
    )
    assert out.scores is out.logits is None
    kept = spec(T, X[:1], max_new_tokens=5, output_scores=True, **WAYS["lookup"])
    read = GenerationResult.from_json(kept.to_json())
    assert read == kept and read.scores is None


# ---------------------------------------------------------------- RD-01
def cache_of(out: Any) -> Any:
    return out.cache if "cache" in out.__dataclass_fields__ else out.past_key_values


def tensors(cache: Any) -> list[Tensor]:
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


@pytest.mark.parametrize("way", WAYS)
def test_RD_01_the_cache_is_ready_for_the_next_turn(way: str) -> None:
    for model in (T, tiny.gemma3()) if way == "lookup" else (T,):
        given = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        want = model.generate(X[:1], attention_mask=MASK[:1], **given)
        out = model.generate(X[:1], attention_mask=MASK[:1], custom_generate=specnb.decoder(**WAYS[way]), **given)
        assert isinstance(cache_of(out), DynamicCache)
        assert cache_of(out).get_seq_length() == cache_of(want).get_seq_length() == 12
        for a, b in zip(tensors(cache_of(out)), tensors(cache_of(want)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        longer = torch.cat([out.sequences, tiny.ids(9, 4)], 1)
        expected = plain(model, longer, max_new_tokens=8)
        assert plain(model, longer, max_new_tokens=8, **{cache_name(model): cache_of(out)}) == expected


@pytest.mark.parametrize(
    "options", [{"output_scores": True}, {"logits_processor": LogitsProcessorList([LogitsProcessor()])}]
)
def test_RD_01_the_cache_of_rows_that_grew_in_step(options: dict[str, Any]) -> None:
    if "logits_processor" in options:

        class Same(LogitsProcessor):
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                return scores

        options = {"logits_processor": LogitsProcessorList([Same()])}
    given = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": EOS} | options
    want = T.generate(X, attention_mask=MASK, **given)
    for way in WAYS.values():
        out = T.generate(X, attention_mask=MASK, custom_generate=specnb.decoder(**way), **given)
        for a, b in zip(tensors(cache_of(out)), tensors(cache_of(want)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_RD_01_of_padded_rows(rows: int) -> None:
    """A cache that is given holds what plain decoding leaves in it where the mask lets anybody look."""
    if rows > 1 and cache_name(T) != "cache":
        pytest.skip("before transformers 5.24 nothing says that a cache was given")
    ids, mask, kept = PAD_IDS[:rows], PADDED[:rows], []
    for way in ({}, {"custom_generate": specnb.decoder(**WAYS["lookup"])}):
        kept.append(DynamicCache())
        given = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, cache_name(T): kept[-1]}
        out = T.generate(ids, attention_mask=mask, **given, **way)
        assert cache_of(out) is kept[-1]
        assert kept[-1].get_seq_length() == out.sequences.shape[1] - 1
    seen = torch.nn.functional.pad(mask, (0, 5), value=1)[:, None, :, None]
    for a, b in zip(*map(tensors, kept), strict=True):
        torch.testing.assert_close(a * seen, b * seen, atol=1e-4, rtol=1e-4)


def test_RD_01_no_cache_rather_than_a_wrong_one() -> None:
    """Of rows that ended apart, where no cache was given to fill."""
    out = T.generate(
        PAD_IDS,
        attention_mask=PADDED,
        max_new_tokens=12,
        eos_token_id=EOS,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=specnb.decoder(**WAYS["draft"]),
    )
    assert cache_of(out) is None


# ---------------------------------------------------------------- ST-01
REFUSED: dict[str, dict[str, Any]] = {
    "an exit that is none": {"assistant_early_exit": 99},
    "an unknown method": {"method": "prompt_lookpu"},
    "beams": {"num_beams": 3},
    "no prompt": {"input_ids": None},
    "an unknown argument": {"nonsense": 1},
    "a wrong seed": {"seed": -1},
    "no new tokens": {"max_length": 3, "max_new_tokens": None},
    "a wrong number of alternatives": {"top_logprobs": 99},
    "a model that is none": {"model": "gpt2"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_ST_01_a_refusal_ends_the_stream(name: str) -> None:
    recorder = Recorder()
    call = {"model": T, "input_ids": X[:1], "attention_mask": MASK[:1], "max_new_tokens": 4} | REFUSED[name]
    with pytest.raises((ValueError, TypeError)):
        specnb.generate(call.pop("model"), **call, streamer=recorder)
    assert recorder.ended == 1 and not recorder.puts


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"assistant_early_exit": 99}, {"attention_mask": MASK[:1] * 0}])
def test_ST_01_a_decoder_ends_the_stream_too(options: dict[str, Any]) -> None:
    recorder = Recorder()
    decoder = specnb.decoder(streamer=recorder)
    call = {"attention_mask": MASK[:1], "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match="num_beams|assistant_early_exit|attention_mask"):
        T.generate(X[:1], custom_generate=decoder, **call | options)
    assert recorder.ended == 1
    again = Recorder()
    decoder.streamer = again
    T.generate(X[:1], custom_generate=decoder, **call)
    assert again.ended == 1 and again.ids == X[0].tolist() + plain(T, X[:1], max_new_tokens=4)


def test_ST_01_a_failure_in_mid_run_ends_it_once() -> None:
    class Falling(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 3:
                raise OSError("no one listens")

    recorder = Falling()
    with pytest.raises(OSError, match="no one listens") as caught:
        spec(T, X[:1], max_new_tokens=8, streamer=recorder, **WAYS["draft"])
    assert recorder.ended == 1
    partial = caught.value.partial_result  # type: ignore[attr-defined]
    assert 2 <= len(partial.ids) < 8
    assert list(partial.ids) == plain(T, X[:1], max_new_tokens=8)[: len(partial.ids)]
    recorder = Recorder()

    def on_step(step: specnb.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spec(T, X[:1], max_new_tokens=8, streamer=recorder, on_step=on_step, **WAYS["draft"])
    assert recorder.ended == 1


# ---------------------------------------------------------------- VR-01
def test_VR_01_nothing_by_nothing_accepts_nothing() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert float(acceptance(p, p, 3)) == 0
    assert float(acceptance(p, q, 3)) == 0
    assert float(acceptance(p, q, 2)) == 1
    assert float(acceptance(p, q, 1)) == pytest.approx(0.6)
    assert float(acceptance(p, None, 3)) == 0


def test_VR_01_in_a_block() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.5, 0.5, 0.0, 0.0])
    for drafted in ([3, 0], [0, 3], [3, 2], [3, 3], [0, 2, 3]):
        k = len(drafted)
        w, h = block_acceptance([p] * (k + 1), [q] * k, drafted)
        assert not w.isnan().any() and not h.isnan().any()
        first = drafted.index(3)
        assert w[first + 1 :].tolist() == h[first + 1 :].tolist() == [0.0] * (k - first)
        assert w[: first + 1].tolist() == [1.0] * (first + 1)


# ---------------------------------------------------------------- log-probabilities
def logits_of(model: Any, result: GenerationResult) -> list[Tensor]:
    """Each row's logits `[tokens, vocab]`, from the whole text at once, without a cache."""
    out = []
    for row in result.rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt_ids, *row.ids]]), use_cache=False).logits[0].float()
        out.append(logits[len(row.prompt_ids) - 1 : -1])
    return out


def methods() -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Model, options, and the drafter by itself (None if it has no distribution over the target's vocabulary)."""
    from functools import partial

    gemma, mtp = gemma4_target(), mtp_model("glm4_moe", 2, 2)
    steady = {"num_assistant_tokens": 3, **STEADY}
    exit_ = specnb.truncate(T, 2)
    return {
        "plain": (T, {}, None),
        "lookup": (T, WAYS["lookup"], None),
        "draft": (T, {"assistant_model": D, **steady}, D),
        "early exit": (T, {"assistant_early_exit": 2, **steady}, exit_),
        "MTP": (mtp, {"use_mtp": True, **steady}, partial(int)),
        "Gemma 4": (gemma, {"assistant_model": gemma4_drafter(gemma), **steady}, partial(int)),
    }


METHODS = methods()
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.5, "top_k": 9, "seed": 3},
    "block": {"do_sample": True, "top_k": 0, "seed": 3, "verification": "block"},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", METHODS)
def test_LP_01_log_probabilities_are_a_forward_over_the_text(name: str, how: str) -> None:
    model, options, drafter = METHODS[name]
    if name == "plain" and how == "block":
        pytest.skip("nothing is verified")
    for rows in ("one", "padded rows"):
        ids, mask = ROWS[rows]
        given = {"attention_mask": mask, "max_new_tokens": 14, **HOW[how], **options}
        result = specnb.generate(model, ids, **given, top_logprobs=4)
        unasked = specnb.generate(model, ids, **given, logprobs=False)
        assert [row.ids for row in unasked.rows] == [row.ids for row in result.rows]
        assert all(s.logprobs is s.top_logprobs is s.draft_top_logprobs is None for s in unasked.steps)
        usual = specnb.generate(model, ids, **given)
        assert [s.logprobs for s in usual.steps] == [pytest.approx(s.logprobs, abs=1e-6) for s in result.steps]
        assert all(s.top_logprobs is s.draft_top_logprobs is None for s in usual.steps)
        for row, logits in zip(result.rows, logits_of(model, result), strict=True):
            logprobs = logits.double().log_softmax(-1)
            ids_ = torch.tensor(row.ids)
            found = [value for step in row.steps for value in step.logprobs or ()]
            assert found == pytest.approx(logprobs.gather(1, ids_[:, None]).flatten().tolist(), abs=1e-5)
            tops = [pairs for step in row.steps for pairs in step.top_logprobs or ()]
            assert len(tops) == len(row.ids)
            for pairs, own in zip(tops, logprobs, strict=True):
                assert [value for _, value in pairs] == pytest.approx(own.topk(4).values.tolist(), abs=1e-5)
                assert [float(own[i]) for i, _ in pairs] == pytest.approx([value for _, value in pairs], abs=1e-5)
            check_draft(row, drafter)
        if name not in ("plain",):
            assert result.num_draft_tokens
        assert GenerationResult.from_json(result.to_json()) == result
        if rows == "one":
            consistent(result)


def check_draft(row: Any, drafter: Any) -> None:
    text = [*row.prompt_ids, *row.ids]
    for step in row.steps:
        if drafter is None or not step.drafted:
            assert step.draft_top_logprobs is None
            continue
        assert step.draft_top_logprobs is not None
        assert [len(pairs) for pairs in step.draft_top_logprobs] == [4] * len(step.drafted)
        if not hasattr(drafter, "forward"):  # drafts from states of the target's: no plain forward of its own
            continue
        with torch.no_grad():
            logits = drafter(torch.tensor([[*text[: step.position], *step.drafted]]), use_cache=False).logits[0]
        logprobs = logits.double().log_softmax(-1)[step.position - 1 : -1]
        for pairs, own in zip(step.draft_top_logprobs, logprobs, strict=True):
            assert [value for _, value in pairs] == pytest.approx(own.topk(4).values.tolist(), abs=1e-5)
            assert [float(own[i]) for i, _ in pairs] == pytest.approx([value for _, value in pairs], abs=1e-5)


def test_LP_01_more_alternatives_than_tokens() -> None:
    model = tiny.llama(vocab=8)
    result = spec(model, torch.tensor([[3, 4, 5]]), max_new_tokens=4, top_logprobs=20, prompt_lookup_num_tokens=2)
    assert all(len(pairs) == 8 for step in result.steps for pairs in step.top_logprobs or ())


def test_LP_01_a_processor_that_writes_into_the_scores_does_not_change_them() -> None:
    class Writing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, ::2] = -torch.inf
            return scores

    for ids, mask in (ROWS["one"], ROWS["rows"]):
        result = spec(
            T,
            ids,
            attention_mask=mask,
            max_new_tokens=8,
            logits_processor=LogitsProcessorList([Writing()]),
            output_logits=True,
            **WAYS["draft"],
        )
        for r, (row, logits) in enumerate(zip(result.rows, logits_of(T, result), strict=True)):
            found = [value for step in row.steps for value in step.logprobs or ()]
            own = logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None]).flatten()
            assert found == pytest.approx(own.tolist(), abs=1e-5)
            assert all(torch.allclose(result.logits[i][r], logits[i], atol=1e-4) for i in range(8))


def test_LP_01_through_decoder_and_pandas() -> None:
    decoder = specnb.decoder(top_logprobs=2, **WAYS["draft"])
    T.generate(X[:1], attention_mask=MASK[:1], max_new_tokens=8, do_sample=False, custom_generate=decoder)
    assert decoder.result is not None
    table = decoder.result.to_pandas()
    assert table.logprobs.map(len).sum() == table.top_logprobs.map(len).sum() == 8
    for wrong in (-1, 21, 2.5, True):
        with pytest.raises(ValueError, match="top_logprobs"):
            specnb.decoder(top_logprobs=wrong)
        with pytest.raises(ValueError, match="top_logprobs"):
            spec(T, X[:1], max_new_tokens=4, top_logprobs=wrong)
    with pytest.raises(ValueError, match="logprobs"):
        spec(T, X[:1], max_new_tokens=4, logprobs=5)


def test_LP_01_universal_drafts_by_text_have_no_distribution() -> None:
    byte, sp = tiny.byte_tokenizer(), tiny.sp_tokenizer()
    model, draft = tiny.llama(vocab=len(byte), layers=2), tiny.llama(vocab=len(sp), layers=2, seed=3)
    given = {"assistant_model": draft, "tokenizer": byte, "assistant_tokenizer": sp, "top_logprobs": 3, **EAGER}
    greedy = specnb.generate(model, "the quick brown", do_sample=False, max_new_tokens=8, **given)
    assert greedy.num_draft_tokens and all(step.draft_top_logprobs is None for step in greedy.steps)
    sampled = specnb.generate(model, "the quick brown", do_sample=True, seed=1, max_new_tokens=8, **given)
    drafted = [step for step in sampled.steps if step.drafted]
    assert drafted and all(len(step.draft_top_logprobs or ()) == len(step.drafted) for step in drafted)


# ---------------------------------------------------------------- margins
@pytest.mark.parametrize(
    "options", [{}, {"suppress_tokens": [5, 6]}, {"repetition_penalty": 1.7}, {"forced_eos_token_id": 9}]
)
def test_margins_are_those_of_the_decision(options: dict[str, Any]) -> None:
    """In half precision: the gap of the two best scores after the processors."""
    half = tiny.llama().to(torch.bfloat16)
    given = {"max_new_tokens": 10, "output_scores": True} | options
    if "forced_eos_token_id" in options:
        given["eos_token_id"] = 9
    for way in ({"method": "plain"}, WAYS["lookup"]):
        result = spec(half, X[:1], **given, **way)
        margins = [gap for step in result.steps for gap in step.margins or ()]
        best = [score[0].topk(2).values for score in result.scores]
        assert margins == pytest.approx([float(two[0] - two[1]) for two in best])
        assert spec(T, X[:1], **given, **way).steps[0].margins is None
