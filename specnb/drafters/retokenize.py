"""Between two tokenizers: the same text in the other's ids, and the tokens that both have."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specnb.text import Detokenizer, pieces

WINDOW = 48  # characters that are encoded again with each addition; more than a merge of tokens spans
_TEXTS: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


class Retokenized:
    """The ids that `tokenizer` gives a growing text; there is always at least one.

    Adding text encodes only a short window at the end again. The old ids and those of the window are joined at the last
    place where both have a token boundary.

    Attributes:
        ids: the ids of the text.
        ends: `ends[i]` is the number of characters up to and including token i, plus 0.5 if it ends inside a character.
            None if the ids do not decode to the text.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.ids = self._whole()
        self.ends = _ends(tokenizer, self.ids, text)

    def extend(self, addition: str) -> int:
        """Add text.

        Returns:
            How many of the earlier ids are unchanged.
        """
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
                joined_at = max((end for end in both if start < end <= before and end == int(end)), default=None)
                num_kept = kept if joined_at is None else kept + known.index(joined_at) + 1
                rest = 0 if joined_at is None else ends.index(joined_at) + 1
                self.ids[num_kept:], self.ends[num_kept:] = fresh[rest:], ends[rest:]
                return num_kept
        # the tokenizer cannot represent some of the text, so text and ids cannot be aligned
        old, self.ids[:], self.ends = list(self.ids), self._whole(), None
        return next(
            (i for i, (a, b) in enumerate(zip(old, self.ids, strict=False)) if a != b), min(len(old), len(self.ids))
        )

    def _whole(self) -> list[int]:
        """The ids of the whole text, with a BOS if the tokenizer adds one; some special token if the text is empty."""
        ids = list(self.tokenizer(self.text)["input_ids"])
        while ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # some tokenizers add an EOS, but the text goes on
        starts = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, 0)
        return ids or [next(token for token in starts if token is not None)]

    def _before(self, end: int) -> int:
        """How many tokens end at or before `end` characters."""
        return bisect_right(self.ends or [], end)


def continuation(tokenizer: Any, context: str, addition: str) -> list[int]:
    """Encode `addition` as a continuation of ids whose text ends with `context`.

    The end of the context must be a token boundary. Otherwise the addition is encoded alone, if that decodes to the
    same text.

    Returns:
        The ids of the addition; [] if it cannot be encoded so.
    """
    if len(context) > WINDOW:  # start at a blank, for tokenizers of whole words
        context = context[-WINDOW:]
        context = context[max(0, context.find(" ")) :]
    together = encode(tokenizer, context + addition)
    ends = _ends(tokenizer, together, context + addition)
    if ends is not None and len(context) in ends:
        return together[ends.index(len(context)) + 1 :]
    anchor, alone = encode(tokenizer, context), encode(tokenizer, addition)
    return alone if "".join(pieces(tokenizer, [*anchor, *alone])) == context + addition else []


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def shared_tokens(tokenizer: Any, other: Any, vocab: int, other_vocab: int) -> tuple[Tensor, Tensor]:
    """The tokens that both tokenizers have.

    Tokens are the same if they add the same text; the two end-of-sequence tokens are also a pair. Timor et al.
    2502.05202, token-level intersection.

    Args:
        vocab, other_vocab: the vocabulary sizes of the models; ids beyond them are left out.

    Returns:
        The tokens as ids `[n]` of `tokenizer`, ascending, and as ids `[n]` of `other`.
    """
    other_ids: dict[str, int] = {}
    for i, text in enumerate(_texts(other)[:other_vocab]):
        if text:
            other_ids.setdefault(text, i)
    pairs, paired = [], set()
    for i, text in enumerate(_texts(tokenizer)[:vocab]):
        if text in other_ids and text not in paired:
            paired.add(text)
            pairs.append((i, other_ids[text]))
    ends = tokenizer.eos_token_id, other.eos_token_id
    if None not in ends and ends[0] < vocab and ends[1] < other_vocab:
        pairs = [pair for pair in pairs if pair[0] != ends[0] and pair[1] != ends[1]] + [ends]
    table = torch.tensor(sorted(pairs), dtype=torch.long).view(-1, 2)
    return table[:, 0], table[:, 1]


def _texts(tokenizer: Any) -> list[str]:
    """The text that each token adds to a text; "" for special tokens and parts of characters."""
    if tokenizer not in _TEXTS:
        special = set(tokenizer.all_special_ids)
        anchor = next((i for i in encode(tokenizer, "a") if i not in special), None)
        if anchor is None:  # no letters in this vocabulary: take any token that is not special
            anchor = next(i for i in range(len(tokenizer)) if i not in special)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        head = tokenizer.decode([anchor], **options)
        whole = tokenizer.batch_decode([[anchor, i] for i in range(len(tokenizer))], **options)
        texts = [text[len(head) :] if text.startswith(head) and "\ufffd" not in text else "" for text in whole]
        _TEXTS[tokenizer] = ["" if i in special else text for i, text in enumerate(texts)]
    return _TEXTS[tokenizer]


def _ends(tokenizer: Any, ids: list[int], text: str, start: int = 0) -> list[float] | None:
    """The character at which each token ends, counted from `start`; plus 0.5 inside a character.

    Returns:
        None if the ids do not decode to `text`.
    """
    detokenizer = Detokenizer(tokenizer)
    ends: list[float] = []
    read = ""
    for token in ids:
        read += detokenizer.push([token])[0]
        ends.append(len(read) + 0.5 if detokenizer.held else len(read))
    read += detokenizer.flush()
    stripped = len(text) - len(read)  # some decoders drop a blank at the beginning
    if text[stripped:] != read or text[:stripped].strip(" ") or stripped < 0:
        return None
    if ends:
        ends[-1] = len(read)
    return [end + stripped + start for end in ends]


def _specials(tokenizer: Any, ids: list[int]) -> int:
    """Number of special tokens in front of the text."""
    special = set(tokenizer.all_special_ids)
    return next((i for i, token in enumerate(ids) if token not in special), len(ids))
