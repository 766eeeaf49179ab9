"""Cases PR and SC: processors and criteria see what transformers' generate() shows them, once per token, in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, consistent, no_forward, plain, spec
from test_sampling_methods import NEW, PROMPT, VOCAB, follows
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import logits_process as of
from transformers.generation.stopping_criteria import ConfidenceCriteria

import specnb
from specnb.trace import GenerationResult

T = tiny.llama()
D = tiny.noisy(T, 0.03)
TOKENIZER = tiny.byte_tokenizer()
X = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(X)
PADDED = MASK.clone()
PADDED[0, :3] = 0
PADDED[2, :5] = 0
PAD_IDS = X.masked_fill(PADDED == 0, 0)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "draft": {"assistant_model": D, "num_assistant_tokens": 4, **EAGER},
    "perfect draft": {"assistant_model": tiny.noisy(T, 0), "num_assistant_tokens": 4, **EAGER},
    "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
    "early exit": {"assistant_early_exit": 2, **EAGER},
}
ROWS = {
    "one": (X[:1], MASK[:1]),
    "one, padded": (PAD_IDS[:1], PADDED[:1]),
    "one, padded with another id": (X[:1], PADDED[:1]),
    "rows": (X, MASK),
    "padded rows": (PAD_IDS, PADDED),
}


class Bias(LogitsProcessor):
    """A bias of its own for each row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        signs = torch.tensor([[1.0], [-1.0], [0.5]])[: len(scores)]
        return scores + signs * torch.linspace(-9, 9, scores.shape[1])


class Budget(LogitsProcessor):
    """Counts from the prompt's padded length, as users write it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] - 7 == 4:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 9] = 0
        return scores


class Counting(LogitsProcessor):
    """Raises other tokens at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % 7 :: 7] += 3  # in place, as some do
        return scores


class Memory(LogitsProcessor):
    """Adds what it saw of each row before."""

    last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        out = scores if self.last is None else scores + 0.3 * self.last
        self.last = scores.clone()
        return out


class OfPadding(LogitsProcessor):
    """Reads the padding."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (input_ids == 0).sum(1, keepdim=True) * torch.linspace(-0.5, 0.5, scores.shape[1])


class Watching(LogitsProcessor):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.tolist(), scores.clone()))
        return scores


def synth_id() -> LogitsProcessor:
    return of.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[1, 2, 3],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=16,
        device="cpu",
    )


def allowed(batch_id: int, ids: Tensor) -> list[int]:
    return [[3, 4, 5, int(ids[-1])], [40, 41, 42], [50, int(ids[0])]][batch_id]


def processors(*makers: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"logits_processor": LogitsProcessorList([make() for make in makers])}


EOS = plain(T, X[:1], max_new_tokens=12)[5]
PROCESSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "a bias per row": processors(Bias),
    "a budget": processors(Budget),
    "a count of calls": processors(Counting),
    "a memory": processors(Memory),
    "of the padding": processors(OfPadding),
    "SynthID": processors(synth_id),
    "several": processors(
        lambda: of.RepetitionPenaltyLogitsProcessor(1.3), Memory, lambda: of.TopKLogitsWarper(9), Bias
    ),
    "prefix function": lambda: {"prefix_allowed_tokens_fn": allowed},
    "repetition penalty": lambda: {"repetition_penalty": 1.4},
    "repetition penalty behind the prompt": processors(
        lambda: of.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=7)
    ),
    "no repeated n-gram": lambda: {"no_repeat_ngram_size": 2},
    "encoder repetition penalty": lambda: {"encoder_repetition_penalty": 1.5},
    "encoder n-grams": lambda: {"encoder_no_repeat_ngram_size": 2},
    "minimum length": lambda: {"min_length": 14, "eos_token_id": EOS},
    "minimum of new tokens": lambda: {"min_new_tokens": 8, "eos_token_id": EOS},
    "forced end": lambda: {"forced_eos_token_id": 9, "eos_token_id": 9},
    "forced begin": lambda: {"forced_bos_token_id": 9},
    "decay": lambda: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": EOS},
    "suppressed at the begin": lambda: {"begin_suppress_tokens": plain(T, X[:1], max_new_tokens=1)},
    "bad words": lambda: {"bad_words_ids": [[EOS], [8, 9]]},
    "a bias of sequences": lambda: {"sequence_bias": [[[EOS], -9.0], [[13], 4.0]]},
    "watermark": lambda: {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=1)
    },
    "an end": lambda: {"eos_token_id": EOS},
}


def in_every_way(options: Callable[[], dict[str, Any]], ids: Tensor, mask: Tensor) -> dict[str, GenerationResult]:
    """Ours in every way, after checking that the text is transformers' own."""
    want = T.generate(ids, do_sample=False, attention_mask=mask, max_new_tokens=12, **options()).tolist()
    found = {}
    for way, how in WAYS.items():
        found[way] = spec(T, ids, attention_mask=mask, max_new_tokens=12, **options(), **how)
        assert found[way].sequences.tolist() == want, way
    return found


def same(options: Callable[[], dict[str, Any]], ids: Tensor, mask: Tensor, way: str, new: int = 12) -> GenerationResult:
    """Ours, after checking that its text is transformers' own, whatever is in it."""
    given = {"attention_mask": mask, "max_new_tokens": new}
    want = T.generate(ids, do_sample=False, **given, **options())
    result = spec(T, ids, **given, **options(), **WAYS[way])
    assert result.sequences.tolist() == want.tolist()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_PR_processors_of_all_kinds(name: str, rows: str) -> None:
    in_every_way(PROCESSORS[name], *ROWS[rows])
    if name != "an end":
        in_every_way(lambda: PROCESSORS[name]() | PROCESSORS["an end"](), *ROWS[rows])


def test_PR_01_prefix_function_gets_the_row() -> None:
    for result in in_every_way(PROCESSORS["prefix function"], *ROWS["padded rows"]).values():
        assert set(result.rows[1].ids) <= {40, 41, 42}


def test_PR_02_a_bias_per_row() -> None:
    in_every_way(PROCESSORS["a bias per row"], X[:2], MASK[:2])


def test_PR_03_a_budget_counted_from_the_padded_length() -> None:
    for result in in_every_way(PROCESSORS["a budget"], *ROWS["one, padded"]).values():
        assert result.ids[4] == 9


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_PR_what_a_processor_is_shown(way: str, rows: str, ends: bool) -> None:
    """Padded ids and the scores of all rows, also of those that have ended: as often, in the same order."""
    ids, mask = ROWS[rows]
    given = {"attention_mask": mask, "max_new_tokens": 12} | ({"eos_token_id": EOS} if ends else {})
    theirs, ours = Watching(), Watching()
    T.generate(ids, do_sample=False, logits_processor=LogitsProcessorList([theirs]), **given)
    result = spec(T, ids, logits_processor=LogitsProcessorList([ours]), **given, **WAYS[way])
    assert [ids for ids, _ in ours.seen] == [ids for ids, _ in theirs.seen]
    for (_, a), (_, b) in zip(ours.seen, theirs.seen, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    if way == "perfect draft" and not ends:
        assert result.target_passes < 6  # rows that grow in step still draft


@pytest.mark.slow
def test_PR_a_row_that_ended_is_in_no_step() -> None:
    given = {"eos_token_id": EOS, "max_new_tokens": 12, "attention_mask": MASK}
    for way in WAYS:
        result = spec(T, X, logits_processor=LogitsProcessorList([Watching()]), **given, **WAYS[way])
        for row, prompt in zip(result.rows, X, strict=True):
            assert list(row.ids) == plain(T, prompt[None], max_new_tokens=12, eos_token_id=EOS)
            assert row.ids == tuple(token for step in row.steps for token in step.emitted)
        assert result.rows[0].finish_reason == "eos"


def test_PR_another_shape_is_refused_by_name() -> None:
    class Wide(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores[:, :5]

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            scores[:] = 0

    class First(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores[:1]

    for kind in (Wide, Nothing, First):
        ids, mask = ROWS["rows"]
        with pytest.raises(ValueError, match=f"{kind.__name__} .* same shape") as caught:
            spec(T, ids, attention_mask=mask, max_new_tokens=4, logits_processor=LogitsProcessorList([kind()]))
        assert caught.value.partial_result.num_emitted_tokens == 0  # type: ignore[attr-defined]


def test_PR_block_verification_refuses_what_looks_at_all_rows() -> None:
    for name in ("a bias per row", "SynthID", "prefix function"):
        with no_forward(T, D), pytest.raises(ValueError, match="verification='block'"):
            specnb.generate(
                T,
                X,
                attention_mask=MASK,
                do_sample=True,
                max_new_tokens=4,
                verification="block",
                **PROCESSORS[name](),
                **WAYS["draft"],
            )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["draft", "lookup", "block"])
def test_PR_sampled_rows_that_grow_in_step_follow_the_distribution(how: str) -> None:
    """A draft that another row cuts short does not change the joint distribution of three tokens."""
    model = tiny.llama(seed=0, vocab=VOCAB, layers=1, std=0.15)
    draft = tiny.llama(seed=7, vocab=VOCAB, layers=1, std=0.15)
    ways: dict[str, dict[str, Any]] = {
        "draft": {"assistant_model": draft, "num_assistant_tokens": 3, **EAGER},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "block": {"assistant_model": draft, "num_assistant_tokens": 3, "verification": "block", **EAGER},
    }
    own: dict[str, Any] = {"output_scores": True}  # either makes rows grow in step
    if how != "block":
        own = {"logits_processor": LogitsProcessorList([Watching()])}
    joint, texts = torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            p = model(input_ids=texts, use_cache=False).logits[:, -1].double().softmax(-1)
        joint = (joint[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    prompts, samples, accepted, cut = PROMPT.repeat(3, 1), [], 0, 0
    for run in range(340):
        result = specnb.generate(
            model,
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW + 1,
            seed=3 * run,
            **own,
            **ways[how],
        )
        samples += [row.ids[:NEW] for row in result.rows]
        accepted += result.num_accepted_draft_tokens
        cut += sum(len(step.emitted) == step.accepted for step in result.steps)
    assert accepted > 40
    assert cut > 10  # rows that another one cut short
    assert follows(samples, joint)


# ---------------------------------------------------------------- criteria
class Done(StoppingCriteria):
    """Ends all rows when each has had its token; a state per row."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.done = tokens, [False] * len(tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for i, done in enumerate(self.done):
            self.done[i] = done or self.tokens[i] in input_ids[:, 7:].tolist()[i]
        return torch.full((len(input_ids),), all(self.done))


class Each(StoppingCriteria):
    """Ends each row at its own token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.tokens[: len(input_ids)]


class Calls(StoppingCriteria):
    """Ends all rows at the n-th call, and says so with a bool."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        self.left -= 1
        return self.left <= 0


class Listening(StoppingCriteria):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        self.seen.append((input_ids.tolist(), None if scores is None else [tuple(s.shape) for s in scores]))
        return False


FREE = [plain(T, row[None], max_new_tokens=12) for row in X]
CRITERIA: dict[str, Callable[[int], Any]] = {
    "all rows done": lambda i: Done([row[(i + r) % 12] for r, row in enumerate(FREE)]),
    "each row": lambda i: Each([row[(i + 3 * r) % 12] for r, row in enumerate(FREE)]),
    "calls": lambda i: Calls(i + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CRITERIA)
def test_SC_01_criteria_of_all_kinds(name: str, rows: str) -> None:
    ids, mask = ROWS[rows]
    for i in range(0, 12, 3):
        tokens = [row[(i + r) % 12] for r, row in enumerate(FREE[: len(ids)])]

        def criteria(i: int = i, tokens: list[int] = tokens) -> dict[str, Any]:
            one = Done(tokens) if name == "all rows done" else CRITERIA[name](i)
            return {"stopping_criteria": StoppingCriteriaList([one])}

        for result in in_every_way(criteria, ids, mask).values():
            assert {row.finish_reason for row in result.rows} <= {"stopping_criteria", "length"}
        in_every_way(lambda criteria=criteria: criteria() | {"eos_token_id": EOS}, ids, mask)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_SC_01_what_a_criterion_is_shown(rows: str, shown: bool) -> None:
    ids, mask = ROWS[rows]
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 9, "eos_token_id": EOS}
    if shown:
        given |= {"return_dict_in_generate": True, "output_scores": True}
    theirs = Listening()
    T.generate(ids, do_sample=False, stopping_criteria=StoppingCriteriaList([theirs]), **given)
    for way in WAYS:
        ours = Listening()
        spec(T, ids, stopping_criteria=StoppingCriteriaList([ours]), **given, **WAYS[way])
        assert ours.seen == theirs.seen


def test_SC_01_transformers_own_confidence_criterion() -> None:
    given = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12, "attention_mask": MASK}
    lengths = set()
    for threshold in (0.1, 0.3, 0.5):
        want = T.generate(X, do_sample=False, stopping_criteria=[ConfidenceCriteria(threshold)], **given).sequences
        lengths.add(want.shape[1])
        for way in WAYS:
            result = spec(T, X, stopping_criteria=[ConfidenceCriteria(threshold)], **given, **WAYS[way])
            assert result.sequences.tolist() == want.tolist()
    assert len(lengths) > 1


@pytest.mark.slow
def test_SC_01_stop_strings_in_rows_without_an_end_of_sequence() -> None:
    """generate() lets a row that has ended write on until all have; the rows of the result end at their stop."""
    model = tiny.llama(vocab=330)
    ids = torch.randint(3, 330, (2, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ways: list[dict[str, Any]] = [
        {"method": "plain"},
        {"assistant_model": tiny.noisy(model, 0.02), **EAGER},
        {"prompt_lookup_num_tokens": 3},
    ]
    apart = 0
    free = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[:, 7:]
    for token in free.flatten().tolist():
        stop = TOKENIZER.decode([token])
        if not stop.strip() or "\ufffd" in stop:
            continue
        for more in ({}, {"eos_token_id": int(free[1, 8])}):
            given = {
                "attention_mask": mask,
                "max_new_tokens": 12,
                "stop_strings": [stop],
                "tokenizer": TOKENIZER,
            } | more
            want = model.generate(ids, do_sample=False, **given)
            for way in ways:
                result = spec(model, ids, **given, **way)
                assert result.sequences.tolist() == want.tolist()
                consistent_rows(result)
            apart += len({len(row.ids) for row in result.rows}) > 1
    assert apart > 3


def consistent_rows(result: GenerationResult) -> None:
    for row in result.rows:
        assert row.ids == tuple(token for step in row.steps for token in step.emitted)
        assert row.finish_reason in specnb.trace.FINISH_REASONS


def test_SC_01_an_answer_of_another_kind_is_refused_by_name() -> None:
    class Strange(StoppingCriteria):
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            return self.answer

    for answer in (None, torch.zeros(2, dtype=torch.bool), "no"):
        with pytest.raises(ValueError, match="Strange"):
            spec(T, X, attention_mask=MASK, max_new_tokens=4, stopping_criteria=[Strange(answer)])


# ---------------------------------------------------------------- failing
@pytest.mark.parametrize("rows", ["one", "padded rows"])
@pytest.mark.parametrize("way", WAYS)
def test_PR_what_was_committed_outlasts_a_failure(way: str, rows: str) -> None:
    """A processor, a criterion, on_step or a streamer that raises: the partial result has every kept token."""
    ids, mask = ROWS[rows]
    given = {"attention_mask": mask, "max_new_tokens": 12}
    free = T.generate(ids, do_sample=False, **given)[:, 7:].tolist()

    class Boom(Exception):
        pass

    class Processor(Counting):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 6:
                raise Boom
            return scores

    class Criterion(Calls):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
            self.left -= 1
            if not self.left:
                raise Boom
            return False

    def on_step(step: specnb.Step) -> None:
        if step.position + len(step.emitted) > 12:
            raise Boom

    faults: dict[str, tuple[dict[str, Any], int | None]] = {
        "processor": ({"logits_processor": LogitsProcessorList([Processor()])}, 5),
        "criterion": ({"stopping_criteria": [Criterion(6)]}, 6),
        "on_step": ({"on_step": on_step}, None),
    }
    for fault, (options, length) in faults.items():
        with pytest.raises(Boom) as caught:
            spec(T, ids, **given, **options, **WAYS[way])
        result: GenerationResult = caught.value.partial_result  # type: ignore[attr-defined]
        assert result.num_emitted_tokens > 0
        consistent_rows(result)
        for row, text in zip(result.rows, free, strict=True):
            assert list(row.ids) == text[: len(row.ids)]
            assert row.finish_reason == ("length" if len(row.ids) == 12 else "interrupted")
            if length is not None:
                assert len(row.ids) == length, fault


@pytest.mark.slow
def test_PR_mixtures_at_random() -> None:
    """Options, processors, criteria, rows and methods thrown together."""
    draw = random.Random(7)
    for _ in range(60):
        ids, mask = ROWS[draw.choice(list(ROWS))]
        names = draw.sample([name for name in PROCESSORS if name not in ("forced end", "prefix function")], 2)
        criterion, i = draw.choice([None, *list(CRITERIA)[1:]]), draw.randrange(12)

        def options(names: list[str] = names, criterion: str | None = criterion, i: int = i) -> dict[str, Any]:
            made: dict[str, Any] = {}
            for name in names:
                made |= PROCESSORS[name]()
            if criterion:
                made["stopping_criteria"] = StoppingCriteriaList([CRITERIA[criterion](i)])
            return made

        consistent_rows(same(options, ids, mask, draw.choice(list(WAYS)), new=draw.randint(1, 12)))


def test_PR_one_row_is_as_it_was() -> None:
    result = same(PROCESSORS["several"], *ROWS["one"], "draft")
    consistent(result)
