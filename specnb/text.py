"""Incremental detokenization, one piece of text per token, and the encoding of prompts. No torch at import time."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens kept when the window shrinks: more than the 4 bytes that a character can span
_WINDOW = 24  # tokens decoded together before the window shrinks
_UNKNOWN_ID_ERRORS = (
    LookupError,
    ValueError,
    TypeError,
    OverflowError,
)  # raised by tokenizers for unknown ids
_SPECIAL: WeakKeyDictionary[Any, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def text_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself, or the one inside a processor.

    Tokenizers are looked at first, since transformers' `MistralCommonBackend` is a tokenizer that has an attribute
    `tokenizer` of another kind.

    Raises:
        ValueError: `tokenizer` is neither a tokenizer nor a processor.
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
    """Whether this is transformers' `MistralCommonBackend`, which lacks methods that other tokenizers have."""
    return any(kind.__name__ == "MistralCommonBackend" for kind in type(tokenizer).__mro__)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer or processor can apply a chat template. mistral-common has its template in code."""
    return _chat_tokenizer(tokenizer) is not None


def _chat_tokenizer(tokenizer: Any) -> Any:
    """The processor or its tokenizer, whichever has a chat template; None if neither has one."""
    for found in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if getattr(found, "chat_template", None) or is_mistral_common(found):
            return found
    return None


class Detokenizer:
    """Decodes token by token. The pieces of all `push` calls and of `flush`, joined, equal `decode(all ids)`.

    A piece is empty while its character is incomplete, and it is never changed later. Each token is decoded together
    with a short window of tokens before it, since a character can span several tokens and decoders strip leading
    blanks. So the work per token does not grow with the text. Byte-fallback tokens (`<0x0A>`) are held back until a
    token of another kind follows, because one invalid byte turns all of them into replacement characters.

    Args:
        tokenizer: a tokenizer or processor.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.tokenizer = text_tokenizer(tokenizer)
        self._special = _special_ids(self.tokenizer) if skip_special_tokens else frozenset()
        self._options = _decode_options(self.tokenizer, skip_special_tokens)
        self._kinds: dict[int, str] = {}
        self._reset()

    def _reset(self) -> None:
        self._ids: list[int] = []  # the window
        self._sent = 0  # characters of the window's text that were already returned
        self._limit = _WINDOW

    def push(self, ids: Iterable[int]) -> list[str]:
        """One piece of text per id."""
        return [self._push(int(token)) for token in ids]

    @property
    def held(self) -> bool:
        """Whether text is held back, such as an incomplete character."""
        return bool(self._decode(self._ids)[self._sent :])

    def peek(self, ids: Iterable[int]) -> list[str]:
        """The pieces that `push(ids)` and `flush()` would return, without changing the state."""
        saved = (self._ids, self._sent, self._limit)
        self._ids = list(self._ids)
        pieces = _append_to_last(self.push(ids), self.flush())
        self._ids, self._sent, self._limit = saved
        return pieces

    def flush(self) -> str:
        """The text that is still held back. A new text begins afterwards."""
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
        # Only a replacement character at the end can still change.
        stable = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._sent : stable]
        self._sent = max(self._sent, stable)
        if len(self._ids) >= self._limit:
            self._shrink_window(text)
        return piece

    def _shrink_window(self, text: str) -> None:
        """Shorten the window where the rest decodes to the same text alone as with the tokens before it."""
        held = len(text) - self._sent
        for keep in range(_CONTEXT, 2 * _CONTEXT):
            tail = self._decode(self._ids[-keep:])
            if len(tail) > held and text.endswith(tail):
                self._ids, self._sent, self._limit = self._ids[-keep:], len(tail) - held, _WINDOW
                return
        self._limit = 2 * len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, **self._options))

    def _kind(self, token: int) -> str:
        """The kind of a token: "byte" (byte fallback), "text", or "" for an id that the tokenizer does not know."""
        known = self._kinds.get(token)
        if known is None:
            try:
                name = self.tokenizer.convert_ids_to_tokens(token)
            except _UNKNOWN_ID_ERRORS:
                known = ""
            else:
                known = "byte" if isinstance(name, str) and BYTE.fullmatch(name) else "text"
            self._kinds[token] = known
        return known


def pieces(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """The text of each token. Joined, the texts are the decoded whole; the last one has any text held back."""
    detokenizer = Detokenizer(tokenizer)
    return tuple(_append_to_last(detokenizer.push(ids), detokenizer.flush()))


def step_pieces(tokenizer: Any, steps: Iterable[Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The texts of a row's tokens from its steps.

    Args:
        tokenizer: a tokenizer or processor.
        steps: the row's `Step` objects.

    Returns:
        The text of each emitted token, and per step the text of each rejected one.
    """
    detokenizer = Detokenizer(tokenizer)
    emitted: list[str] = []
    rejected: list[tuple[str, ...]] = []
    for step in steps:
        emitted += detokenizer.push(step.emitted[: step.accepted])
        rejected.append(tuple(detokenizer.peek(step.rejected)) if step.rejected else ())
        emitted += detokenizer.push(step.emitted[step.accepted :])
    return tuple(_append_to_last(emitted, detokenizer.flush())), tuple(rejected)


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token by itself, as it reads within a text; special and unknown tokens have their names.

    Args:
        tokenizer: a tokenizer or processor.
        ids: the tokens.
    """
    found = sorted(set(ids))
    detokenizer = Detokenizer(tokenizer)
    for token in found:  # decoders strip a blank that leads a text, so each token is read after another
        if "".join(detokenizer.push([token])) and not detokenizer.held:
            break
        detokenizer.flush()
    return {token: "".join(detokenizer.peek([token])) or _name(detokenizer, token) for token in found}


def _name(detokenizer: Detokenizer, token: int) -> str:
    try:
        name = detokenizer.tokenizer.convert_ids_to_tokens(token)
    except _UNKNOWN_ID_ERRORS:
        name = None
    return name if isinstance(name, str) else f"<{token}>"


def prompt_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a prompt, special tokens included."""
    found = text_tokenizer(tokenizer)
    return str(found.decode(list(ids), **_decode_options(found, skip=False)))


def prompt_inputs(
    tokenizer: Any, prompt: str, *, chat: bool | None = None, system: str | None = None, device: Any = None
) -> dict[str, Any]:
    """The arguments of `generate` for a prompt.

    Args:
        tokenizer: a tokenizer or processor.
        prompt: the text.
        chat: True sends the text as the user's message of a chat, False sends it as it is. None means True if the
            tokenizer has a chat template.
        system: the system message of the chat.
        device: where the ids are put.

    Returns:
        "inputs" with the text, or for a chat "input_ids" and "attention_mask", both `[1, length]`.

    Raises:
        ValueError: a chat or a system message is asked for without a chat template, or the template fails.
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
    except Exception as error:  # templates raise errors of any kind, for a system message for example
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"this model's chat template does not take {_roles(messages)}: {said}") from error
    # Without a mask, generate() would take pad ids within the template for padding.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _append_to_last(texts: list[str], rest: str) -> list[str]:
    if rest and texts:
        texts[-1] += rest
    return texts


def _roles(messages: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"a {message['role']} message" for message in messages)


def _decode_options(tokenizer: Any, skip: bool) -> dict[str, bool]:
    """The options of `decode` that this tokenizer accepts."""
    wanted = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    try:
        taken = inspect.signature(tokenizer.decode).parameters
    except (TypeError, ValueError):  # not written in Python
        return wanted
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in taken}


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that `skip_special_tokens=True` leaves out, cached until the special tokens change."""
    candidates = frozenset(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if isinstance(added, Mapping):
        candidates |= {token for token, entry in added.items() if getattr(entry, "special", False)}
    try:
        known = _SPECIAL.get(tokenizer)
    except TypeError:  # the tokenizer does not support weak references
        return _skipped_ids(tokenizer, candidates)
    if known is None or known[0] != candidates:
        known = _SPECIAL[tokenizer] = candidates, _skipped_ids(tokenizer, candidates)
    return known[1]


def _skipped_ids(tokenizer: Any, candidates: frozenset[int]) -> frozenset[int]:
    options = _decode_options(tokenizer, skip=True)
    if "skip_special_tokens" not in options:
        return candidates
    return frozenset(token for token in candidates if tokenizer.decode([token], **options) == "")
