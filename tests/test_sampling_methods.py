"""Sampled text follows the target's distribution with every drafter: the joint distribution of three tokens, exactly.

As in test_sampling, for drafters that read the target itself or use another tokenizer. A run's first token is the
target's own, the next ones are drafted. Mistakes seen in other implementations must not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dflash_checkpoints
import pytest
import test_sampling
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, mtp_model
from checks import STEADY, padded, true_shares
from eagle3_checkpoints import drafter_folder
from test_sampling import SETTINGS, warpers
from torch import Tensor
from transformers import PreTrainedModel

import specnb
from specnb.drafters.draft_builder import DraftBuilder
from specnb.drafters.universal import Universal

VOCAB, NEW, ROWS = 8, 3, 512
PROMPT = torch.tensor([[3, 4, 5, 6, 3, 4, 7, 3, 4]])
ONE_BY_ONE = ("Gemma 4 dense", "Gemma 4 ordered", "hybrid draft", "hybrid early exit")
RUNS = dict.fromkeys(ONE_BY_ONE, 512) | {"hybrid draft": 256, "hybrid early exit": 256}
W_ONE = tiny.word_tokenizer([f"w{i}" for i in range(5)])
W_TWO = tiny.word_tokenizer([*(f"w{i}" for i in range(3, -1, -1)), "x1", "x2"])


@cache
def target(name: str) -> PreTrainedModel:
    """A target with a distribution that is neither flat nor sharp."""
    if name.startswith("MTP"):
        return mtp_model({"MTP GLM": "glm4_moe", "MTP DeepSeek": "deepseek_v3"}[name], 2, 2, vocab=VOCAB, head=0.25)
    if name.startswith("Gemma 4"):
        return gemma4_target(vocab=VOCAB, shared=2, per_layer=8)
    if name in ("EAGLE-3", "DFlash", "DFlash 2"):
        return tiny.llama(seed=0, vocab=VOCAB, layers=3, std=0.15)
    if name.startswith("hybrid"):
        return tiny.hybrid(seed=0, vocab=VOCAB, layers=3, std=0.2)
    return tiny.llama(seed=0, vocab=VOCAB, layers=2, std=0.15)


@cache
def method(name: str) -> dict[str, Any]:
    how: dict[str, Any] = {"num_assistant_tokens": 3, **STEADY}
    if name.startswith("suffix"):
        how |= {"method": "suffix+early_exit"}
    if name.endswith("early exit"):
        return how | {"assistant_early_exit": 1}
    if name == "hybrid draft":
        return how | {"assistant_model": tiny.noisy(target(name), 0.1)}
    if name.startswith("MTP"):
        return how | {"use_mtp": True}
    if name.startswith("Gemma 4"):
        return how | {"assistant_model": gemma4_drafter(target(name), ordered="ordered" in name, spread=0.3)}
    if name == "EAGLE-3":  # it can draft six of the eight tokens
        with TemporaryDirectory() as folder:
            place = drafter_folder(Path(folder), target(name), draft=6, read=(1, 2, 3))
            return how | {"assistant_model": specnb.load_drafter(place)}
    if name.startswith("DFlash"):
        second = dflash_checkpoints.ZLAB["dflash 2"] | {"selector_top_k": 6}  # of eight tokens
        options = second if name == "DFlash 2" else {}
        with TemporaryDirectory() as folder:
            place = dflash_checkpoints.zlab(Path(folder), target(name), options, damp=1.0)
            return how | {"assistant_model": specnb.load_drafter(place)}
    draft = tiny.llama(seed=7, vocab=len(W_TWO), layers=1, std=0.15)
    return how | {"assistant_model": draft, "tokenizer": W_ONE, "assistant_tokenizer": W_TWO}


SOME = ["early exit", "MTP GLM", "EAGLE-3", "DFlash", "DFlash 2", "universal"]
TEETH = [*SOME, "Gemma 4 dense"]
NAMES = [
    *("early exit", "suffix with early exit", "MTP GLM", "MTP DeepSeek", "EAGLE-3", "DFlash", "DFlash 2", "universal"),
    *ONE_BY_ONE,
]


@cache
def exact(name: str, setting: str) -> Tensor:
    """The joint distribution `[vocab ** 3]` of three tokens, from the target's logits without any cache."""
    processors, joint, texts = warpers(SETTINGS[setting]), torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            logits = target(name)(input_ids=texts, use_cache=False).logits[:, -1].float()
        joint = (joint[:, None] * processors(texts, logits).double().softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return joint


def views(joint: Tensor) -> list[Tensor]:
    """What is compared of joint distributions `[..., vocab ** 3]`: each token by itself, neighbours, all three."""
    cube = joint.unflatten(-1, (VOCAB, VOCAB, VOCAB))
    alone = [cube.sum((-2, -1)), cube.sum((-3, -1)), cube.sum((-3, -2))]
    return [*alone, cube.sum(-1).flatten(-2), cube.sum(-3).flatten(-2), joint]


def distances(samples: list[tuple[int, ...]], joint: Tensor) -> tuple[list[float], list[float]]:
    """Total variation in each view; and what true samples of that size stay under 999 times of 1,000."""
    n = len(samples)
    simulated = true_shares(joint, n, 1000)
    codes = torch.tensor(samples) @ torch.tensor([VOCAB**2, VOCAB, 1])
    seen = codes.bincount(minlength=len(joint)).double() / n
    found = [float((a - b).abs().sum() / 2) for a, b in zip(views(seen), views(joint), strict=True)]
    noise = [(a - b).abs().sum(-1) / 2 for a, b in zip(views(simulated), views(joint), strict=True)]
    return found, [float(d.quantile(0.999)) for d in noise]


def follows(samples: list[tuple[int, ...]], joint: Tensor) -> bool:
    # 1e-9: a view with one possible outcome has no noise
    return all(d <= bound + 1e-9 for d, bound in zip(*distances(samples, joint), strict=True))


def run(name: str, setting: str, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """Texts, each with a seed of its own; tokens drafted and accepted."""
    texts: list[tuple[int, ...]] = []
    drafted = accepted = 0
    while len(texts) < RUNS.get(name, 1024):
        prompts = PROMPT.repeat(min(ROWS, RUNS.get(name, 1024) - len(texts)), 1)
        result = specnb.generate(
            target(name),
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=NEW + 1,
            seed=10**6 + len(texts),
            **{**SETTINGS[setting], **method(name), **options},
        )
        texts += [row.ids[:NEW] for row in result.rows]
        drafted, accepted = drafted + result.num_draft_tokens, accepted + result.num_accepted_draft_tokens
    return texts, drafted, accepted


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plain", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_joint_distribution_of_three_tokens(name: str, setting: str) -> None:
    texts, drafted, accepted = run(name, setting)
    assert drafted > len(texts)  # two or more a text
    assert accepted > len(texts) / 5
    assert drafted - accepted > len(texts) / 10
    joint = exact(name, setting)
    assert follows(texts, joint)
    assert all(joint[a * VOCAB**2 + b * VOCAB + c] > 0 for a, b, c in set(texts))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_joint_distribution_with_block_verification(name: str) -> None:
    assert follows(run(name, "temperature", verification="block")[0], exact(name, "temperature"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_joint_distribution_with_a_confidence_threshold_and_a_schedule(name: str) -> None:
    """The end of a draft depends on what was drawn; the output distribution must not."""
    options = {"assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "heuristic"}
    assert follows(run(name, "all", **options)[0], exact(name, "all"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["early exit", "MTP GLM"])
def test_joint_distribution_one_row_at_a_time(name: str) -> None:
    options = SETTINGS["all"] | method(name) | {"do_sample": True, "max_new_tokens": NEW + 1}
    texts = [
        specnb.generate(target(name), PROMPT, attention_mask=torch.ones_like(PROMPT), seed=s, **options).ids[:NEW]
        for s in range(150)
    ]
    assert follows(texts, exact(name, "all"))


# ---------------------------------------------------------------- teeth
def argmax_judged_as_drawn(self: DraftBuilder, logits: Tensor, *ids: Tensor | None) -> None:
    """A mistake of another Gemma 4 drafter: the best token, reported as if drawn from q."""
    ADD(self, logits, *ids)
    self.tokens[-1] = int(self.probs[-1].argmax())


def q_before_the_processors(self: DraftBuilder, logits: Tensor) -> None:
    """Drawn from the processed distribution, reported with the raw one."""
    ADD(self, logits)
    raw = torch.full_like(self.probs[-1], -torch.inf)
    raw[: len(logits)] = logits.float()
    self.probs[-1] = raw.softmax(-1)


def q_in_another_order(self: DraftBuilder, logits: Tensor) -> None:
    """A mistake of another cross-tokenizer sampler: columns paired by the order of a dictionary."""
    ADD(self, logits)
    has = self.probs[-1].nonzero()[:, 0]
    self.probs[-1][has] = self.probs[-1][has.flip(0)].clone().clamp(min=1e-6)


ADD = DraftBuilder.add
WRONG: dict[str, tuple[Callable[..., None], str]] = {
    "argmax judged as drawn": (argmax_judged_as_drawn, "plain"),
    "q before the processors": (q_before_the_processors, "temperature"),
    "q in another order": (q_in_another_order, "plain"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "name"),
    [("argmax judged as drawn", name) for name in TEETH]
    + [("q before the processors", "early exit"), ("q in another order", "universal")],
)
def test_the_comparison_catches_a_wrong_q(wrong: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add, setting = WRONG[wrong]
    monkeypatch.setattr(DraftBuilder, "add", add)
    assert not follows(run(name, setting)[0], exact(name, setting))


def test_the_comparison_catches_a_bias_of_a_tenth() -> None:
    """Texts of which one in ten is replaced by the likeliest one do not pass."""
    for name in ("early exit", "Gemma 4 dense"):
        texts, _, _ = run(name, "plain")
        joint = exact(name, "plain")
        likely = int(joint.argmax())
        favoured = (likely // VOCAB**2, likely // VOCAB % VOCAB, likely % VOCAB)
        assert not follows([favoured if i % 10 == 0 else text for i, text in enumerate(texts)], joint)


# ---------------------------------------------------------------- SMP-02 and SMP-04, as filed
@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_k": 0, "temperature": 0.6}], ids=str)
@pytest.mark.parametrize("name", ["Gemma 4 dense", "MTP GLM"])
def test_SMP_02_second_token_after_a_given_first(name: str, settings: dict[str, Any]) -> None:
    """The second token, where a draft was verified, after each of the two likeliest first ones."""
    prompts = PROMPT.repeat(400, 1)
    result = specnb.generate(
        target(name),
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        seed=9,
        max_new_tokens=4,
        **settings,
        **method(name) | {"num_assistant_tokens": 2},
    )
    firsts = [row.ids[0] for row in result.rows]
    for first in sorted(set(firsts), key=firsts.count, reverse=True)[:2]:
        text = torch.cat([PROMPT, torch.tensor([[first]])], 1)
        with torch.no_grad():
            logits = target(name)(text).logits[:, -1].float()
        p = warpers(settings)(text, logits).double().softmax(-1)[0]
        seconds = [row.ids[1] for row in result.rows if row.ids[0] == first]
        generator = torch.Generator().manual_seed(0)
        draws = torch.multinomial(p, 1000 * len(seconds), replacement=True, generator=generator).view(1000, -1)
        noise = torch.stack([(draw.bincount(minlength=VOCAB) / len(seconds) - p).abs().sum() / 2 for draw in draws])
        seen = torch.tensor(seconds).bincount(minlength=VOCAB).double() / len(seconds)
        assert (seen - p).abs().sum() / 2 < noise.quantile(0.999)


def test_SMP_04_tokens_that_only_the_target_has_stay_reachable() -> None:
    texts, _, _ = run("universal", "plain")
    alone = 3 + 4  # w4
    expected = float(exact("universal", "plain").view(VOCAB, VOCAB, VOCAB).sum((0, 2))[alone])
    seconds = [text[1] for text in texts]
    assert abs(seconds.count(alone) / len(texts) - expected) < 4 * (expected / len(texts)) ** 0.5


def test_universal_with_an_unlucky_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token table reversed, drafts are poor, but q is still what they were drawn from: the output is exact."""
    begin = Universal.__init__

    def turned(self: Universal, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.shared is not None:
            self.shared = self.shared[0], self.shared[1].flip(0)
            self.assistant_id_of = dict(zip(*(table.tolist() for table in self.shared), strict=True))

    monkeypatch.setattr(Universal, "__init__", turned)
    assert follows(run("universal", "plain")[0], exact("universal", "plain"))


# ---------------------------------------------------------------- seeds
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_whatever_ran_before(name: str) -> None:
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "attention_mask": torch.ones_like(PROMPT)} | method(
        name
    )
    first = specnb.generate(target(name), PROMPT, seed=5, **options)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    specnb.generate(target(name), PROMPT, seed=6, **options)
    again = specnb.generate(target(name), PROMPT, seed=5, **options)
    assert torch.equal(before, torch.get_rng_state())
    assert (first.ids, first.seed) == (again.ids, 5)
    assert [s.drafted for s in first.steps] == [s.drafted for s in again.steps]
    assert len({specnb.generate(target(name), PROMPT, seed=s, **options).ids for s in range(5)}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_seeds_of_their_own(name: str) -> None:
    """Row i is the single run with seed + i, at whatever length of prompt."""
    prompts = [PROMPT, PROMPT[:, 3:], PROMPT[:, 6:]]
    ids, mask = padded(prompts)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 16} | method(name)
    many = specnb.generate(target(name), ids, attention_mask=mask, seed=20, **options)
    for i, prompt in enumerate(prompts):
        alone = specnb.generate(target(name), prompt, attention_mask=torch.ones_like(prompt), seed=20 + i, **options)
        assert many.rows[i].ids == alone.ids


@pytest.mark.slow
def test_prompt_lookup_writes_what_plain_sampling_writes_with_the_same_seed() -> None:
    model = test_sampling.target()
    for setting in SETTINGS.values():
        for seed in range(4):
            given = {
                "do_sample": True,
                "max_new_tokens": 30,
                "seed": seed,
                "attention_mask": torch.ones_like(PROMPT),
                **setting,
            }
            copied = specnb.generate(model, PROMPT, method="prompt_lookup", num_assistant_tokens=4, **given)
            assert copied.ids == specnb.generate(model, PROMPT, **given).ids
            assert copied.num_draft_tokens
