"""Prompt lookup against a search of the whole text, and what it may never do."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import tiny
import torch
from checks import spec

from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.schedules import Constant
from specnb.drafters.prompt_lookup import NgramIndex, PromptLookup


def brute(ids: Sequence[int], size: int) -> list[int]:
    """Positions after the earlier occurrences of the longest suffix that has any, by trying all of them."""
    for n in range(min(size, len(ids) - 1), 0, -1):
        found = [end for end in range(n, len(ids)) if list(ids[end - n : end]) == list(ids[len(ids) - n :])]
        if found:
            return found
    return []


def context(ids: Sequence[int], end: int) -> int:
    """Number of tokens before `end` that equal the end of the text, up to 24."""
    n = 0
    while n < min(end, 24) and ids[end - 1 - n] == ids[len(ids) - 1 - n]:
        n += 1
    return n


class Oracle:
    """Votes of all occurrences, with the weights of the docstring, written down once more."""

    def __init__(self, size: int, eos: Collection[int]) -> None:
        self.size, self.eos = size, eos
        self.copy: tuple[int, int, list[int]] | None = None  # length of the text, place, tokens

    def stands_at(self, ids: Sequence[int]) -> int | None:
        if self.copy is None:
            return None
        length, place, tokens = self.copy
        right = 0
        while right < min(len(tokens), len(ids) - length) and tokens[right] == ids[length + right]:
            right += 1
        return place + right

    def propose(self, ids: Sequence[int], k: int) -> list[int]:
        places, stands_at = brute(ids, self.size), self.stands_at(ids)
        live = {}
        for end in places:
            near = stands_at is not None and -2 <= end - stands_at <= 64
            live[end] = 4.0 ** context(ids, end) * (8 if near else 1) * (8 if end == places[0] else 1)
        texts = {end: [*ids] for end in live}
        copied: list[int] = []
        while live and len(copied) <= k:
            votes: dict[int, float] = {}
            for end in sorted(live, key=lambda end: (end == places[0], -end)):  # the most recent first, the first last
                token = texts[end][end + len(copied)]
                votes[token] = votes.get(token, 0.0) + live[end]
            best = max(votes, key=lambda token: votes[token])
            live = {end: w for end, w in live.items() if texts[end][end + len(copied)] == best}
            copied.append(best)
            for end in live:
                texts[end].append(best)
        if live:
            self.copy = len(ids), max((w, end) for end, w in live.items())[1], copied
        draft: list[int] = []
        while len(draft) < min(k, len(copied)) and not (draft and draft[-1] in self.eos):
            draft.append(copied[len(draft)])
        return draft


def row(ids: Sequence[int], index: int = 0) -> Row:
    return Row(index, list(ids), 10**6, torch.Generator(), Processors(), Constant(100))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("symbols", [2, 3, 8])
def test_index_equals_a_search_of_the_text(symbols: int, size: int) -> None:
    rng = random.Random(symbols * 100 + size)
    for _ in range(15):
        ids = [rng.randrange(symbols) for _ in range(rng.randint(1, 30))]
        index = NgramIndex(size)
        for _ in range(20):
            index.extend(ids)
            assert index.find(ids)[0] == brute(ids, size), ids
            ids += [rng.randrange(symbols) for _ in range(rng.randint(1, 4))]


def test_proposals_equal_a_search_of_the_text() -> None:
    """Several rows that grow at their own pace, with eos tokens in them."""
    rng = random.Random(0)
    for seed in range(30):
        eos = {0} if seed % 2 else set()
        drafter = PromptLookup(rng.randint(1, 5), eos)
        rows = [row([rng.randrange(4) for _ in range(rng.randint(1, 25))], i) for i in range(3)]
        oracles = [Oracle(drafter.size, eos) for _ in rows]
        for _ in range(12):
            k = [rng.randint(0, 12) for _ in rows]
            for one, n, draft in zip(rows, k, drafter.propose(rows, k), strict=True):
                assert draft.tokens == oracles[one.index].propose(one.ids, n)
                assert draft.probs is None  # chosen, not drawn
            for one in rows:
                one.ids += [rng.randrange(4) for _ in range(rng.randint(1, 5))]
            if len(rows) > 2 and rng.random() < 0.2:
                rows.pop(0)


def test_nothing_to_copy_is_nothing_drafted() -> None:
    for ids in ([5], [5, 6], [5, 6, 7, 8]):
        assert PromptLookup(3).propose([row(ids)], [5])[0].tokens == []
    assert PromptLookup(3).propose([row([5, 5])], [0])[0].tokens == []


def test_a_period_is_followed_as_far_as_wanted() -> None:
    assert PromptLookup(3).propose([row([1, 2, 3, 1, 2, 3])], [10])[0].tokens == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert PromptLookup(3).propose([row([9, 7, 7])], [6])[0].tokens == [7] * 6


@pytest.mark.parametrize("eos", [0, 1, 2, 3])
def test_never_beyond_an_eos(eos: int) -> None:
    rng = random.Random(eos)
    for _ in range(100):
        ids = [rng.randrange(4) for _ in range(20)]
        draft = PromptLookup(3, {eos}).propose([row(ids)], [15])[0].tokens
        assert eos not in draft[:-1]


def test_the_longest_match_wins_over_the_most_recent() -> None:
    ids = [1, 2, 3, 40, 9, 3, 50, 1, 2, 3]
    found = PromptLookup(3).propose([row(ids)], [1])[0]
    assert (found.tokens, found.match_length, found.lookahead_token) == ([40], 3, 9)
    found = PromptLookup(1).propose([row(ids)], [1])[0]
    assert (found.tokens, found.match_length) == ([40], 1)  # the text before it decides between equals


def test_a_copy_goes_on_where_it_broke_off() -> None:
    """Of the three places of 7 8, the one right behind the copy is followed, and neither the first nor the last."""
    ids = [7, 8, 60, 1, 2, 3, 4, 5, 7, 8, 70, *range(100, 180), 7, 8, 80, 1, 2, 3]
    drafter, one = PromptLookup(3), row(ids)
    assert drafter.propose([one], [4])[0].tokens == [4, 5, 7, 8]
    one.ids += [4, 9, 7, 8]
    assert drafter.propose([one], [1])[0].tokens == [70]
    assert PromptLookup(3).propose([one], [1])[0].tokens != [70]


@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_the_budget_is_respected(k: int) -> None:
    model = tiny.llama()
    prompt = tiny.ids(0, 4).repeat(1, 6)
    for new in range(1, 8):
        result = spec(model, prompt, max_new_tokens=new, method="prompt_lookup", num_assistant_tokens=k)
        left = new
        for step in result.steps:
            assert len(step.drafted) <= min(k, left - 1)
            left -= len(step.emitted)
        assert left == 0


class Counted(dict[Any, Any]):
    """A dictionary that counts reads and writes."""

    operations = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        Counted.operations += 1
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        Counted.operations += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        Counted.operations += 1
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        Counted.operations += 1
        return super().setdefault(key, default)


class Watched(list[int]):
    """A list that counts how many entries are read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        value = super().__getitem__(at)
        Watched.read += len(value) if isinstance(at, slice) else 1
        return value

    def __iter__(self) -> Any:
        Watched.read += len(self)
        return super().__iter__()


def cost(context: int, steps: int = 50, size: int = 3) -> tuple[int, int]:
    """Dictionary operations and tokens read in `steps` steps of 2 tokens, after a context of that length."""
    rng = random.Random(1)
    one = row([])
    one.ids = Watched(rng.randrange(50) for _ in range(context))
    drafter = PromptLookup(size)
    drafter.propose([one], [5])
    index = drafter._indexes[0]
    index._places = [Counted(table) for table in index._places]
    Counted.operations = Watched.read = 0
    for _ in range(steps):
        one.ids += [rng.randrange(50), rng.randrange(50)]
        drafter.propose([one], [5])
    return Counted.operations, Watched.read


def test_a_step_costs_the_same_in_a_long_text() -> None:
    """Counted, not timed: about size operations per new token and per look-up, in 1,000 as in 50,000 tokens."""
    for operations, read in (cost(1_000), cost(50_000)):
        assert 0 < operations <= 50 * (2 + 1) * 3 + 10
        assert read <= 50 * (17 * 8 + 30)  # at most 17 places, each with its context and what followed
