"""Adapters for mistral-common tokenizers (transformers' `MistralCommonBackend`), which lack some methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from specnb.text import BYTE, is_mistral_common, text_tokenizer

_DUPLICATE_MARK = "\0"  # does not occur in byte-level tokens
_BYTE_VOCABS: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def added_vocab(tokenizer: Any) -> dict[str, int]:
    """The added and special tokens with their ids, as `get_added_vocab()` returns them."""
    if is_mistral_common(tokenizer):
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return dict(tokenizer.get_added_vocab())


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token; None if the tokenizer does not know it."""
    if is_mistral_common(tokenizer):  # its own lookup logs a warning for unknown tokens
        known: int | None = added_vocab(tokenizer).get(token, tokenizer.get_vocab().get(token))
        return known
    found = tokenizer.convert_tokens_to_ids(token)
    unknown = found is None or (found == tokenizer.unk_token_id and token != tokenizer.unk_token)
    return None if unknown else int(found)


def token_strings(tokenizer: Any, ids: list[int], decoded: bool) -> list[str]:
    """The tokens of some ids, as the vocabulary writes them.

    Args:
        tokenizer: the tokenizer.
        ids: ids of tokens.
        decoded: decode each token instead, for comparison with another kind of tokenizer.
    """
    if decoded:
        return [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
    return list(tokenizer.convert_ids_to_tokens(ids))


def for_stop_strings(tokenizer: Any) -> Any:
    """A form of a tokenizer or processor that transformers' `StopStringCriteria` can use.

    Raises:
        ValueError: the tokenizer lacks methods that are needed.
    """
    inner = text_tokenizer(tokenizer)
    if is_mistral_common(inner):
        return _ByteLevel(inner)
    require_methods(inner, "stop_strings", "get_vocab", "_convert_id_to_token", "convert_tokens_to_string")
    return inner


def require_methods(tokenizer: Any, what: str, *names: str) -> None:
    """Check that a tokenizer has the attributes that a feature needs.

    Args:
        tokenizer: the tokenizer.
        what: the feature, for the message.
        names: the attributes.

    Raises:
        ValueError: an attribute is missing.
    """
    missing = [name for name in names if not hasattr(tokenizer, name)]
    if missing:
        raise ValueError(
            f"{what} cannot be used with this tokenizer: a {type(tokenizer).__name__} has no {', '.join(missing)}, as "
            "transformers' tokenizers have."
        )


class _ByteLevel:
    """Presents a mistral-common tokenizer as a byte-level one, for `StopStringCriteria`."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import decoders

        if tokenizer not in _BYTE_VOCABS:
            _BYTE_VOCABS[tokenizer] = _byte_vocab(tokenizer)
        self._tokenizer, self._ids = tokenizer, _BYTE_VOCABS[tokenizer]
        self._decoder = decoders.ByteLevel()
        self.backend_tokenizer = SimpleNamespace(decoder=self._decoder)

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])}

    def _convert_id_to_token(self, token: int) -> str:
        return next(name for name, i in self._ids.items() if i == token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return str(self._decoder.decode([token.partition(_DUPLICATE_MARK)[0] for token in tokens]))


def _byte_vocab(tokenizer: Any) -> dict[str, int]:
    """The vocabulary in GPT-2's byte-level spelling, token to id. A token with known bytes gets a mark and its id."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spell = bytes_to_unicode()
    inner, special = tokenizer.tokenizer.instruct_tokenizer.tokenizer, set(tokenizer.all_special_ids)
    table: dict[str, int] = {}
    for i, name in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if i in special:
            read = name.encode()
        elif hasattr(inner, "id_to_byte_piece"):
            read = inner.id_to_byte_piece(i)
        else:  # SentencePiece
            read = bytes([int(name[3:5], 16)]) if BYTE.fullmatch(name) else name.replace("\u2581", " ").encode()
        key = "".join(spell[byte] for byte in read)
        table[key if key not in table else f"{key}{_DUPLICATE_MARK}{i}"] = i
    return table
