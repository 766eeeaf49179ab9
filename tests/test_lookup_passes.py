"""Target passes of prompt lookup and suffix decoding on a real model's texts, counted without the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from suite_texts import EOS, texts

from specnb import Memory
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.schedules import Constant
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.drafters.suffix import Suffix

Propose = Callable[[list[int], int], list[int]]


def passes(propose: Propose, prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Passes of a target that writes `ids`, given what is drafted from the text and the most tokens of it."""
    text, count = list(prompt), 0
    while len(text) < len(prompt) + len(ids):
        left = ids[len(text) - len(prompt) :]
        draft, right = propose(text, len(left) - 1), 0
        while right < len(draft) and draft[right] == left[right]:
            right += 1
        text += left[: right + 1]
        count += 1
    return count


def ours(drafter: Any, k: int) -> Propose:
    row = Row(0, [], 10**6, torch.Generator(), Processors(), Constant(k))

    def propose(text: list[int], most: int) -> list[int]:
        row.ids = text
        return list(drafter.propose([row], [most])[0].tokens)

    return propose


def first_match(k: int, size: int = 2) -> Propose:
    """Prompt lookup as transformers does it: the first occurrence of the longest n-gram of up to two tokens."""

    def propose(text: list[int], most: int) -> list[int]:
        for n in range(min(size, len(text) - 1), 0, -1):
            for start in range(len(text) - n):
                if text[start : start + n] == text[-n:]:
                    draft = text[start + n : start + n + k][:most]
                    return draft[: draft.index(EOS)] if EOS in draft else draft
        return []

    return propose


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16])
def test_prompt_lookup_never_needs_more_passes_than_transformers(k: int) -> None:
    for one in texts():
        mine = passes(ours(PromptLookup(3, {EOS}), k), one["prompt"], one["ids"])
        assert mine <= passes(first_match(k), one["prompt"], one["ids"]), (one["kind"], one["number"])


def test_suffix_decoding_needs_no_more_passes_than_prompt_lookup() -> None:
    suffix = lookup = 0
    for one in texts():
        suffix += passes(ours(Suffix(eos={EOS}), 32), one["prompt"], one["ids"])
        lookup += passes(ours(PromptLookup(3, {EOS}), 10), one["prompt"], one["ids"])
    assert suffix <= lookup


def remembered(kind: str, number: int) -> Memory:
    memory = Memory()
    (one,) = [one for one in texts(kind) if one["number"] == number]
    memory.add(one["ids"], one["prompt"])
    return memory


def test_the_same_prompt_again() -> None:
    for one in texts():
        memory = remembered(one["kind"], one["number"])
        count = passes(ours(Suffix(memory, eos={EOS}), 32), one["prompt"], one["ids"])
        assert len(one["ids"]) / count >= 6, (one["kind"], one["number"])


def test_an_edited_prompt_is_drafted_from_the_first_run() -> None:
    ratios = []
    for one in texts("edit code", edited=True) + texts("summarise", edited=True):
        suffix = Suffix(remembered(one["kind"], one["number"]), eos={EOS})
        count = passes(ours(suffix, 32), one["prompt"], one["ids"])
        ratios.append(passes(ours(PromptLookup(3, {EOS}), 10), one["prompt"], one["ids"]) / count)
    assert len(ratios) == 8 and statistics.median(ratios) >= 1.3


def test_a_memory_of_other_prompts_costs_few_passes() -> None:
    """Each prompt with a memory of the runs of all prompts of other kinds."""
    alone = stale = 0
    for one in texts():
        memory = Memory()
        for other in texts():
            if other["kind"] != one["kind"]:
                memory.add(other["ids"], other["prompt"])
        alone += passes(ours(Suffix(eos={EOS}), 32), one["prompt"], one["ids"])
        stale += passes(ours(Suffix(memory, eos={EOS}), 32), one["prompt"], one["ids"])
    assert stale <= 1.02 * alone
