"""Between two tokenizers: the same text in the other's ids, and the tokens that both have."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specnb.text import Detokenizer, pieces

WINDOW = 48  # characters that are encoded again with each addition: more than a merge reaches back
_TEXTS: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


class Retokenized:
    """The ids that `tokenizer` gives a growing text, never none; an addition encodes a short window again.

    `ends[i]` is the number of characters up to and including token i, and a half more where it ends amid a character. The ids
    so far and those of the window are joined at the last place where both have a token boundary; the text is never encoded
    whole again.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.ids = self._whole()
        self.ends = _ends(tokenizer, self.ids, text)

    def extend(self, addition: str) -> int:
        """Add text; returns how many of the ids that were there before still stand."""
        if not addition:
            return len(self.ids)
        before = len(self.text)
        self.text += addition
        if self.ends is not None:
            start = next(
                (int(end) for end in reversed(self.ends[: self._before(before - WINDOW)]) if end == int(end)), 0
            )
            kept = bisect_left(self.ends, start) + 1 if start else _specials(self.tokenizer, self.ids)
            fresh = encode(self.tokenizer, self.text[start:])
            ends = _ends(self.tokenizer, fresh, self.text[start:], start)
            if ends is not None:
                known = self.ends[kept:]
                both = set(ends) & set(known)
                joint = max((end for end in both if start < end <= before and end == int(end)), default=None)
                stays = kept if joint is None else kept + known.index(joint) + 1
                rest = 0 if joint is None else ends.index(joint) + 1
                self.ids[stays:], self.ends[stays:] = fresh[rest:], ends[rest:]
                return stays
        # something in the text has no token here, so places in text and ids cannot be matched
        old, self.ids[:], self.ends = list(self.ids), self._whole(), None
        return next(
            (i for i, (a, b) in enumerate(zip(old, self.ids, strict=False)) if a != b), min(len(old), len(self.ids))
        )

    def _whole(self) -> list[int]:
        """The ids of the whole text, with a BOS where the tokenizer adds one; something to begin with where there is no text."""
        ids = list(self.tokenizer(self.text)["input_ids"])
        while ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # added at the end by some: the text goes on
        starts = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, 0)
        return ids or [next(token for token in starts if token is not None)]

    def _before(self, end: int) -> int:
        """How many tokens end at or before `end` characters."""
        return bisect_right(self.ends or [], end)


def continuation(tokenizer: Any, context: str, addition: str) -> list[int]:
    """`addition` in ids of `tokenizer`, as they may follow ids whose text ends with `context`; [] where none fit.

    The context's end must be a token boundary; else the addition is encoded alone, if that reads the same.
    """
    if len(context) > WINDOW:  # from a blank on: some tokenizers know whole words only
        context = context[-WINDOW:]
        context = context[max(0, context.find(" ")) :]
    together = encode(tokenizer, context + addition)
    ends = _ends(tokenizer, together, context + addition)
    if ends is not None and len(context) in ends:
        return together[ends.index(len(context)) + 1 :]
    anchor, alone = encode(tokenizer, context), encode(tokenizer, addition)
    return alone if "".join(pieces(tokenizer, [*anchor, *alone])) == context + addition else []


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without special tokens added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def shared_tokens(tokenizer: Any, other: Any, vocab: int, other_vocab: int) -> tuple[Tensor, Tensor]:
    """The tokens that both tokenizers have, as ids `[n]` of the one and ids `[n]` of the other, ordered by the first.

    Tokens are the same if they add the same text to a text; the end-of-sequence tokens are each other's counterpart. Ids
    beyond a model's vocabulary are left out. Timor et al. 2502.05202, token-level intersection.
    """
    theirs: dict[str, int] = {}
    for i, text in enumerate(_texts(other)[:other_vocab]):
        if text:
            theirs.setdefault(text, i)
    pairs, taken = [], set()
    for i, text in enumerate(_texts(tokenizer)[:vocab]):
        if text in theirs and text not in taken:
            taken.add(text)
            pairs.append((i, theirs[text]))
    ends = tokenizer.eos_token_id, other.eos_token_id
    if None not in ends and ends[0] < vocab and ends[1] < other_vocab:
        pairs = [pair for pair in pairs if pair[0] != ends[0] and pair[1] != ends[1]] + [ends]
    table = torch.tensor(sorted(pairs), dtype=torch.long).view(-1, 2)
    return table[:, 0], table[:, 1]


def _texts(tokenizer: Any) -> list[str]:
    """What each token adds to a text that it follows; "" for special tokens and parts of characters."""
    if tokenizer not in _TEXTS:
        special = set(tokenizer.all_special_ids)
        anchor = next((i for i in encode(tokenizer, "a") if i not in special), None)
        if anchor is None:  # no letters in this vocabulary: any ordinary token will do
            anchor = next(i for i in range(len(tokenizer)) if i not in special)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        head = tokenizer.decode([anchor], **options)
        whole = tokenizer.batch_decode([[anchor, i] for i in range(len(tokenizer))], **options)
        texts = [text[len(head) :] if text.startswith(head) and "\ufffd" not in text else "" for text in whole]
        _TEXTS[tokenizer] = ["" if i in special else text for i, text in enumerate(texts)]
    return _TEXTS[tokenizer]


def _ends(tokenizer: Any, ids: list[int], text: str, start: int = 0) -> list[float] | None:
    """Where each token of `text` ends, counted from `start`; a half more amid a character. None if they do not read `text`."""
    detokenizer = Detokenizer(tokenizer)
    ends: list[float] = []
    read = ""
    for token in ids:
        read += detokenizer.push([token])[0]
        ends.append(len(read) + 0.5 if detokenizer.held else len(read))
    read += detokenizer.flush()
    stripped = len(text) - len(read)  # a blank at the beginning that some decoders leave out
    if text[stripped:] != read or text[:stripped].strip(" ") or stripped < 0:
        return None
    if ends:
        ends[-1] = len(read)
    return [end + stripped + start for end in ends]


def _specials(tokenizer: Any, ids: list[int]) -> int:
    """How many special tokens stand before the text."""
    special = set(tokenizer.all_special_ids)
    return next((i for i, token in enumerate(ids) if token not in special), len(ids))
