"""Ids to text as they come, one piece per token, and prompts to ids. No torch at import time."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens of context kept: more than the 4 bytes a character can span
_WINDOW = 24  # tokens decoded together before the window is cut
_UNKNOWN_ID_ERRORS = (
    LookupError,
    ValueError,
    TypeError,
    OverflowError,
)  # what tokenizers raise for an id that they do not have
_SPECIAL: WeakKeyDictionary[Any, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def text_tokenizer(tokenizer: Any) -> Any:
    """What turns ids into text and back: the tokenizer itself, or the one inside a processor.

    A tokenizer may have an attribute `tokenizer` too (transformers' `MistralCommonBackend`), which is something else.
    Raises ValueError, with what to give instead, for a thing that is neither.
    """
    for found in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if hasattr(found, "decode") and hasattr(found, "convert_ids_to_tokens"):
            return found
    what = f"the name {tokenizer!r}" if isinstance(tokenizer, str) else f"a {type(tokenizer).__name__}"
    raise ValueError(
        f"the tokenizer must be one of transformers' tokenizers or processors, not {what}: load it with "
        "AutoTokenizer.from_pretrained(NAME), or wrap it (PreTrainedTokenizerFast(tokenizer_object=...), "
        "MistralCommonBackend)."
    )


def is_mistral_common(tokenizer: Any) -> bool:
    """Whether this is transformers' `MistralCommonBackend`, which does without parts that other tokenizers have."""
    return any(kind.__name__ == "MistralCommonBackend" for kind in type(tokenizer).__mro__)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer (or processor) can make a chat of messages; Mistral's own has its template in code."""
    return _chat_tokenizer(tokenizer) is not None


def _chat_tokenizer(tokenizer: Any) -> Any:
    """The processor, or its tokenizer, whichever has the chat template; None if neither has one."""
    for found in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if getattr(found, "chat_template", None) or is_mistral_common(found):
            return found
    return None


class Detokenizer:
    """Decodes token by token: the pieces of all pushes and of `flush()`, joined, equal `decode(all ids)`.

    A piece is empty while its character is incomplete, and is never revised. What decoding one token alone gets wrong
    (characters over several tokens, a leading blank that the decoder strips) is avoided by decoding a short window
    again, so the work per token does not grow with the text. Runs of byte-fallback tokens (`<0x0A>`) are held until
    the run ends: their decoder turns the *whole* run into replacement characters when any byte of it is invalid.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = text_tokenizer(tokenizer)
        self._special = _special_ids(self._tokenizer) if skip_special_tokens else frozenset()
        self._options = _decode_options(self._tokenizer, skip_special_tokens)
        self._kinds: dict[int, str] = {}
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
        pieces = _append_to_last(self.push(ids), self.flush())
        self._ids, self._sent, self._limit = saved
        return pieces

    def flush(self) -> str:
        """The text still held back, unfinished bytes as the tokenizer shows them; afterwards a new text begins."""
        rest = self._decode(self._ids)[self._sent :]
        self._reset()
        return rest

    def _push(self, token: int) -> str:
        kind = "" if token in self._special else self._kind(token)
        if not kind:
            return ""
        self._ids.append(token)
        if kind == "byte":
            return ""
        text = self._decode(self._ids)
        # Only a last replacement character can still turn into something else.
        stable = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._sent : stable]
        self._sent = max(self._sent, stable)
        if len(self._ids) >= self._limit:
            self._shrink_window(text)
        return piece

    def _shrink_window(self, text: str) -> None:
        """Shorten the window at a place where both sides decode alone as they do together."""
        held = len(text) - self._sent
        for keep in range(_CONTEXT, 2 * _CONTEXT):
            tail = self._decode(self._ids[-keep:])
            if len(tail) > held and text.endswith(tail):
                self._ids, self._sent, self._limit = self._ids[-keep:], len(tail) - held, _WINDOW
                return
        self._limit = 2 * len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, **self._options))

    def _kind(self, token: int) -> str:
        """ "byte" for a byte-fallback token, "text" for others, "" for an id that the tokenizer does not have."""
        known = self._kinds.get(token)
        if known is None:
            try:
                name = self._tokenizer.convert_ids_to_tokens(token)
            except _UNKNOWN_ID_ERRORS:
                known = ""
            else:
                known = "byte" if isinstance(name, str) and BYTE.fullmatch(name) else "text"
            self._kinds[token] = known
        return known


def pieces(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """The text of each token; joined, they are the decoded whole (text held back at the end goes to the last one)."""
    detokenizer = Detokenizer(tokenizer)
    return tuple(_append_to_last(detokenizer.push(ids), detokenizer.flush()))


def step_pieces(tokenizer: Any, steps: Iterable[Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """One row's `RowResult.pieces` and `.rejected_pieces` (a tuple per step) from its steps."""
    detokenizer = Detokenizer(tokenizer)
    emitted: list[str] = []
    rejected: list[tuple[str, ...]] = []
    for step in steps:
        emitted += detokenizer.push(step.emitted[: step.accepted])
        rejected.append(tuple(detokenizer.peek(step.rejected)) if step.rejected else ())
        emitted += detokenizer.push(step.emitted[step.accepted :])
    return tuple(_append_to_last(emitted, detokenizer.flush())), tuple(rejected)


def prompt_inputs(
    tokenizer: Any, prompt: str, *, chat: bool | None = None, system: str | None = None, device: Any = None
) -> dict[str, Any]:
    """The arguments of `generate` for a prompt: the text itself, or the ids of a chat with it as the user's message.

    `chat=None` means: a chat when the tokenizer has a chat template. Raises ValueError for a chat or a system message
    without template.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt must be one text, not a {type(prompt).__name__}; give several one by one.")
    template = _chat_tokenizer(tokenizer)
    if template is None and (chat or system is not None):
        what = "a system message needs" if system is not None else "a chat needs"
        raise ValueError(f"{what} a chat template, and this model's tokenizer has none.")
    if system is not None and chat is False:
        raise ValueError("a system message needs the chat template: leave the chat on.")
    if template is None or chat is False:
        return {"inputs": prompt}
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    try:
        encoded = template.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:  # of the template's own kind: it may take no system message, say
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"this model's chat template does not take {_roles(messages)}: {said}") from error
    # With the mask: without it, generate() takes pad ids within the template for padding.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _append_to_last(texts: list[str], rest: str) -> list[str]:
    if rest and texts:
        texts[-1] += rest
    return texts


def _roles(messages: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"a {message['role']} message" for message in messages)


def _decode_options(tokenizer: Any, skip: bool) -> dict[str, bool]:
    """The options of `decode` as far as this tokenizer's takes them."""
    wanted = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    try:
        taken = inspect.signature(tokenizer.decode).parameters
    except (TypeError, ValueError):  # not written in Python
        return wanted
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in taken}


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that `skip_special_tokens=True` leaves out; remembered while the special tokens stay the same."""
    candidates = frozenset(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if isinstance(added, Mapping):
        candidates |= {token for token, entry in added.items() if getattr(entry, "special", False)}
    try:
        known = _SPECIAL.get(tokenizer)
    except TypeError:  # no weak references to it
        return _skipped_ids(tokenizer, candidates)
    if known is None or known[0] != candidates:
        known = _SPECIAL[tokenizer] = candidates, _skipped_ids(tokenizer, candidates)
    return known[1]


def _skipped_ids(tokenizer: Any, candidates: frozenset[int]) -> frozenset[int]:
    options = _decode_options(tokenizer, skip=True)
    if "skip_special_tokens" not in options:
        return candidates
    return frozenset(token for token in candidates if tokenizer.decode([token], **options) == "")
