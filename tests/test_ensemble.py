"""Static ensemble: drafted positions follow w p + (1 - w) q, the bonus follows p; lossy, and said to be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import test_sampling
import tiny
import torch
from checks import STEADY, consistent, no_forward, padded, plain, spec, true_shares
from test_sampling import PROMPT, SETTINGS, VOCAB, warpers
from torch import Tensor
from transformers import PreTrainedModel

import specnb
from specnb.decoding.contracts import Draft, Row
from specnb.decoding.distributions import BlockDistributions, Processors
from specnb.decoding.schedules import Constant
from specnb.decoding.verifiers import acceptance, block_acceptance, block_residual, residual

T, D = test_sampling.target(), test_sampling.draft()
G_T = tiny.llama()
G_D = tiny.noisy(G_T, 0.1)
X = tiny.ids(0, 7)


# ---------------------------------------------------------------- the mixed distribution, exactly
def random_distribution(seed: int, n: int = 6, zeros: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(n, generator=generator, dtype=torch.float64)
    weights[torch.randperm(n, generator=generator)[:zeros]] = 0
    return weights / weights.sum()


def verified_probs(w: float, p_logits: Tensor, q: Tensor, drafted: list[int]) -> list[Tensor]:
    """The distributions that the verifier follows at each position of a block, by specnb's BlockDistributions."""
    row = Row(0, [1, 2, 3], 10, torch.Generator(), Processors(), Constant(0))
    block = BlockDistributions(row, Draft(drafted, q), p_logits, w)
    return [block.target_probs(i) for i in range(len(drafted) + 1)]


@pytest.mark.parametrize("w", [0.05, 0.25, 0.75, 0.999])
@pytest.mark.parametrize("zeros", [0, 2, 4])
def test_SMP_05_the_output_distribution_is_the_mix_exactly(w: float, zeros: int) -> None:
    """Enumerated over drafted tokens and decisions; the distribution of the token that comes out is w p + (1 - w) q."""
    for seed in range(8):
        logits = random_distribution(seed + 50, zeros=zeros // 2).log().float()
        q = random_distribution(seed, zeros=zeros)
        p = logits.softmax(-1).double()
        out, mixed = torch.zeros(6, dtype=torch.float64), w * p + (1 - w) * q
        for x in range(6):
            if q[x] == 0:
                continue
            v = verified_probs(w, logits[None].repeat(2, 1), q[None], [x])[0].double()
            assert (v - mixed).abs().max() < 1e-7
            accept = float(acceptance(v, q, x))
            out[x] += q[x] * accept
            out += q[x] * (1 - accept) * residual(v, q, x)
        assert (out - mixed).abs().max() < 1e-7
        bonus = verified_probs(w, logits[None].repeat(2, 1), q[None], [int(q.argmax())])[1].double()
        assert (bonus - p).abs().max() < 1e-7


def test_SMP_05_block_verification_follows_the_mix_too() -> None:
    """Two drafted positions: the joint distribution of the first two tokens is v1 v2, enumerated."""
    w, n = 0.6, 4
    q = torch.stack([random_distribution(1, n), random_distribution(2, n)])
    logits = torch.stack([random_distribution(seed, n) for seed in (3, 4, 5)]).log().float()
    p = logits.softmax(-1).double()
    v = [w * p[i] + (1 - w) * q[i] for i in range(2)]
    joint = torch.zeros(n, n, dtype=torch.float64)
    for a in range(n):
        for b in range(n):
            mixed = [probs.double() for probs in verified_probs(w, logits, q, [a, b])]
            weights, h = block_acceptance(mixed, list(q), [a, b])
            chance = q[0][a] * q[1][b]
            two = h[2]
            one = (1 - two) * h[1]
            joint[a, b] += chance * two
            joint[a] += chance * one * block_residual(weights[1], mixed[1], q[1], b)
            none = (1 - two) * (1 - h[1])
            first = block_residual(weights[0], mixed[0], q[0], a)
            joint += chance * none * first[:, None] * v[1][None]  # the next step drafts again: the mix once more
    assert (joint.sum(1) - v[0]).abs().max() < 1e-7
    assert (joint - v[0][:, None] * v[1][None]).abs().max() < 1e-6


def test_distances_are_total_variations() -> None:
    logits, q = random_distribution(3).log().float(), random_distribution(9)
    row = Row(0, [1, 2, 3], 10, torch.Generator(), Processors(), Constant(0))
    block = BlockDistributions(row, Draft([1], q[None]), logits[None].repeat(2, 1), 0.25)
    mixed, p = block.target_probs(0).double(), logits.softmax(-1).double()
    block.target_probs(1)
    assert block.distances == pytest.approx([float((mixed - p).abs().sum() / 2)])


# ---------------------------------------------------------------- end to end
@cache
def mixed_distribution(setting: str, w: float) -> Tensor:
    """Joint distribution `[vocab ** 3]` of three drafted tokens, the first drafted before the target saw the prompt."""
    processors, joint, texts = warpers(SETTINGS[setting]), torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(3):
        with torch.no_grad():
            both = [model(input_ids=texts, use_cache=False).logits[:, -1].float() for model in (T, D)]
        p, q = (processors(texts, logits).double().softmax(-1) for logits in both)
        joint = (joint[:, None] * (w * p + (1 - w) * q)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return joint


def sampled(setting: str, w: float, runs: int = 1536, k: int = 4, **options: Any) -> list[tuple[int, ...]]:
    """Texts of three tokens out of four: the fourth is there so that three are drafted."""
    texts: list[tuple[int, ...]] = []
    while len(texts) < runs:
        prompts = PROMPT.repeat(512, 1)
        result = specnb.generate(
            T,
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=4,
            seed=10**6 + len(texts),
            assistant_model=D,
            num_assistant_tokens=k,
            assistant_ensemble_weight=w,
            **STEADY,
            **SETTINGS[setting],
            **options,
        )
        texts += [row.ids[:3] for row in result.rows]
    return texts


def follows(texts: list[tuple[int, ...]], joint: Tensor) -> bool:
    """Whether the distances for 1, 2 and 3 tokens are those of 999 of 1,000 true samples of that size, or less."""
    n = len(texts)
    simulated = true_shares(joint, n, 1000)
    seen = (torch.tensor(texts) @ torch.tensor([VOCAB**2, VOCAB, 1])).bincount(minlength=len(joint)).double() / n
    for size in (1, 2, 3):
        shape = (VOCAB**size, -1)
        true = joint.unflatten(-1, shape).sum(-1)
        noise = ((simulated.unflatten(-1, shape).sum(-1) - true).abs().sum(-1) / 2).quantile(0.999)
        if (seen.unflatten(-1, shape).sum(-1) - true).abs().sum() / 2 >= noise:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("w", [0.25, 0.75, 0.999])
@pytest.mark.parametrize("setting", ["plain", "all"])
def test_SMP_05_sampling_follows_the_mix(setting: str, w: float) -> None:
    """Also over processed distributions; nothing outside the union of their supports ever comes out."""
    texts = sampled(setting, w)
    joint = mixed_distribution(setting, w)
    assert follows(texts, joint)
    assert all(joint[a * VOCAB**2 + b * VOCAB + c] > 0 for a, b, c in set(texts))
    if w == 0.25:
        assert not follows(texts, test_sampling.exact(setting))  # the comparison tells the mix from the target
    if w == 0.999:
        assert follows(texts, test_sampling.exact(setting))


@pytest.mark.slow
def test_SMP_05_block_verification_end_to_end() -> None:
    assert follows(sampled("plain", 0.5, verification="block"), mixed_distribution("plain", 0.5))


@pytest.mark.parametrize("w", [0.5, 0.25, 0.01])
def test_SMP_05_greedy_takes_the_argmax_of_the_mix(w: float) -> None:
    """Every drafted position; the token after the last drafted one is the target's own choice."""
    result = spec(G_T, X, max_new_tokens=40, assistant_model=G_D, assistant_ensemble_weight=w, **STEADY)
    consistent(result)
    assert result.lossy
    moved = 0
    for step in result.steps:
        text = torch.tensor([[*X[0].tolist(), *result.ids[: step.position - 7], *step.emitted]])
        with torch.no_grad():
            p, q = (model(text).logits[0].double().softmax(-1) for model in (G_T, G_D))
        for i, token in enumerate(step.emitted):
            at = step.position - 1 + i
            mix = w * p[at] + (1 - w) * q[at] if i < len(step.drafted) else p[at]
            assert token == int(mix.argmax()), (step, i)
            moved += int(mix.argmax()) != int(p[at].argmax())
    assert moved > 3
    assert list(result.ids) != plain(G_T, X, max_new_tokens=40)


@pytest.mark.slow
def test_SMP_05_the_smaller_the_weight_the_more_is_accepted() -> None:
    rates = [
        spec(
            G_T, X, max_new_tokens=60, assistant_model=G_D, assistant_ensemble_weight=w, **STEADY
        ).draft_acceptance_rate
        for w in (0.999, 0.5, 0.01)
    ]
    assert rates == sorted(rates)
    assert rates[-1] > 0.9 > 0.6 > rates[0]
    near = spec(G_T, X, max_new_tokens=60, assistant_model=G_D, assistant_ensemble_weight=0.9999999, **STEADY)
    assert list(near.ids) == plain(G_T, X, max_new_tokens=60)


def test_rows_are_their_single_runs() -> None:
    prompts = [X, tiny.ids(1, 3), tiny.ids(2, 12)]
    ids, mask = padded(prompts)
    how = {"assistant_model": G_D, "assistant_ensemble_weight": 0.5, "max_new_tokens": 20, **STEADY}
    many = spec(G_T, ids, attention_mask=mask, **how)
    assert [row.ids for row in many.rows] == [spec(G_T, prompt, **how).ids for prompt in prompts]


# ---------------------------------------------------------------- the mark and the distances
def test_SMP_05_the_result_says_that_it_is_lossy() -> None:
    for sample in (False, True):
        result = specnb.generate(
            G_T,
            X,
            do_sample=sample,
            seed=1,
            max_new_tokens=20,
            assistant_model=G_D,
            assistant_ensemble_weight=0.5,
            **STEADY,
        )
        assert result.lossy
        assert result.options["assistant_ensemble_weight"] == 0.5
        again = specnb.GenerationResult.from_json(result.to_json())
        assert again.lossy
        drafted = [step for step in result.steps if step.drafted]
        for step in drafted:
            assert step.distances is not None
            assert min(len(step.emitted), len(step.drafted)) <= len(step.distances) <= len(step.drafted)
            assert all(0 <= d <= 0.5 for d in step.distances)  # (1 - w) TV(p, q)
        assert all(step.distances is None for step in result.steps if not step.drafted)
    exact = spec(G_T, X, max_new_tokens=20, assistant_model=G_D, **STEADY)
    assert not exact.lossy
    assert all(step.distances is None for step in exact.steps)


def test_distances_of_a_run_are_those_of_clean_passes() -> None:
    w = 0.3
    result = spec(G_T, X, max_new_tokens=30, assistant_model=G_D, assistant_ensemble_weight=w, **STEADY)
    for step in result.steps:
        text = torch.tensor([[*X[0].tolist(), *result.ids[: step.position - 7], *step.drafted]])
        with torch.no_grad():
            p, q = (model(text).logits[0].softmax(-1) for model in (G_T, G_D))
        for i, d in enumerate(step.distances or ()):
            at = step.position - 1 + i
            assert d == pytest.approx(float((1 - w) * (p[at] - q[at]).abs().sum() / 2), abs=1e-4)


# ---------------------------------------------------------------- refusals and other drafters
@pytest.mark.parametrize("w", [0, 1, -0.5, 1.5, "half"])
def test_SMP_05_weights_outside_are_refused_by_name(w: Any) -> None:
    with no_forward(G_T, G_D), pytest.raises(ValueError, match="assistant_ensemble_weight"):
        spec(G_T, X, max_new_tokens=5, assistant_model=G_D, assistant_ensemble_weight=w)
    with pytest.raises(ValueError, match="assistant_ensemble_weight"):
        specnb.Method("draft_model", assistant_ensemble_weight=w)


def test_SMP_05_a_drafter_without_a_distribution_is_refused_by_name() -> None:
    for how in ({"prompt_lookup_num_tokens": 3}, {"method": "prompt_lookup"}, {"method": "plain"}, {}):
        with no_forward(G_T), pytest.raises(ValueError, match="assistant_ensemble_weight"):
            spec(G_T, X, max_new_tokens=5, assistant_ensemble_weight=0.05, **how)


def test_SMP_05_greedy_between_tokenizers_has_a_distribution_or_is_refused() -> None:
    """w = 0.05 is never ignored silently: the argmax of the mix over the shared tokens, or an error that names it."""
    one, two = tiny.byte_tokenizer(), tiny.sp_tokenizer()
    target, draft = tiny.llama(vocab=len(one), layers=2), tiny.llama(vocab=len(two), layers=2, seed=3)
    prompt = one("the quick brown", return_tensors="pt")["input_ids"]
    how = {"assistant_model": draft, "tokenizer": one, "assistant_tokenizer": two, "max_new_tokens": 20, **STEADY}
    result = spec(target, prompt, assistant_ensemble_weight=0.05, **how)
    assert result.lossy
    assert list(result.ids) != plain(target, prompt, max_new_tokens=20)
    assert result.draft_acceptance_rate > 0.5


def others() -> list[tuple[PreTrainedModel, dict[str, Any]]]:
    from checkpoints import gemma4_drafter, gemma4_target, mtp_model

    gemma = gemma4_target()
    return [
        (G_T, {"assistant_early_exit": 2}),
        (mtp_model("glm4_moe", 2, 2), {"use_mtp": True}),
        (gemma, {"assistant_model": gemma4_drafter(gemma)}),
    ]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["early exit", "MTP", "Gemma 4"])
def test_every_drafter_with_a_distribution_can_be_mixed(which: int) -> None:
    model, how = others()[which]
    sure = spec(model, X, max_new_tokens=30, assistant_ensemble_weight=1e-4, **how, **STEADY)
    even = spec(model, X, max_new_tokens=30, assistant_ensemble_weight=0.999999, **how, **STEADY)
    assert sure.draft_acceptance_rate > 0.8
    assert list(even.ids) == plain(model, X, max_new_tokens=30)
    sampled = specnb.generate(
        model, X, do_sample=True, seed=1, max_new_tokens=20, assistant_ensemble_weight=0.5, **how, **STEADY
    )
    assert sampled.lossy and len(sampled.ids) == 20
