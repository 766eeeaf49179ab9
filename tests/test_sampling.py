"""Sampled text follows the target's distribution: the joint distribution of three tokens, enumerated exactly.

A run's tokens are compared with the distribution that transformers' own warpers make of the model's logits. The measure
is total variation. The bound is the distance that 999 of 1,000 equally large samples of that distribution stay under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from checks import spec, true_shares
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

import specnb
from specnb.decoding import verifiers
from specnb.decoding.contracts import Draft, VerifiedToken
from specnb.decoding.distributions import BlockDistributions
from specnb.drafters import draft_model

VOCAB, NEW = 8, 3
PROMPT = torch.tensor([[3, 4, 5, 6, 3, 4, 7, 3, 4]])  # prompt lookup has something to copy
RUNS, ROWS = 3072, 512

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.5, "top_k": 0},
    "hot": {"temperature": 1.5, "top_k": 0},
    "top-k": {"temperature": 0.9, "top_k": 4},
    "top-p": {"temperature": 0.8, "top_p": 0.8, "top_k": 0},
    "all": {"temperature": 1.3, "top_p": 0.9, "top_k": 6},
}


@cache
def target() -> PreTrainedModel:
    return tiny.llama(seed=0, vocab=VOCAB, layers=1, std=0.15)


@cache
def draft() -> PreTrainedModel:
    return tiny.llama(seed=7, vocab=VOCAB, layers=1, std=0.15)


def method(name: str, k: int = 4) -> dict[str, Any]:
    """The options that choose a method drafting k tokens."""
    if name == "prompt_lookup":
        return {"method": name, "num_assistant_tokens": k}
    return {"assistant_model": draft(), "num_assistant_tokens": k, "assistant_confidence_threshold": 0}


def warpers(settings: dict[str, Any]) -> LogitsProcessorList:
    """transformers' warpers in its order."""
    made = LogitsProcessorList()
    if settings.get("temperature", 1) != 1:
        made.append(logits_process.TemperatureLogitsWarper(settings["temperature"]))
    if settings.get("top_k"):
        made.append(logits_process.TopKLogitsWarper(settings["top_k"]))
    if settings.get("top_p", 1) < 1:
        made.append(logits_process.TopPLogitsWarper(settings["top_p"]))
    return made


@cache
def exact(setting: str) -> Tensor:
    """The joint distribution `[vocab ** 3]` of three tokens, from the target's logits without any cache."""
    processors, joint = warpers(SETTINGS[setting]), torch.ones(1, dtype=torch.float64)
    texts = PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            logits = target()(input_ids=texts, use_cache=False).logits[:, -1].float()
        joint = (joint[:, None] * processors(texts, logits).double().softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return joint


def marginals(joint: Tensor) -> list[Tensor]:
    """The distributions of the first 1, 2 and 3 tokens; `joint` is `[..., vocab ** 3]`."""
    return [joint.unflatten(-1, (VOCAB**n, -1)).sum(-1) for n in (1, 2, 3)]


@cache
def noise(setting: str, runs: int) -> list[float]:
    """For 1, 2 and 3 tokens: the total variation that a true sample of `runs` exceeds in 1 of 1,000 cases."""
    joint = exact(setting)
    simulated = true_shares(joint, runs, 2000)
    distances = [(s - p).abs().sum(-1) / 2 for s, p in zip(marginals(simulated), marginals(joint), strict=True)]
    return [float(d.quantile(0.999)) for d in distances]


def total_variations(samples: list[tuple[int, ...]], setting: str) -> list[float]:
    code = torch.tensor(samples) @ torch.tensor([VOCAB**2, VOCAB, 1])
    empirical = code.bincount(minlength=VOCAB**NEW).double() / len(samples)
    return [
        float((e - p).abs().sum() / 2) for e, p in zip(marginals(empirical), marginals(exact(setting)), strict=True)
    ]


def follows(samples: list[tuple[int, ...]], setting: str) -> bool:
    """Whether samples are within noise of the target's distribution."""
    bounds = noise(setting, len(samples))
    return all(d < bound for d, bound in zip(total_variations(samples, setting), bounds, strict=True))


def sampled(name: str, setting: str, runs: int = RUNS, **options: Any) -> list[tuple[int, ...]]:
    """`runs` texts of three tokens through specnb.generate, `ROWS` rows at a time, each with a seed of its own."""
    texts: list[tuple[int, ...]] = []
    while len(texts) < runs:
        prompts = PROMPT.repeat(min(ROWS, runs - len(texts)), 1)
        result = specnb.generate(
            target(),
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=NEW,
            seed=10**6 + len(texts),
            **SETTINGS[setting],
            **(method(name) | options),
        )
        texts += [row.ids for row in result.rows]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup"])
def test_joint_distribution_of_three_tokens(name: str, setting: str, verification: str) -> None:
    assert follows(sampled(name, setting, verification=verification), setting)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_joint_distribution_with_short_drafts(k: int) -> None:
    assert follows(sampled("draft_model", "all", num_assistant_tokens=k), "all")


@pytest.mark.slow
def test_joint_distribution_with_a_confidence_threshold() -> None:
    """The end of a draft depends on what was drawn; the output distribution must not."""
    for verification in ("token", "block"):
        texts = sampled("draft_model", "plain", assistant_confidence_threshold=0.3, verification=verification)
        assert follows(texts, "plain")


@pytest.mark.slow
def test_joint_distribution_with_a_prefix_dependent_processor() -> None:
    """A processor that looks at the text sees the right prefix at every drafted position."""
    banned = {"no_repeat_ngram_size": 1}  # no token of the prompt or of the text again: 0, 1, 2 remain
    with torch.no_grad():
        expected: dict[tuple[int, ...], float] = {}
        for a in range(3):
            for b in {0, 1, 2} - {a}:
                weight = 1.0
                for text, token in (((), a), ((a,), b)):
                    prompt = torch.cat([PROMPT, torch.tensor([text], dtype=torch.long)], 1)
                    logits = target()(input_ids=prompt).logits[0, -1].double()
                    logits[[t for t in range(VOCAB) if t > 2 or t in text]] = -torch.inf
                    weight *= float(logits.softmax(-1)[token])
                expected[(a, b, ({0, 1, 2} - {a, b}).pop())] = weight
    for name in ("draft_model", "prompt_lookup"):
        texts = sampled(name, "plain", 3072, **banned)
        distance = sum(abs(texts.count(text) / len(texts) - mass) for text, mass in expected.items()) / 2
        assert set(texts) <= set(expected)
        assert distance < 0.03  # 4 standard errors of six outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup"])
def test_joint_distribution_row_by_row(name: str) -> None:
    """One row at a time, the path that a single prompt takes."""
    options = SETTINGS["all"] | method(name, 3) | {"do_sample": True, "max_new_tokens": NEW}
    texts = [
        specnb.generate(target(), PROMPT, attention_mask=torch.ones_like(PROMPT), seed=s, **options).ids
        for s in range(600)
    ]
    assert follows(texts, "all")


# ---------------------------------------------------------------- teeth
def p_itself(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    return p


def accept_all(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    return torch.ones(())


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "a correction drawn from p": ("residual", p_itself),
    "every draft accepted": ("acceptance", accept_all),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_catches_wrong_verifiers(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, replacement = WRONG[wrong]
    monkeypatch.setattr(verifiers, function, replacement)
    assert not follows(sampled("draft_model", "plain"), "plain")


@pytest.mark.parametrize("wrong", ["every copy accepted", "accepted by p, corrected from p"])
def test_the_comparison_catches_wrong_verifiers_for_copies(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def verifier(block: BlockDistributions, draft: Draft, generator: torch.Generator) -> Iterator[VerifiedToken]:
        for i, x in enumerate(draft.tokens):
            p = block.target_probs(i)
            accepted = wrong == "every copy accepted" or bool(torch.rand((), generator=generator) < p[x])
            yield VerifiedToken(x if accepted else verifiers.draw(p, generator), accepted)
            if not accepted:
                return
        yield VerifiedToken(verifiers.draw(block.target_probs(len(draft.tokens)), generator), False)

    monkeypatch.setitem(verifiers.VERIFIERS, "token", verifier)
    assert not follows(sampled("prompt_lookup", "plain"), "plain")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["argmax judged as sampled", "another distribution reported"])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_comparison_catches_drafts_with_a_wrong_distribution(
    wrong: str, verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = draft_model.DraftModel.propose

    def argmax(self: Any, rows: Any, k: Any) -> Any:
        drafts = propose(self, rows, [min(1, n) for n in k])
        return [d._replace(tokens=[int(d.probs[0].argmax())]) if d.probs is not None else d for d in drafts]

    def flatter(self: Any, rows: Any, k: Any) -> Any:
        drafts = propose(self, rows, k)
        return [
            d if d.probs is None else d._replace(probs=d.probs.sqrt() / d.probs.sqrt().sum(-1, True)) for d in drafts
        ]

    monkeypatch.setattr(draft_model.DraftModel, "propose", argmax if wrong.startswith("argmax") else flatter)
    assert not follows(sampled("draft_model", "temperature", verification=verification), "temperature")


def test_a_perfect_draft_is_never_rejected() -> None:
    for verification in ("token", "block"):
        result = specnb.generate(
            target(),
            PROMPT,
            assistant_model=tiny.noisy(target(), 0),
            assistant_confidence_threshold=0,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            max_new_tokens=60,
            seed=4,
            verification=verification,
        )
        assert result.num_accepted_draft_tokens == result.num_draft_tokens > 40


# ---------------------------------------------------------------- seeds
def one(name: str, seed: int | None, **options: Any) -> specnb.GenerationResult:
    given = {"do_sample": True, "max_new_tokens": 25, "top_k": 0, "attention_mask": torch.ones_like(PROMPT)} | method(
        name
    )
    return specnb.generate(target(), PROMPT, seed=seed, **given | options)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup"])
def test_a_seed_decides_whatever_ran_before(name: str, verification: str) -> None:
    first = one(name, 5, verification=verification)
    torch.manual_seed(99)
    torch.rand(7)
    one("prompt_lookup", 6)
    spec(target(), PROMPT, max_new_tokens=9, **method("draft_model"))
    again = one(name, 5, verification=verification)
    assert (first.ids, first.seed) == (again.ids, 5)
    assert [s.drafted for s in first.steps] == [s.drafted for s in again.steps]
    assert len({one(name, seed, verification=verification).ids for seed in range(5)}) == 5


@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup"])
def test_the_global_generator_is_left_alone(name: str) -> None:
    for seed in (3, None):
        torch.manual_seed(1234)
        before = torch.get_rng_state()
        one(name, seed)
        assert torch.equal(before, torch.get_rng_state())


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    runs = [one("draft_model", None) for _ in range(4)]
    assert len({run.seed for run in runs}) == 4
    assert one("draft_model", runs[0].seed).ids == runs[0].ids
    greedy = spec(target(), PROMPT, max_new_tokens=3, **method("draft_model"))
    assert greedy.seed is None


def test_rows_have_seeds_of_their_own() -> None:
    """Row i is the single run with seed + i."""
    prompts = PROMPT.repeat(3, 1)
    many = specnb.generate(
        target(),
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=25,
        top_k=0,
        seed=20,
        **method("draft_model"),
    )
    assert [row.ids for row in many.rows] == [one("draft_model", 20 + i).ids for i in range(3)]


def test_tiny_temperature_is_greedy() -> None:
    greedy = spec(target(), PROMPT, max_new_tokens=20, method="prompt_lookup").ids
    for name in ("draft_model", "prompt_lookup"):
        for verification in ("token", "block"):
            assert one(name, 1, temperature=1e-6, max_new_tokens=20, verification=verification).ids == greedy
