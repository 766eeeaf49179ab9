"""A target with its draft model, and the check that the two fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from specnb.models.mistral import added_vocab, require_methods, token_id, token_strings
from specnb.text import is_mistral_common, text_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBES = (
    "The quick brown fox jumps over the lazy dog; it's 3,141.59 metres (about 10000 ft)!",
    "Ünïcödé, naïve café, straße, ığüşöç, Привет мир, 你好世界, こんにちは, مرحبا, नमस्ते, 😀🎉",
    "def add(a, b):\n    return a + b  # sum\n\n\tif x != None and y[0] == '\\n': print(f\"{x:>8}\")\r\n",
    "  two  blanks   three    four, 2024-01-31 00:00 1234567890 0x7f 1e-9\n\n\n end ",
)
"""Texts for which tokenizers with different rules or merges are likely to give different ids."""

_SPECIAL = ("bos", "eos", "pad", "unk")
_NUM_SAMPLED_IDS = 1024  # ids whose tokens are compared


@dataclass(frozen=True)
class PairCheck:
    """What `check_pair` found.

    Attributes:
        tokenizers: whether the tokenizers of target and draft model do the same; "unknown" without a draft model or
            without both tokenizers.
        difference: where they differ, in words.
    """

    tokenizers: Literal["same", "different", "unknown"]
    difference: str = ""


@dataclass
class Pair:
    """A target with its tokenizer and, if there is one, a draft model with its tokenizer.

    Attributes:
        target: the model whose distribution is followed.
        tokenizer: the target's tokenizer or processor.
        assistant: the draft model.
        assistant_tokenizer: the draft model's tokenizer or processor.
        name: the name that was loaded.
        card: a few lines that say what the weights are, and their licence.
    """

    target: PreTrainedModel
    tokenizer: Any
    assistant: PreTrainedModel | None = None
    assistant_tokenizer: Any = None
    name: str = ""
    card: str = ""

    def describe(self) -> str:
        """A few lines: class, layers, parameters, dtype and device of both models, then the card."""
        lines = [f"{self.name or 'target'}: {_summary(self.target)}"]
        if self.assistant is not None:
            shared = {p.untyped_storage().data_ptr() for p in self.target.parameters()}
            own = any(p.untyped_storage().data_ptr() not in shared for p in self.assistant.parameters())
            lines.append(f"draft: {_summary(self.assistant)}{'' if own else ', sharing the weights of the target'}")
        return "\n".join([*lines, *([self.card] if self.card else [])])

    def __repr__(self) -> str:
        drafted = f", draft {_summary(self.assistant)}" if self.assistant is not None else ""
        return f"Pair({self.name or 'target'}: {_summary(self.target)}{drafted})"


def _summary(model: PreTrainedModel) -> str:
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", "?")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{type(model).__name__}, {layers} layers, {millions:,.1f}M parameters, {dtype} on {model.device}"


def check_pair(target: Any, tokenizer: Any = None, assistant: Any = None, assistant_tokenizer: Any = None) -> PairCheck:
    """Check that a draft model can draft for a target. The models are not run.

    Tokenizers are compared by what they do (`tokenizer_difference`), not by size: padded embeddings are fine, and equal
    sizes prove nothing. Pairs whose tokenizers differ use universal decoding.

    Args:
        target: the target.
        tokenizer: the target's tokenizer or processor.
        assistant: the draft model.
        assistant_tokenizer: the draft model's tokenizer or processor.

    Returns:
        How the tokenizers compare.

    Raises:
        ValueError: the draft model cannot draft for the target.
    """
    from specnb.models.eagle3 import check_eagle3, is_eagle3
    from specnb.models.gemma4 import check_assistant, is_gemma4_assistant

    if is_eagle3(target):
        raise ValueError(
            "an EAGLE-3 drafter reads the states of the model that it was made for; it cannot generate alone. Load "
            "that model as the target, with this as its assistant."
        )
    if is_gemma4_assistant(target):
        raise ValueError(
            f"{type(target).__name__} is a drafter that reads a Gemma 4 model's keys and values; it cannot generate "
            "alone. Load the Gemma 4 model as the target, with this as its assistant."
        )
    _check_weights_present(target, "the target")
    if assistant is None:
        return PairCheck("unknown")
    _check_weights_present(assistant, "the draft model")
    if assistant.config.is_encoder_decoder and not target.config.is_encoder_decoder:
        raise ValueError(
            f"the draft model ({type(assistant).__name__}) is an encoder-decoder model, the target "
            f"({type(target).__name__}) is not: give a decoder-only draft model."
        )
    if is_eagle3(assistant):
        check_eagle3(target, assistant)
        return PairCheck("unknown")
    if is_gemma4_assistant(assistant):
        check_assistant(target, assistant)
    if assistant.get_output_embeddings() is None:
        raise ValueError(
            f"the draft model ({type(assistant).__name__}) has no language-model head, so it cannot propose tokens: "
            "load it with AutoModelForCausalLM."
        )
    if tokenizer is None or assistant_tokenizer is None:
        return PairCheck("unknown")
    found = tokenizer_difference(tokenizer, assistant_tokenizer)
    return PairCheck("same") if found is None else PairCheck("different", found)


def tokenizer_difference(tokenizer: Any, other: Any) -> str | None:
    """Where two tokenizers differ in what they do.

    Compared are the ids of `PROBES`, the ids of special tokens, and the spelling of tokens spread over the vocabulary.
    Not compared are the size, special tokens in front of a text (a draft model is given ids, not text), and added
    tokens that only one of the two knows, except bos and eos.

    Args:
        tokenizer: the target's tokenizer or processor.
        other: the draft model's.

    Returns:
        The first difference, in words; None if there is none.
    """
    one, two = text_tokenizer(tokenizer), text_tokenizer(other)
    if one is two:
        return None
    for given in (one, two):
        if not is_mistral_common(given):
            require_methods(
                given, "a draft model", "encode", "get_added_vocab", "convert_tokens_to_ids", "vocab_size", "__len__"
            )
    known, stamp = _COMPARED.setdefault(one, WeakKeyDictionary()), (_fingerprint(one), _fingerprint(two))
    if known.get(two, (None,))[0] != stamp:
        known[two] = stamp, _difference(one, two)
    found: str | None = known[two][1]
    return found


_COMPARED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[Any, str | None]]] = WeakKeyDictionary()


def _fingerprint(tokenizer: Any) -> tuple[Any, ...]:
    """A value that changes when tokens are added or special tokens change."""
    roles = tuple(
        (getattr(tokenizer, f"{role}_token", None), getattr(tokenizer, f"{role}_token_id", None)) for role in _SPECIAL
    )
    return len(tokenizer), tuple(sorted(added_vocab(tokenizer).items())), roles


def _difference(one: Any, two: Any) -> str | None:
    for text in PROBES:
        ids, their_ids = _encode(one, text), _encode(two, text)
        if ids != their_ids:
            at = next((i for i, (a, b) in enumerate(zip(ids, their_ids, strict=False)) if a != b), 0)
            return (
                f"the text {_excerpt(text)} becomes the ids {_window(ids, at)} with the target's and "
                f"{_window(their_ids, at)} with the draft's{f' (from token {at} on)' if at else ''}"
            )
    return next(_special_differences(one, two), None) or _spelling_difference(one, two)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _special_differences(one: Any, two: Any) -> Iterator[str]:
    """Added and special tokens with different ids, and bos or eos tokens that only one tokenizer knows."""
    known, theirs = added_vocab(one), added_vocab(two)
    for token in sorted(known.keys() & theirs.keys()):
        if known[token] != theirs[token]:
            ids = f"id {known[token]} with the target's and {theirs[token]} with the draft's"
            yield f"the special token {token!r} has {ids}"
    for role in _SPECIAL:
        for owner, peer, whose, others in ((one, two, "target's", "draft's"), (two, one, "draft's", "target's")):
            own: str | None = getattr(owner, f"{role}_token", None)
            own_id: int | None = getattr(owner, f"{role}_token_id", None)
            if own is None or own_id is None:
                continue
            peer_id = token_id(peer, own)
            if peer_id is None and role in ("bos", "eos"):
                yield f"the {whose} {role} token {own!r} (id {own_id}) is unknown to the {others}"
            elif peer_id is not None and peer_id != own_id:
                yield f"the {whose} {role} token {own!r} has id {own_id}, but {peer_id} with the {others}"


def _spelling_difference(one: Any, two: Any) -> str | None:
    """The first id, of ids spread over the vocabulary, that stands for different tokens."""
    added = set(added_vocab(one).values()) | set(added_vocab(two).values())
    top = min(one.vocab_size, two.vocab_size)
    ids = [i for i in range(0, top, max(1, top // _NUM_SAMPLED_IDS)) if i not in added]
    decoded = is_mistral_common(one) != is_mistral_common(two)  # the two kinds spell tokens differently
    for i, token, their_token in zip(
        ids, token_strings(one, ids, decoded), token_strings(two, ids, decoded), strict=True
    ):
        if token != their_token:
            return f"id {i} is the token {token!r} with the target's and {their_token!r} with the draft's"
    return None


def _excerpt(text: str, length: int = 40) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")


def _window(ids: list[int], at: int, width: int = 6) -> str:
    """A few ids around position `at`, with dots where others are left out."""
    start = max(0, at - 1)
    shown = ", ".join(map(str, ids[start : start + width]))
    return f"[{'..., ' if start else ''}{shown}{', ...' if start + width < len(ids) else ''}]"


def _check_weights_present(model: Any, who: str) -> None:
    """Raise ValueError if parameters are on the meta device and no hook of accelerate loads them."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    from specnb import compat  # needs torch

    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        parts = name.split(".")[:-1]
        owners = (modules[".".join(parts[:depth])] for depth in range(len(parts), -1, -1))
        if not any(compat.hook_of(owner) is not None for owner in owners):
            raise ValueError(
                f"{who} ({type(model).__name__}) has no real weights: {name} is on the meta device and nothing will "
                "load it. Load the model with from_pretrained() (device_map= offloads what does not fit)."
            )
