"""Ids to text as they come, one piece per token, and prompts to ids. No torch at import time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens of context kept: more than the 4 bytes a character can span
_WINDOW = 24  # tokens decoded together before the window is cut


class Detokenizer:
    """Decodes token by token: the pieces of all pushes and of `flush()`, joined, equal `decode(all ids)`.

    A piece is empty while its character is incomplete, and is never revised. What decoding one token alone gets wrong
    (characters over several tokens, a leading blank that the decoder strips) is avoided by decoding a short window
    again, so the work per token does not grow with the text. Runs of byte-fallback tokens (`<0x0A>`) are held until
    the run ends: their decoder turns the *whole* run into replacement characters when any byte of it is invalid.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor decodes through its tokenizer
        self._skip = skip_special_tokens
        self._special = _special_ids(self._tokenizer) if skip_special_tokens else frozenset()
        self._bytes: dict[int, bool] = {}
        self._reset()

    def _reset(self) -> None:
        self._ids: list[int] = []  # the window
        self._sent = 0  # characters of the window's text already given out
        self._limit = _WINDOW

    def push(self, ids: Iterable[int]) -> list[str]:
        """One piece of text per id."""
        return [self._push(int(token)) for token in ids]

    @property
    def held(self) -> bool:
        """Whether text is held back, an unfinished character say."""
        return bool(self._decode(self._ids)[self._sent :])

    def peek(self, ids: Iterable[int]) -> list[str]:
        """The pieces that `ids` would get if pushed now, unfinished characters included; changes nothing."""
        saved = (self._ids, self._sent, self._limit)
        self._ids = list(self._ids)
        pieces = _closed(self.push(ids), self.flush())
        self._ids, self._sent, self._limit = saved
        return pieces

    def flush(self) -> str:
        """The text still held back, unfinished bytes as the tokenizer shows them; afterwards a new text begins."""
        rest = self._decode(self._ids)[self._sent :]
        self._reset()
        return rest

    def _push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._ids.append(token)
        if self._is_byte(token):
            return ""
        text = self._decode(self._ids)
        # Only a last replacement character can still turn into something else.
        stable = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._sent : stable]
        self._sent = max(self._sent, stable)
        if len(self._ids) >= self._limit:
            self._cut(text)
        return piece

    def _cut(self, text: str) -> None:
        """Shorten the window at a place where both sides decode alone as they do together."""
        held = len(text) - self._sent
        for keep in range(_CONTEXT, 2 * _CONTEXT):
            tail = self._decode(self._ids[-keep:])
            if len(tail) > held and text.endswith(tail):
                self._ids, self._sent, self._limit = self._ids[-keep:], len(tail) - held, _WINDOW
                return
        self._limit = 2 * len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return str(text)

    def _is_byte(self, token: int) -> bool:
        known = self._bytes.get(token)
        if known is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            known = self._bytes[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return known


def pieces(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """The text of each token; joined, they are the decoded whole (text held back at the end goes to the last one)."""
    detokenizer = Detokenizer(tokenizer)
    return tuple(_closed(detokenizer.push(ids), detokenizer.flush()))


def step_pieces(tokenizer: Any, steps: Iterable[Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """One row's `Row.pieces` and `Row.rejected_pieces` (a tuple per step) from its steps."""
    detokenizer = Detokenizer(tokenizer)
    emitted: list[str] = []
    rejected: list[tuple[str, ...]] = []
    for step in steps:
        emitted += detokenizer.push(step.emitted[: step.accepted])
        rejected.append(tuple(detokenizer.peek(step.rejected)) if step.rejected else ())
        emitted += detokenizer.push(step.emitted[step.accepted :])
    return tuple(_closed(emitted, detokenizer.flush())), tuple(rejected)


def prompt_inputs(
    tokenizer: Any, prompt: str, *, chat: bool | None = None, system: str | None = None, device: Any = None
) -> dict[str, Any]:
    """The arguments of `generate` for a prompt: the text itself, or the ids of a chat with it as the user's message.

    `chat=None` means: a chat when the tokenizer has a chat template. Raises ValueError for a chat or a system message
    without template.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt must be one text, not a {type(prompt).__name__}; give several one by one.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not has_template and (chat or system is not None):
        what = "a system message needs" if system is not None else "a chat needs"
        raise ValueError(f"{what} a chat template, and this model's tokenizer has none.")
    if system is not None and chat is False:
        raise ValueError("a system message needs the chat template: leave the chat on.")
    if not (has_template if chat is None else chat):
        return {"inputs": prompt}
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    # With the mask: without it, generate() takes pad ids within the template for padding.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _closed(texts: list[str], rest: str) -> list[str]:
    if rest and texts:
        texts[-1] += rest
    return texts


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that `skip_special_tokens=True` leaves out."""
    candidates = set(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    candidates |= {token for token, entry in added.items() if getattr(entry, "special", False)}
    return frozenset(token for token in candidates if tokenizer.decode([token], skip_special_tokens=True) == "")
