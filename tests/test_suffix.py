"""Suffix decoding: the index against a search of the texts, exactness with and without a memory, what it learns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specnb import Memory
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.schedules import Adaptive, Constant
from specnb.drafters.suffix import AcceptanceRecord, Limits, Suffix
from specnb.drafters.votes import Ballot, weight
from specnb.memory.suffix_index import SuffixIndex

ALL = 10**6  # more occurrences than there are


def row(ids: Sequence[int], k: int = 100, index: int = 0) -> Row:
    return Row(index, list(ids), 10**6, torch.Generator(), Processors(), Constant(k))


def common(text: Sequence[int], end: int, ids: Sequence[int]) -> int:
    """Number of tokens before `end` that equal the end of `ids`."""
    n = 0
    while n < min(end, len(ids)) and text[end - 1 - n] == ids[len(ids) - 1 - n]:
        n += 1
    return n


def brute_counts(texts: Sequence[Sequence[int]], ids: Sequence[int], longest: int) -> dict[int, Counter[int]]:
    """For each match length, how often each token followed, by trying all positions."""
    found: dict[int, Counter[int]] = {}
    for text in texts:
        for end in range(1, len(text)):
            for n in range(1, min(common(text, end, ids), longest) + 1):
                found.setdefault(n, Counter())[text[end]] += 1
    return found


def counts(index: SuffixIndex, ids: Sequence[int], longest: int) -> dict[int, Counter[int]]:
    """The same from the index."""
    found: dict[int, Counter[int]] = {}
    for position, length in index.matches(ids, 1, longest, ALL):
        for n in range(1, length + 1):
            found.setdefault(n, Counter())[index.continuation(position, 1)[0]] += 1
    return found


# ---- the index
@pytest.mark.parametrize("symbols", [2, 3, 10])
def test_counts_equal_a_search_of_the_text(symbols: int) -> None:
    """A text that grows in pieces, looked up in itself."""
    rng = random.Random(symbols)
    for _ in range(10):
        index, ids = SuffixIndex(), [rng.randrange(symbols) for _ in range(rng.randint(1, 30))]
        for _ in range(12):
            index.extend(ids[index.length :])
            longest = rng.choice([1, 3, 8, 20, 40])
            assert counts(index, ids, longest) == brute_counts([ids], ids, longest)
            ids += [rng.randrange(symbols) for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("symbols", [2, 4])
def test_counts_over_texts_that_come_and_go(symbols: int) -> None:
    rng = random.Random(symbols)
    memory, texts = Memory(120), []
    for _ in range(60):
        texts.append([rng.randrange(symbols) for _ in range(rng.randint(1, 30))])
        memory.add(texts[-1])
        while sum(map(len, texts)) > 120:
            texts.pop(0)
        assert memory.requests() == texts and memory.num_tokens == sum(map(len, texts)) <= 120
        ids = [rng.randrange(symbols) for _ in range(25)]
        assert counts(memory._index, ids, 20) == brute_counts(texts, ids, 20)
    live = sum(map(len, texts)) + len(texts)
    assert len(memory._index.tokens) == live and all(len(b) == live for b in memory._index._before)
    assert all(position > memory._index.base for last in memory._index._last for position in last.values())


def test_continuations_end_with_their_text_or_go_on_in_their_own_copy() -> None:
    memory = Memory()
    memory.add([1, 2, 3])
    memory.add([1, 2, 9])
    found = {memory.continuation(position, 10) for position, _ in memory.matches([7, 1], 1, 8, 8)}
    assert found == {(2, 3), (2, 9)}
    index = SuffixIndex()
    index.extend([5, 1, 2, 1, 2])
    assert index.continuation(3, 5) == (1, 2, 1, 2, 1)
    assert index.matches([9], 1, 8, 8) == [] and index.matches([], 1, 8, 8) == []


def test_only_recent_occurrences_are_looked_at_and_the_longest_among_them() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 7] + [9, 4, 8] * 50 + [1, 2, 3, 4])
    found = dict(index.matches(index.tokens, 1, 8, 10))
    assert found[4] == 4 and len(found) == 11  # the old one, by its four tokens, and ten recent ones


class Counted(dict[int, int]):
    operations = 0

    def __setitem__(self, key: int, value: int) -> None:
        Counted.operations += 1
        super().__setitem__(key, value)

    def get(self, key: int, default: Any = None) -> Any:
        Counted.operations += 1
        return super().get(key, default)


def cost(tokens: int) -> int:
    """Dictionary operations of 50 steps of 2 tokens after a text of that length, beside a memory of that length."""
    rng = random.Random(1)
    memory, one = Memory(10**6), row([rng.randrange(50) for _ in range(tokens)])
    memory.add([rng.randrange(50) for _ in range(tokens)])
    drafter = Suffix(memory)
    drafter.propose([one], [5])
    for index in (drafter._rows[0].text, memory._index):
        index._last = [Counted(last) for last in index._last]
    Counted.operations = 0
    for _ in range(50):
        one.ids += [rng.randrange(50), rng.randrange(50)]
        drafter.propose([one], [5])
    return Counted.operations


def test_a_step_costs_the_same_in_long_texts() -> None:
    few, many = cost(1_000), cost(20_000)
    assert 0 < few <= 50 * (2 * 2 * 5 + 2 * 5) and 0 < many <= 50 * (2 * 2 * 5 + 2 * 5)


# ---- votes
def test_votes_are_counted_token_by_token() -> None:
    ballot = Ballot()
    for votes, position, tokens in ((1.0, 1, (5, 6, 7)), (1.5, 2, (8, 6)), (1.0, 3, (5, 9, 9)), (1.0, 4, (5, 6, 7))):
        ballot.add((votes, position, 1, False), tokens)
    tokens, shares, best = ballot.elect(10)
    assert tokens == [5, 6, 7] and shares == pytest.approx([3 / 4.5, 2 / 3, 1.0])
    assert [one[1] for one in best] == [4, 4, 4]
    assert ballot.elect(2).tokens == [5, 6] and ballot.elect(10, min_share=0.7).tokens == [5]
    assert Ballot().elect(3).tokens == []


def test_a_longer_match_outvotes_shorter_ones() -> None:
    assert weight(5, False, False) > 3 * weight(4, False, False)
    assert weight(3, True, False) > weight(3, False, False) < weight(3, False, True)


def propose(ids: Sequence[int], *, memory: Memory | None = None, k: int = 100, room: int = 50, **options: Any) -> Any:
    limits = options.pop("limits", Limits(min_token_prob=0.0))
    return Suffix(memory, limits=limits, **options).propose([row(ids, k)], [room])[0]


def test_the_draft_is_what_followed() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 50, 1, 2, 3]
    assert propose(ids).tokens == [4, 5, 6, 7, 8, 50, 1, 2, 3]  # three times the match
    assert propose(ids, limits=Limits(factor=1.0, min_token_prob=0.0)).tokens == [4, 5, 6]
    assert propose(ids, limits=Limits(depth=2, min_token_prob=0.0)).tokens == [4, 5]
    assert propose(ids, room=1).tokens == [4] and propose(ids, k=2).tokens == [4, 5]
    assert propose(ids, eos={5}).tokens == [4, 5]
    found = propose(ids, k=2)
    assert (found.match_length, found.lookahead_token, found.probs) == (3, 6, None)
    assert propose([1, 2, 3]).tokens == [] and propose(ids, room=0).tokens == [] and propose([1]).tokens == []
    assert len(propose(ids, limits=Limits(min_token_prob=0.4)).tokens) < 9
    assert propose(ids, limits=Limits(min_token_prob=1.0)).tokens == []


def test_rows_draft_from_their_own_text() -> None:
    drafts = Suffix(limits=Limits(min_token_prob=0.0)).propose(
        [row([1, 2, 3, 1, 2], index=0), row([1, 2, 4, 1, 2], index=1)], [1, 1]
    )
    assert [draft.tokens for draft in drafts] == [[3], [4]]


def test_a_memory_drafts_where_the_text_has_nothing() -> None:
    memory = Memory()
    memory.add([10, 11, 12, 13, 14, 15], prompt=[1, 2, 3])
    assert propose([1, 2, 3], memory=memory).tokens == [10, 11, 12, 13, 14, 15]
    assert propose([5, 3], memory=memory).tokens == []  # one token is too little in another text
    assert propose([1, 2, 3], memory=memory, vocab_size=13).tokens == [10, 11, 12]


def test_a_prediction_is_drafted_from_the_start() -> None:
    drafter, one = Suffix(prediction=[10, 11, 12], limits=Limits(min_token_prob=0.0)), row([5, 6, 7])
    assert drafter.propose([one], [9])[0].tokens == [10, 11, 12]
    one.ids += [10, 20, 11]
    assert drafter.propose([one], [9])[0].tokens == [12]


def replay(written: Sequence[int], memory: Memory | None, prompt: Sequence[int], **options: Any) -> tuple[int, int]:
    """Steps, and drafted tokens, that it takes to write a text."""
    drafter, one, steps, drafted = Suffix(memory, **options), row(prompt), 0, 0
    while len(one.ids) < len(prompt) + len(written):
        left = written[len(one.ids) - len(prompt) :]
        draft = drafter.propose([one], [len(left) - 1])[0]
        right = 0
        while right < len(draft.tokens) and draft.tokens[right] == left[right]:
            right += 1
        one.ids += left[: right + 1]
        steps, drafted = steps + 1, drafted + len(draft.tokens)
    return steps, drafted


def test_a_copy_goes_on_behind_a_replaced_token() -> None:
    drafter, one = Suffix(limits=Limits(min_token_prob=0.0)), row([*range(1, 21), 50, 1, 2, 3])
    assert drafter.propose([one], [9])[0].tokens == [*range(4, 13)]
    one.ids += [4, 5, 99]  # in place of 6
    assert drafter.propose([one], [9])[0].tokens == [7]  # nothing matches 99
    one.ids += [98]
    assert drafter.propose([one], [9])[0].tokens == []


def test_a_copy_that_went_astray_finds_its_way_back() -> None:
    """Of three places with the same tokens before them, the one behind the broken copy is followed."""
    text = [7, 8, 60, 30, 31, 1, 2, 3, 4, 5, 6, 7, 8, 70, *range(100, 180), 7, 8, 80, 1, 2, 3]
    drafter, one = Suffix(limits=Limits(min_token_prob=0.0)), row(text)
    assert drafter.propose([one], [4])[0].tokens == [4, 5, 6, 7]
    one.ids += [4, 9, 7, 8]
    assert drafter.propose([one], [1])[0].tokens == [70]
    assert propose(one.ids, room=1).tokens != [70]


def test_a_memory_of_other_topics_is_soon_ignored() -> None:
    """Its pairs of tokens are always followed by something else."""
    rng = random.Random(0)
    memory, written = Memory(10**6), [rng.randrange(20) for _ in range(600)]
    pairs: dict[tuple[int, int], set[int]] = {}
    for one, two, three in zip(written, written[1:], written[2:], strict=False):
        pairs.setdefault((one, two), set()).add(three)
    for (one, two), following in pairs.items():
        wrong = next(token for token in range(20) if token not in following)
        for _ in range(2):
            memory.add([one, two, wrong])
    steps, drafted = replay(written, memory, [1000])
    alone_steps, alone = replay(written, None, [1000])
    assert steps <= alone_steps + 3 and drafted <= alone + 60


def test_rates_are_learned() -> None:
    record = AcceptanceRecord()
    (short,) = record.keys("text", False, 2, 1)
    (long,) = record.keys("text", False, 9, 1)
    (other,) = record.keys("memory", False, 2, 1)
    assert len({short, long, other}) == 3
    before = record.rates[short], record.rates[other]
    for _ in range(200):
        record.count(short, 1.0, False)
    assert record.rates[short] < 0.2 * before[0] and record.rates[other] == before[1]
    for _ in range(400):
        record.count(short, 1.0, True)
    assert 0.85 < record.rates[short] <= 1
    assert record.keys("text", True, 0, 3) == [record.keys("text", True, n, 1)[0] for n in (0, 1, 2)]


def test_adaptive_takes_the_drafters_estimates() -> None:
    schedule = Adaptive(4)
    assert schedule.length(3, [0.9] * 3) == 4  # nothing is measured yet
    assert schedule.length(3, [0.99] * 20) == 20
    schedule.verify_seconds = {1: 1.0, 9: 1.4}
    assert schedule.length(3, [0.9] * 6) == 6
    assert schedule.length(3, [0.01] * 6) == 0
    assert schedule.length(3, []) == 0
