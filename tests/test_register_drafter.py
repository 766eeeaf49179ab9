"""Registered drafters: they are methods everywhere, and nothing that they do can make the text wrong."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_sampling
import test_verifiers
import tiny
import torch
from checks import STEADY, consistent, padded, plain, run_cell, shell, spec
from test_sampling import follows
from torch import Tensor

import specnb
from specnb.bench import compare
from specnb.bench.reference import Reference
from specnb.call.option_types import GenerateOptions
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.schedules import Constant
from specnb.drafters.draw_check import DrawCheck
from specnb.drafters.registered import RegisteredDrafter
from specnb.drafters.registration import RESERVED
from specnb.notebook.arguments import specbench_parser, specgen_parser, specload_parser, specpanel_parser
from specnb.notebook.availability import available_methods
from specnb.notebook.magic_parser import complete
from specnb.notebook.panel import Panel
from specnb.notebook.session import Session
from specnb.options import BY_NAME, METHODS, OPTIONS, REGISTRY, all_options, method_info, method_names, options_of
from specnb.options import registered as registry

MODEL = tiny.llama()
X = tiny.ids(0, 7)
NEW = 20
STORY = "Tell me a story about a fox."


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No drafter stays registered."""
    yield
    for name in list(REGISTRY.infos):
        specnb.unregister_drafter(name)


class Repeat:
    """Proposes the last token again. The shortest drafter."""

    def __init__(self, context: specnb.DrafterContext) -> None:
        self.context = context

    def propose(self, rows: Sequence[specnb.DraftRow], max_draft_tokens: Sequence[int]) -> list[specnb.Draft]:
        return [specnb.Draft([row.ids[-1]] * k) for row, k in zip(rows, max_draft_tokens, strict=True)]


class Answer:
    """Proposes what the target will say, with a fault at some places. `asked` collects what it was asked."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], every: int = 5) -> None:
        self.texts, self.every = texts, every
        self.asked: list[tuple[int, int]] = []

    def propose(self, rows: Sequence[specnb.DraftRow], max_draft_tokens: Sequence[int]) -> list[specnb.Draft]:
        drafts = []
        for row, k in zip(rows, max_draft_tokens, strict=True):
            self.asked.append((row.index, k))
            prompt, done = row.ids[: row.prompt_length], len(row.ids) - row.prompt_length
            coming = self.texts[prompt][done : done + k]
            drafts.append(specnb.Draft([t if (done + i) % self.every else t ^ 1 for i, t in enumerate(coming)]))
        return drafts


class Table:
    """Draws from a fixed bigram table: q is what the tokens are drawn from."""

    def __init__(self, context: specnb.DrafterContext, sharpness: float = 1.0) -> None:
        size = context.vocab_size
        self.logits = sharpness * torch.randn(size, size, generator=torch.Generator().manual_seed(5))

    def propose(self, rows: Sequence[specnb.DraftRow], max_draft_tokens: Sequence[int]) -> list[specnb.Draft]:
        return [self.draft(row, k) for row, k in zip(rows, max_draft_tokens, strict=True)]

    def draft(self, row: specnb.DraftRow, k: int) -> specnb.Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        while len(tokens) < k:
            q = row.probs(self.logits[(row.ids + tuple(tokens))[-1]], tokens)
            if q is None:
                break
            tokens.append(self.pick(q, row.generator))
            probs.append(q)
        return specnb.Draft(tokens, torch.stack(probs) if probs else None)

    def pick(self, q: Tensor, generator: torch.Generator) -> int:
        return int(torch.multinomial(q, 1, generator=generator))


def use(propose: Callable[..., Any], **kwargs: Any) -> None:
    """Register `mine`, whose drafter calls `propose(rows, max_draft_tokens)`."""
    drafter = type("Mine", (), {"propose": staticmethod(propose)})
    specnb.register_drafter("mine", lambda context: drafter(), **kwargs)


def one(draft: Any) -> Callable[..., Any]:
    """A `propose` that gives each row this draft."""
    return lambda rows, most: [draft for _ in rows]


# ---------------------------------------------------------------- the text
@pytest.mark.parametrize("schedule", [None, "constant", "heuristic", "adaptive"])
def test_greedy_text_is_the_targets_own(schedule: str | None) -> None:
    want = plain(MODEL, X, max_new_tokens=NEW)
    drafter = Answer({tuple(X[0].tolist()): want})
    specnb.register_drafter("mine", lambda context: drafter)
    given = {} if schedule is None else {"num_assistant_tokens_schedule": schedule}
    found = spec(MODEL, X, method="mine", max_new_tokens=NEW, **given)
    consistent(found)
    assert list(found.ids) == want and found.method == "mine"
    assert found.num_accepted_draft_tokens > NEW / 3 and found.num_draft_tokens > found.num_accepted_draft_tokens
    assert found.options["num_assistant_tokens_schedule"] == schedule or schedule is None
    assert all(k >= 1 for _, k in drafter.asked)


def test_rows_are_drafted_for_together() -> None:
    prompts = [tiny.ids(1, 5), tiny.ids(2, 9), tiny.ids(3, 7)]
    texts = {tuple(p[0].tolist()): plain(MODEL, p, max_new_tokens=n) for p, n in zip(prompts, (NEW,) * 3, strict=True)}
    drafter = Answer(texts)
    specnb.register_drafter("mine", lambda context: drafter)
    ids, mask = padded(prompts)
    found = specnb.generate(
        MODEL, ids, attention_mask=mask, method="mine", max_new_tokens=NEW, do_sample=False, **STEADY
    )
    assert [list(row.ids) for row in found.rows] == list(texts.values())
    assert {index for index, _ in drafter.asked} == {0, 1, 2} and found.num_accepted_draft_tokens > NEW
    together = specnb.generate(  # all rows grow by the same number of tokens per step
        MODEL,
        ids,
        attention_mask=mask,
        method="mine",
        max_new_tokens=NEW,
        do_sample=False,
        output_scores=True,
        **STEADY,
    )
    assert [list(row.ids) for row in together.rows] == list(texts.values())
    assert together.num_accepted_draft_tokens > 0


def test_the_context_and_the_rows() -> None:
    seen: dict[str, Any] = {}

    class Look(Repeat):
        def propose(self, rows: Any, most: Any) -> Any:
            seen.update(context=self.context, row=rows[0], most=list(most))
            return super().propose(rows, most)

    option = specnb.Option("reach", int, 2, "how far", low=1)
    specnb.register_drafter("mine", Look, options=[option], defaults={"num_assistant_tokens": 3})
    spec(MODEL, X, method="mine", reach=4, max_new_tokens=6, eos_token_id=63, num_assistant_tokens_schedule="constant")
    context, row = seen["context"], seen["row"]
    assert context.model is MODEL and context.vocab_size == 64 and context.device == MODEL.device
    assert context.tokenizer is None and context.eos == {63} and context.sample is False
    assert context.options["reach"] == 4 and context.options["num_assistant_tokens"] == 3
    assert row.index == 0 and row.prompt_length == 7 and row.ids[:7] == tuple(X[0].tolist())
    assert row.generator.device == MODEL.device and seen["most"] in ([3], [2], [1])
    with pytest.raises(AttributeError):
        row.ids = ()
    with pytest.raises(TypeError):
        context.options["reach"] = 5
    with pytest.raises(AttributeError):
        context.sample = True


def test_generate_decoder_and_method() -> None:
    specnb.register_drafter("mine", Repeat, options=[specnb.Option("reach", int, 2, "how far", low=1)])
    want = plain(MODEL, X, max_new_tokens=NEW)
    method = specnb.Method("mine", reach=3, num_assistant_tokens=2)
    assert method.options["reach"] == 3 and method == specnb.Method("mine", num_assistant_tokens=2, reach=3)
    for how in ({"method": method}, {"method": "mine", "reach": 3}):
        found = spec(MODEL, X, max_new_tokens=NEW, **how)
        assert list(found.ids) == want and found.options["reach"] == 3 and found.option_sources["reach"] == "call"
    assert spec(MODEL, X, method="mine", max_new_tokens=4).option_sources["reach"] == "default"
    decoder = specnb.decoder(method="mine", reach=3)
    mask = torch.ones_like(X)
    MODEL.generate(X, attention_mask=mask, custom_generate=decoder, max_new_tokens=NEW, do_sample=False)
    assert list(decoder.result.ids) == want and decoder.result.options["reach"] == 3
    MODEL.generate(X, attention_mask=mask, custom_generate=decoder, reach=4, max_new_tokens=NEW, do_sample=False)
    assert list(decoder.result.ids) == want and decoder.result.options["reach"] == 4
    assert specnb.GenerationResult.from_json(found.to_json()).method == "mine"


# ---------------------------------------------------------------- sampling
def binary(text: tuple[int, ...]) -> Tensor:
    """A distribution for every text whose values float32 holds exactly."""
    generator = torch.Generator().manual_seed(hash(text) % 999_983)
    counts = (4 * torch.rand(64, generator=generator) ** 3).long().bincount(minlength=4)
    return counts[torch.randperm(4, generator=generator)].double() / 64


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_the_law_of_the_output_exactly(verification: str, threshold: float) -> None:
    """Every outcome of the drafter's draws, through the checks and the cut of the threshold, into the verifier."""
    p, k = test_verifiers.model(3, 1.5), 3
    drawn: list[int] = []

    def propose(rows: Any, most: Any) -> list[specnb.Draft]:
        return [specnb.Draft(drawn, torch.stack([binary(tuple(drawn[:i])) for i in range(k)]).float())]

    use(propose)
    options = {"assistant_confidence_threshold": threshold, "assistant_ensemble_weight": None}
    context = specnb.DrafterContext(MODEL, None, 4, torch.device("cpu"), frozenset(), True, options)
    row = Row(0, [1], 9, torch.Generator(), Processors(), Constant(k))
    out: test_verifiers.Output = {}
    lengths = set()
    for text in itertools.product(range(4), repeat=k):
        drawn[:] = text
        draft = RegisteredDrafter(method_info("mine"), context).propose([row], [9])[0]
        assert tuple(draft.tokens) == text[: len(draft.tokens)] and draft.probs is not None
        assert all(torch.equal(law.double(), binary(text[:i])) for i, law in enumerate(draft.probs))
        mass = math.prod(float(binary(text[:i])[token]) for i, token in enumerate(text))
        lengths.add(len(draft.tokens))
        for written, weight in test_verifiers.VERIFIERS[verification](p, binary, tuple(draft.tokens), "sampled"):
            test_verifiers.complete(out, p, written, mass * weight, k + 1)
    assert lengths == ({3} if threshold == 0 else {1, 2, 3})
    expected = test_verifiers.plain(p, k + 1)
    assert max(abs(out.get(text, 0.0) - mass) for text, mass in expected.items()) < 1e-12


@pytest.mark.parametrize("verification", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_joint_distribution_of_three_tokens(verification: str) -> None:
    specnb.register_drafter("mine", Table)
    how = {"method": "mine", "num_assistant_tokens": 3, "assistant_confidence_threshold": 0.1, "assistant_model": None}
    texts = test_sampling.sampled("draft_model", "all", 1024, verification=verification, **how)
    assert follows(texts, "all")


def test_the_sampled_joint_distribution_has_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator of the verifier must not be the drafter's: the draws of both would depend on each other."""
    specnb.register_drafter("mine", Table)
    monkeypatch.setattr(
        RegisteredDrafter,
        "_generator",
        lambda self, row: torch.Generator().manual_seed(row.generator.initial_seed()),
    )
    how = {"method": "mine", "num_assistant_tokens": 3, "assistant_confidence_threshold": 0, "assistant_model": None}
    assert not follows(test_sampling.sampled("draft_model", "plain", 1024, **how), "plain")


def test_without_probs_the_sampled_text_is_that_of_plain_decoding() -> None:
    """However the tokens were found: also where the drafter draws them, with its generator."""

    class Silent(Table):
        def draft(self, row: specnb.DraftRow, k: int) -> specnb.Draft:
            return specnb.Draft(super().draft(row, k).tokens)

    specnb.register_drafter("mine", Silent)
    given = {"do_sample": True, "max_new_tokens": NEW, "seed": 4, "attention_mask": torch.ones_like(X)}
    found = specnb.generate(MODEL, X, method="mine", **given)
    assert found.ids == specnb.generate(MODEL, X, method="plain", **given).ids and found.num_draft_tokens > NEW


def test_the_same_seed_gives_the_same_text() -> None:
    specnb.register_drafter("mine", Table)
    given = {"do_sample": True, "max_new_tokens": NEW, "attention_mask": torch.ones_like(X), "method": "mine"}
    first, again, other = (specnb.generate(MODEL, X, seed=seed, **given) for seed in (4, 4, 5))
    assert first.ids == again.ids != other.ids
    assert [step.drafted for step in first.steps] == [step.drafted for step in again.steps]
    assert first.options["num_assistant_tokens_schedule"] == "constant"


def test_logits_processors_reach_the_drafters_distribution() -> None:
    specnb.register_drafter("mine", Table)
    given = {"do_sample": True, "max_new_tokens": 12, "seed": 0, "attention_mask": torch.ones_like(X), "method": "mine"}
    found = specnb.generate(MODEL, X, no_repeat_ngram_size=1, top_k=0, **given)
    drafted = [token for step in found.steps for token in step.drafted]
    assert len(drafted) > 6 and not set(drafted) & set(X[0].tolist())
    sharp = specnb.generate(MODEL, X, top_k=1, **given, probabilities=True)
    assert {p for step in sharp.steps for p in step.draft_probabilities or ()} == {1.0}


def test_the_ensemble_mixes_with_probs() -> None:
    specnb.register_drafter("mine", lambda context: Table(context, 8))
    result = spec(MODEL, X, method="mine", assistant_ensemble_weight=0.1, max_new_tokens=NEW, **STEADY)
    assert result.lossy and list(result.ids) != plain(MODEL, X, max_new_tokens=NEW)
    assert any(step.distances for step in result.steps)


# ---------------------------------------------------------------- what the trace has
def test_the_trace_has_probabilities_and_the_best_tokens() -> None:
    specnb.register_drafter("mine", Table)
    given = {"do_sample": True, "max_new_tokens": 12, "seed": 0, "attention_mask": torch.ones_like(X)}
    found = specnb.generate(MODEL, X, method="mine", probabilities=True, top_logprobs=3, **given)
    drafting = [step for step in found.steps if step.drafted]
    assert drafting
    for step in drafting:
        assert step.draft_probabilities is not None and step.draft_top_logprobs is not None
        assert len(step.draft_probabilities) == len(step.draft_top_logprobs) == len(step.drafted)
        assert all(len(best) == 3 and best[0][1] >= best[1][1] for best in step.draft_top_logprobs)


@pytest.mark.parametrize("known", ["probs", "probabilities"])
def test_a_draft_ends_after_an_unlikely_token(known: str) -> None:
    def propose(rows: Any, most: Any) -> list[specnb.Draft]:
        sure = [0.9, 0.5, 0.2, 0.9, 0.9]
        q = torch.full((5, 64), 0.0)
        q[:, 0], q[:, 1] = torch.tensor(sure), 1 - torch.tensor(sure)
        if known == "probs":
            return [specnb.Draft([0] * k, q[:k]) for k in most]
        return [specnb.Draft([0] * k, probabilities=sure[:k]) for k in most]

    use(propose)
    for threshold, length in ((0.0, 5), (0.4, 3), (0.6, 2), (1.0, 1)):
        given = {"assistant_confidence_threshold": threshold, "num_assistant_tokens_schedule": "constant"}
        found = spec(MODEL, X, method="mine", num_assistant_tokens=5, max_new_tokens=12, probabilities=True, **given)
        step = found.steps[1]
        assert len(step.drafted) == length
        assert step.draft_probabilities == pytest.approx([0.9, 0.5, 0.2, 0.9, 0.9][:length])


# ---------------------------------------------------------------- faults
def law(*rows: Sequence[float]) -> Tensor:
    return torch.tensor([list(row) + [0.0] * (64 - len(row)) for row in rows])


def raising(rows: Any, most: Any) -> Any:
    table: dict[int, int] = {}
    return [specnb.Draft([table[17]]) for _ in rows]


class Stubborn(int):
    def __index__(self) -> int:
        raise TypeError("no")


FAULTS: dict[str, tuple[Any, list[str]]] = {
    "id past the vocabulary": (one(specnb.Draft([64])), ["drafted id 64", "0 to 63"]),
    "negative id": (one(specnb.Draft([-1])), ["drafted id -1"]),
    "a float": (one(specnb.Draft([1.0])), ["1.0, a float", "not a whole number"]),  # type: ignore[list-item]
    "a bool": (one(specnb.Draft([True])), ["True, a bool"]),
    "a text": (one(specnb.Draft(["fox"])), ["'fox', a str"]),  # type: ignore[list-item]
    "None as a token": (one(specnb.Draft([None])), ["None"]),  # type: ignore[list-item]
    "a float tensor": (one(specnb.Draft(torch.tensor([1.0]))), ["1.0, a float"]),  # type: ignore[arg-type]
    "a tensor of two dimensions": (one(specnb.Draft(torch.tensor([[1]]))), ["a Tensor", "list of ids"]),  # type: ignore[arg-type]
    "no list of tokens": (one(specnb.Draft(7)), ["a int", "list of ids"]),  # type: ignore[arg-type]
    "longer than asked": (one(specnb.Draft([1] * 4)), ["4 tokens", "at most 3"]),
    "too many drafts": (lambda rows, most: [specnb.Draft([1])] * 2, ["2 drafts for 1 rows"]),
    "no draft": (lambda rows, most: [], ["0 drafts for 1 rows"]),
    "a draft without its list": (lambda rows, most: specnb.Draft([1]), ["a Draft", "list"]),
    "None": (lambda rows, most: None, ["returned None", "list"]),
    "a list of ids": (one([1, 2]), ["a draft is a list", "specnb.Draft"]),
    "probs not a tensor": (one(specnb.Draft([1], [[0.5, 0.5]])), ["probs is a list"]),  # type: ignore[arg-type]
    "probs too short": (one(specnb.Draft([1, 0], law([0.5, 0.5]))), ["shape [1, 64]", "[2, 64]"]),
    "probs too narrow": (one(specnb.Draft([1], torch.ones(1, 8) / 8)), ["shape [1, 8]", "[1, 64]"]),
    "probs of one dimension": (one(specnb.Draft([1], torch.ones(64) / 64)), ["shape [64]"]),
    "probs in half precision": (one(specnb.Draft([1], law([0.5, 0.5]).bfloat16())), ["torch.bfloat16", "float32"]),
    "probs of ints": (one(specnb.Draft([1], law([0, 1]).long())), ["torch.int64"]),
    "probs elsewhere": (one(specnb.Draft([1], torch.ones(1, 64, device="meta"))), ["on meta", "on cpu"]),
    "logits": (one(specnb.Draft([1], law([0.5, 2.0, -1.5]))), ["probs[0]", "negative"]),
    "not summing to one": (one(specnb.Draft([1, 1], law([0.5, 0.5], [0.5, 0.4]))), ["probs[1] sums to 0.9"]),
    "negative": (one(specnb.Draft([1], law([-0.5, 1.5]))), ["probs[0]", "negative value -0.5"]),
    "nan": (one(specnb.Draft([1], law([float("nan"), 0.5]))), ["probs[0]", "not finite"]),
    "inf": (one(specnb.Draft([1], law([float("inf"), 0.5]))), ["probs[0]", "not finite"]),
    "not drawn from it": (one(specnb.Draft([2], law([0.5, 0.5]))), ["gives token 2 the probability 0"]),
    "probabilities too few": (one(specnb.Draft([1, 2], probabilities=[0.5])), ["probabilities are not 2 numbers"]),
    "probabilities nan": (one(specnb.Draft([1], probabilities=[float("nan")])), ["from 0 to 1"]),
    "probabilities no list": (one(specnb.Draft([1], probabilities=0.5)), ["probabilities is a float"]),  # type: ignore[arg-type]
    "an exception": (raising, ["propose raised KeyError: 17", "(line "]),
    "too few arguments": (lambda rows: [], ["propose raised TypeError"]),
}
GIVEN = {"method": "mine", "max_new_tokens": NEW, "num_assistant_tokens": 3, "attention_mask": torch.ones_like(X)}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught_and_named(name: str, sample: bool) -> None:
    """After two right drafts. What was written before is the text of plain decoding, and is kept."""
    propose, words = FAULTS[name]
    calls = itertools.count()

    def later(rows: Any, most: Any) -> Any:
        if next(calls) < 2:
            return [specnb.Draft([row.ids[-1]]) for row in rows]
        return propose(rows, most)

    use(later)
    how = {**GIVEN, "do_sample": sample, **({"seed": 1} if sample else {})}
    with pytest.raises(specnb.DrafterError) as raised:
        specnb.generate(MODEL, X, **how)
    message = str(raised.value)
    assert message.startswith("drafter 'mine': ") and "\n" not in message and message.endswith(".")
    assert all(word in message for word in words), message
    partial = raised.value.partial_result  # type: ignore[attr-defined]
    del how["num_assistant_tokens"]
    whole = specnb.generate(MODEL, X, **{**how, "method": "plain"})
    assert partial.finish_reason == "interrupted" and 3 <= len(partial.ids) < NEW
    assert whole.ids[: len(partial.ids)] == partial.ids
    consistent(partial)


def test_a_factory_that_fails_is_named_before_the_first_token() -> None:
    def factory(context: Any) -> Any:
        raise RuntimeError("no table\nhere")

    specnb.register_drafter("mine", factory)
    with pytest.raises(specnb.DrafterError, match=r"^drafter 'mine': the factory raised RuntimeError: no table here"):
        specnb.generate(MODEL, X, **GIVEN)
    specnb.register_drafter("mine", lambda context: None)
    with pytest.raises(specnb.DrafterError, match=r"'mine': the factory returned None, which has no propose"):
        specnb.generate(MODEL, X, **GIVEN)


def test_an_interrupt_stays_an_interrupt() -> None:
    def propose(rows: Any, most: Any) -> Any:
        raise KeyboardInterrupt

    use(propose)
    with pytest.raises(KeyboardInterrupt) as raised:
        specnb.generate(MODEL, X, **GIVEN)
    assert raised.value.partial_result.num_emitted_tokens == 1  # type: ignore[attr-defined]


def test_the_ensemble_needs_probs() -> None:
    use(one(specnb.Draft([1])))
    with pytest.raises(specnb.DrafterError, match=r"no probs, which assistant_ensemble_weight"):
        specnb.generate(MODEL, X, **GIVEN, assistant_ensemble_weight=0.5)


def test_a_drafter_cannot_change_the_run() -> None:
    """It changes what it is given, keeps its lists, changes them later, and seeds its generator anew."""
    kept: list[list[int]] = []

    def propose(rows: Any, most: Any) -> Any:
        for draft in kept:
            draft[:] = [1, 2, 3]
        drafts = []
        for row, k in zip(rows, most, strict=True):
            row.generator.manual_seed(0)
            drafts.append(specnb.Draft([row.ids[-1]] * k))
            kept.append(drafts[-1].tokens)
        rows.clear()
        most.clear()
        torch.manual_seed(0)
        return drafts

    use(propose)
    want = plain(MODEL, X, max_new_tokens=NEW)
    found = spec(MODEL, X, method="mine", max_new_tokens=NEW, **STEADY)
    assert list(found.ids) == want
    consistent(found)
    assert all(len(set(step.drafted)) == 1 for step in found.steps if step.drafted)
    given = {"do_sample": True, "max_new_tokens": NEW, "seed": 4, "attention_mask": torch.ones_like(X)}
    sampled = specnb.generate(MODEL, X, method="mine", **given)
    assert sampled.ids == specnb.generate(MODEL, X, method="plain", **given).ids


def test_tokens_of_other_kinds_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    for tokens in (torch.tensor([5, 6]), numpy.array([5, 6]), (5, 6), [numpy.int64(5), torch.tensor(6)], [5, 6]):
        use(lambda rows, most, tokens=tokens: [specnb.Draft(tokens[: most[0]])])
        found = spec(MODEL, X, method="mine", max_new_tokens=6, **STEADY)
        assert found.steps[1].drafted == (5, 6) and all(type(token) is int for token in found.steps[1].drafted)


# ---- tokens that were not drawn
class Best(Table):
    def pick(self, q: Tensor, generator: torch.Generator) -> int:
        return int(q.argmax())


class Choosy(Table):
    """Draws, and holds unlikely tokens back: what it proposes is not drawn from q."""

    def draft(self, row: specnb.DraftRow, k: int) -> specnb.Draft:
        draft = super().draft(row, k)
        assert draft.probs is not None
        unsure = next((i for i, t in enumerate(draft.tokens) if draft.probs[i, t] < 0.2), k)
        return draft.cut(unsure)


@pytest.mark.parametrize("kind", [Best, Choosy])
def test_tokens_that_were_not_drawn_are_found_out(kind: type[Table]) -> None:
    specnb.register_drafter("mine", lambda context: kind(context, 3))
    prompts = X.repeat(16, 1)
    given = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 60, "assistant_confidence_threshold": 0}
    with pytest.raises(specnb.DrafterError, match=r"its tokens are not drawn from its probs: \d+ of them"):
        specnb.generate(MODEL, prompts, method="mine", do_sample=True, seed=0, **given)
    greedy = specnb.generate(MODEL, X, **GIVEN, do_sample=False)  # a greedy text does not depend on them
    assert list(greedy.ids) == plain(MODEL, X, max_new_tokens=NEW)


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 6.0])
def test_draws_are_believed(sharpness: float) -> None:
    """Thousands of true draws never come near the alarm."""
    generator = torch.Generator().manual_seed(1)
    q = (sharpness * torch.randn(4000, 16, generator=generator)).softmax(-1)
    x = torch.multinomial(q, 1, generator=generator)
    check = DrawCheck()
    assert check.add(q.gather(1, x)[:, 0].tolist(), q.square().sum(-1).tolist())
    assert max(check._capital) < 10 and check.tokens == 4000
    assert not check.add(q.amax(-1).tolist(), q.square().sum(-1).tolist())


# ---------------------------------------------------------------- names and options
@pytest.mark.parametrize("name", [*METHODS, "not a name", "suffix+eagle3", "", 3])
def test_names_that_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"own methods|Python identifier"):
        specnb.register_drafter(name, Repeat)


def taken(option: Any) -> str:
    with pytest.raises(ValueError, match="drafter 'mine'") as raised:
        specnb.register_drafter("mine", Repeat, options=[option])
    assert "mine" not in method_names() and "\n" not in str(raised.value)
    return str(raised.value)


def test_options_that_are_refused() -> None:
    for name in (
        "num_assistant_tokens",
        "temperature",
        "use_mtp",
        "seed",
        "method",
        "length_penalty",
        "to_dict",
        "chat",
    ):
        assert "take another name" in taken(specnb.Option(name, int, 1, "x")), name
    assert "identifier" in taken(specnb.Option("my-option", int, 1, "x"))
    assert "default is not valid" in taken(specnb.Option("reach", int, 0, "x", low=1))
    assert "type must be" in taken(specnb.Option("reach", list, [], "x"))
    assert "must be a specnb.Option" in taken("reach")
    with pytest.raises(ValueError, match="two of its options"):
        specnb.register_drafter("mine", Repeat, options=[specnb.Option("reach", int, 1, "x")] * 2)
    with pytest.raises(ValueError, match="defaults: unknown option 'reach'"):
        specnb.register_drafter("mine", Repeat, defaults={"reach": 2})
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        specnb.register_drafter("mine", Repeat, defaults={"num_assistant_tokens": 0})
    with pytest.raises(ValueError, match="must be a function or a class"):
        specnb.register_drafter("mine", 3)  # type: ignore[arg-type]


def test_no_argument_of_ours_can_be_an_option() -> None:
    """`RESERVED` is a list; this finds what is missing in it."""
    own = {*BY_NAME, *specnb.call.method_selection.ASKED_BY, "options"}
    names = {*GenerateOptions.__annotations__}
    for function in (specnb.generate, specnb.decoder, compare):
        names |= {*inspect.signature(function).parameters}
    for parser in (specgen_parser(), specbench_parser()):
        names |= {action.dest for action in parser._actions}
    assert names - own <= RESERVED


def test_wrong_values_and_other_methods(capsys: Any) -> None:
    specnb.register_drafter("mine", Repeat, options=[specnb.Option("reach", int, 2, "how far", low=1)])
    with pytest.raises(ValueError, match=r"reach=0 is not valid: reach must be an int >= 1"):
        spec(MODEL, X, method="mine", reach=0, max_new_tokens=4)
    with pytest.raises(
        ValueError, match=r"method 'mine' has no option max_matching_ngram_size; these have it: prompt_lookup"
    ):
        spec(MODEL, X, method="mine", max_matching_ngram_size=2, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"method 'prompt_lookup' has no option reach; these have it: mine"):
        spec(MODEL, X, method="prompt_lookup", reach=2, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"reach given, but nothing drafts"):
        spec(MODEL, X, reach=2, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"draft model .* is for method 'draft_model'"):
        spec(MODEL, X, method="mine", assistant_model=tiny.noisy(MODEL, 0.1), max_new_tokens=4)
    specnb.unregister_drafter("mine")
    with pytest.raises(ValueError, match=r"unknown method 'mine'"):
        spec(MODEL, X, method="mine", max_new_tokens=4)
    with pytest.raises(ValueError, match=r"unknown registered drafter 'mine'"):
        specnb.unregister_drafter("mine")
    with pytest.raises(ValueError, match=r"specnb's own methods"):
        specnb.unregister_drafter("plain")


def test_registering_again_replaces() -> None:
    specnb.register_drafter("mine", Repeat, options=[specnb.Option("reach", int, 2, "how far")])
    specnb.register_drafter("other", Repeat)
    assert "reach" in specnb.Method("mine").options
    specnb.register_drafter("mine", Table, options=[specnb.Option("width", float, 2, "how wide")], title="Mine, again")
    assert list(specnb.Method("mine").options)[-1] == "width" and method_info("mine").title == "Mine, again"
    assert method_names() == [*METHODS, "mine", "other"]
    assert method_info("mine").help == "Draws from a fixed bigram table: q is what the tokens are drawn from"
    assert [option.name for option in all_options() if option not in OPTIONS] == ["width"]
    assert len(options_of("prompt_lookup")) == len(
        [o for o in OPTIONS if not o.methods or "prompt_lookup" in o.methods]
    )


def test_two_drafters_may_share_the_name_of_an_option() -> None:
    specnb.register_drafter("mine", Repeat, options=[specnb.Option("reach", int, 2, "how far", low=1)])
    specnb.register_drafter("other", Repeat, options=[specnb.Option("reach", int, 9, "how far back", low=5)])
    assert specnb.Method("mine", reach=1).options["reach"] == 1 and specnb.Method("other").options["reach"] == 9
    with pytest.raises(ValueError, match="reach=1"):
        specnb.Method("other", reach=1)
    assert specgen_parser().read("--method mine --reach 1")["reach"] == 1
    with pytest.raises(ValueError, match="'mine' has an option of this name and of another type"):
        specnb.register_drafter("third", Repeat, options=[specnb.Option("reach", str, "a", "how")])


def test_a_run_goes_on_while_its_drafter_is_replaced_and_removed() -> None:
    """In a thread, as the panel does it."""
    started, go = threading.Event(), threading.Event()

    def propose(rows: Any, most: Any) -> Any:
        started.set()
        assert go.wait(30)
        return [specnb.Draft([row.ids[-1]]) for row in rows]

    use(propose, options=[specnb.Option("reach", int, 2, "how far")])
    found: list[specnb.GenerationResult] = []
    thread = threading.Thread(
        target=lambda: found.append(spec(MODEL, X, method="mine", reach=3, max_new_tokens=NEW, **STEADY))
    )
    thread.start()
    assert started.wait(30)
    specnb.register_drafter("mine", Table)
    specnb.unregister_drafter("mine")
    go.set()
    thread.join(60)
    assert list(found[0].ids) == plain(MODEL, X, max_new_tokens=NEW) and found[0].options["reach"] == 3


# ---------------------------------------------------------------- packages
@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., registry.Registry]:
    """Installs distributions with entry points into a folder on the path; a new registry finds them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**code: str) -> registry.Registry:
        for name, text in code.items():
            (tmp_path / f"{name}.py").write_text(text)
            info = tmp_path / f"{name.replace('_', '-')}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[specnb.drafters]\n{name} = {name}:register\n")
        fresh = registry.Registry()
        for module in ("specnb.options.methods", "specnb.drafters.registration", "specnb.options"):
            monkeypatch.setattr(f"{module}.REGISTRY", fresh)
        return fresh

    return install


PACKAGE = '''
import specnb

class Again:
    """Proposes the last token, once."""
    def __init__(self, context):
        pass
    def propose(self, rows, most):
        return [specnb.Draft([row.ids[-1]]) for row in rows]

def register():
    specnb.register_drafter("packaged", Again, options=[specnb.Option("reach", int, 2, "how far")])
'''


def test_an_installed_package_brings_a_drafter(installed: Any) -> None:
    fresh = installed(own_package=PACKAGE)
    assert method_names()[-1] == "packaged" and not fresh.failed
    assert list(spec(MODEL, X, method="packaged", reach=1, max_new_tokens=NEW).ids) == plain(
        MODEL, X, max_new_tokens=NEW
    )


def test_a_session_replaces_what_a_package_brought(installed: Any) -> None:
    installed(own_package=PACKAGE)
    specnb.register_drafter("packaged", Table)  # before anything was looked up
    assert method_info("packaged").factory is Table
    specnb.unregister_drafter("packaged")
    assert "packaged" not in method_names()


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_packages_that_fail_are_named(installed: Any) -> None:
    fresh = installed(a_package=PACKAGE, b_package=PACKAGE, broken_package="import nonsense_that_is_not_there")
    with pytest.warns(RuntimeWarning, match="could not be loaded") as seen:
        names = method_names()
    assert names == [*METHODS, "packaged"] and len(seen) == 2
    assert "a-package's already" in fresh.failed["b_package"] and "nonsense" in fresh.failed["broken_package"]
    with pytest.raises(ValueError, match=r"unknown method 'mine'.*'broken_package' could not be loaded from broken-"):
        specnb.Method("mine")


# ---------------------------------------------------------------- the notebook and comparisons
REACH = specnb.Option("reach", int, 2, "how far", low=1, slider=(1, 9))
WAY = specnb.Option("way", str, "last", "which token", choices=("last", "first"))
LOUD = specnb.Option("loud", bool, False, "whether to shout")
SHARE = specnb.Option("share", float, 0.5, "how much", low=0, high=1)
PATH = specnb.Option("table", str, "words", "where the table is")


def register_with_options() -> None:
    specnb.register_drafter(
        "mine",
        Repeat,
        title="My drafter",
        help="repeats the last token",
        options=[REACH, WAY, LOUD, SHARE, PATH],
        defaults={"num_assistant_tokens": 3},
        source="a test",
    )


@pytest.fixture
def ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with shell(tmp_path, monkeypatch) as made:
        made.run_line_magic("specload", "tiny-llama")
        yield made


def test_specgen(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also after the extension was loaded, and registered in a cell that runs twice."""
    code = "import specnb\nfrom test_register_drafter import register_with_options\nregister_with_options()"
    assert run_cell(ip, code) == run_cell(ip, code) == ""
    line = "--method mine --reach 3 --way=first --loud --share .25 --table='a b' --max-new-tokens 12 -q -o run"
    assert run_cell(ip, f"%%specgen {line}\n{STORY}") == ""
    options = ip.user_ns["run"].options
    assert [options[name] for name in ("reach", "way", "loud", "share", "table")] == [3, "first", True, 0.25, "a b"]
    assert options["num_assistant_tokens"] == 3
    capsys.readouterr()
    assert run_cell(ip, "%specgen -h") == ""
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--reach N how far; default 2 [mine]" in shown and "universal, mine, or a lookup with a model drafter" in shown
    )
    assert "tokens drafted per step" in shown and "mine: 3" in shown
    assert "'0' is not valid: it must be an int >= 1" in run_cell(ip, f"%%specgen --method mine --reach 0\n{STORY}")
    assert "Did you mean '--reach'" in run_cell(ip, f"%%specgen --method mine --reac 3\n{STORY}")
    assert run_cell(ip, "%config SpecMagics.method = 'mine'") == ""
    assert run_cell(ip, f"%%specgen -q --max-new-tokens 4 -o run\n{STORY}") == "" and ip.user_ns["run"].method == "mine"
    specnb.unregister_drafter("mine")
    assert "unknown option '--reach'" in run_cell(ip, f"%%specgen --reach 3\n{STORY}")
    assert "unknown method 'mine'" in run_cell(ip, f"%%specgen --method mine\n{STORY}")


def test_specgen_keeps_the_text_until_a_fault(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    calls = itertools.count()
    use(lambda rows, most: [specnb.Draft([row.ids[-1] if next(calls) < 5 else -7]) for row in rows])
    said = run_cell(ip, f"%%specgen --method mine --num-assistant-tokens 1 --max-new-tokens 30 -o run\n{STORY}")
    assert said == "UsageError: drafter 'mine': it drafted id -7, but the target's ids are 0 to 1023."
    assert 5 <= len(ip.user_ns["run"].ids) < 30 and ip.user_ns["_specgen"] is ip.user_ns["run"]
    assert ip.user_ns["run"].text.split()[0] in capsys.readouterr().out


def test_completion() -> None:
    register_with_options()
    parser = specgen_parser()
    assert "mine" in complete(parser, "%%specgen --method ", "", [])
    assert complete(parser, "%%specgen --method mine --rea", "--rea", []) == ["--reach"]
    assert complete(parser, "%%specgen --method mine --way ", "", []) == ["last", "first"]


def test_bench(ip: Any) -> None:
    register_with_options()
    line = "--reach 3 --repeats 1 --max-new-tokens 8 -q --transformers"
    assert run_cell(ip, f"%%specbench {line}\n{STORY}") == ""
    rows = {row.label: row for row in ip.user_ns["_specbench"].rows}
    assert list(rows) == ["plain", "prompt_lookup", "suffix", "mine, reach=3"] and all(
        row.same_text for row in rows.values()
    )
    assert rows["mine, reach=3"].own_ratio is None
    assert run_cell(ip, f"%%specbench mine --vary reach=1-3 --repeats 1 --max-new-tokens 8 -q\n{STORY}") == ""
    found = ip.user_ns["_specbench"]
    assert found.varied_option == "reach" and [row.options.get("reach") for row in found.rows] == [None, 1, 2, 3]
    assert "unknown option 'wide'" in run_cell(ip, f"%%specbench mine --vary wide=1\n{STORY}")
    with pytest.raises(ValueError, match="does not have this drafter"):
        Reference(MODEL, {}).reference_arguments({"method": "mine"})


def test_panel() -> None:
    register_with_options()
    pair = specnb.load("tiny-llama")
    assert available_methods(pair)["mine"] is None
    panel = Panel(pair, session=Session(), thread=False)
    assert ("My drafter", "mine") in panel._form.method.options and (
        "My drafter",
        "mine",
    ) in panel._compare.methods.options
    panel.set(method="mine", prompt=STORY, max_new_tokens=10, reach=4, way="first", loud=True, share=0.3, table="x")
    assert "My drafter: repeats the last token. a test." in panel._form.about.value
    assert panel._form.drafting_controls("mine").by_name["num_assistant_tokens"].initial == 3
    assert panel.run(wait=True) and panel.result is not None and panel.result.options["reach"] == 4
    assert "reach=4" in panel._python.value and "--reach=4" in panel._magic.value and "--loud" in panel._magic.value
    # registered again in a cell while the panel is open: other options, then gone
    specnb.register_drafter("mine", Repeat, title="New title", options=[specnb.Option("width", int, 1, "how wide")])
    assert panel._form.method.value == "mine" and ("New title", "mine") in panel._form.method.options
    assert "width" in panel._form.drafting_controls("mine").by_name and "width" in panel._compare.option.options
    assert panel.options["method"] == "mine" and "reach" not in panel.options
    specnb.register_drafter("second", Repeat)
    assert ("Second", "second") in panel._form.method.options
    specnb.unregister_drafter("mine")
    assert panel._form.method.value == "prompt_lookup" and "mine" not in panel._form.reasons
    panel.close()


def test_compare() -> None:
    register_with_options()
    pair = specnb.load("tiny-llama")
    found = compare(pair, STORY, ["mine", specnb.Method("mine", reach=5)], repeats=1, max_new_tokens=8)
    assert [row.label for row in found.rows] == ["plain", "mine", "mine, reach=5"]
    assert all(row.same_text for row in found.rows)


def test_specpanel_and_specload_have_no_method_options() -> None:
    register_with_options()
    assert "--reach" not in specpanel_parser().flags and "--reach" not in specload_parser().flags
