"""What tells one tokenizer from another, in a form that can be written to a file."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from specnb.models.mistral import added_vocab, token_strings
from specnb.models.pair import PROBES
from specnb.text import is_mistral_common, text_tokenizer

_SAMPLED_IDS = 256  # ids whose tokens are part of the digest


class TokenizerIdentity(NamedTuple):
    """A tokenizer's name, for messages, and a digest of what it does."""

    name: str
    digest: str


def identify(tokenizer: Any) -> TokenizerIdentity:
    """The identity of a tokenizer or processor: the ids of `models.pair.PROBES`, and the spelling of sampled ids.

    Raises:
        ValueError: it is neither a tokenizer nor a processor.
    """
    tokenizer = text_tokenizer(tokenizer)
    size = len(tokenizer)
    try:
        known = _IDENTITIES.get(tokenizer)
    except TypeError:  # no weak references to it
        return _identity(tokenizer)
    if known is None or known[0] != size:  # tokens may be added
        known = _IDENTITIES[tokenizer] = size, _identity(tokenizer)
    return known[1]


_IDENTITIES: WeakKeyDictionary[Any, tuple[int, TokenizerIdentity]] = WeakKeyDictionary()


def _identity(tokenizer: Any) -> TokenizerIdentity:
    vocabulary = tokenizer.vocab_size
    ids = list(range(0, vocabulary, max(1, vocabulary // _SAMPLED_IDS)))
    facts = (
        [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROBES],
        token_strings(tokenizer, ids, is_mistral_common(tokenizer)),
        sorted(added_vocab(tokenizer).items()),
    )
    name = str(getattr(tokenizer, "name_or_path", "") or "").replace("\\", "/").rstrip("/").rpartition("/")[2]
    return TokenizerIdentity(
        name or type(tokenizer).__name__, hashlib.sha256(repr(facts).encode("utf-8", "replace")).hexdigest()
    )
