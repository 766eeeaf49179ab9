"""transformers' own implementation of a method, called as its documentation says, on the same models."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from transformers.utils import logging

from specnb.models.mtp import mtp_layer_patterns
from specnb.options import default, greedy_at_zero
from specnb.runtime.module_view import module_view

_DRAFT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class Reference:
    """Runs transformers' `generate()` with what an arm of a comparison asks specnb for.

    Who drafts (early exit: the target itself) is a shallow copy with a generation config of its own, where transformers looks for
    draft lengths (and writes to them). `adaptive` schedules exist here only; for those, and where no length is given, transformers'
    defaults apply.
    """

    def __init__(self, pair_or_model: Any, common: Mapping[str, Any]) -> None:
        self.pair, self.target = pair_or_model, getattr(pair_or_model, "target", pair_or_model)
        self.common = {
            name: value
            for name, value in common.items()
            if name not in ("cancel", "seed", "tokenizer", "assistant_tokenizer")
        }
        self.given = common
        self.failed: dict[str, str] = {}  # why transformers cannot do it, by label

    def run(
        self, label: str, arm: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], tokens: int
    ) -> tuple[list[list[int]], float] | None:
        """The new ids of the first row of each prompt, and the seconds of the calls; None where transformers raises."""
        if label in self.failed:
            return None
        try:
            model, own = self.arguments(arm)
            ids, seconds = [], 0.0
            with torch.random.fork_rng(), _no_warnings():
                torch.manual_seed(int(self.given.get("seed") or 0))
                for one in inputs:
                    prompt = one.get("input_ids", one.get("inputs"))
                    began = time.perf_counter()
                    out = model.generate(**one, **greedy_at_zero({**self.common, "max_new_tokens": tokens, **own}))
                    seconds += time.perf_counter() - began
                    ids.append(out[0, prompt.shape[1] :].tolist())
        except Exception as error:
            self.failed[label] = shorten(f"{type(error).__name__}: {error}", 80)
            return None
        return ids, seconds

    def arguments(self, arm: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model to call, and the arguments that ask transformers for the arm's method."""
        method, target = arm.get("method", "plain"), self.target
        if arm.get("verification", "token") != "token":
            raise ValueError("transformers has no block verification")
        draft = {name: arm[name] for name in _DRAFT if arm.get(name) is not None}
        if draft.get("num_assistant_tokens_schedule") == "adaptive":
            del draft["num_assistant_tokens_schedule"]
        elif "num_assistant_tokens" in draft:
            draft.setdefault("num_assistant_tokens_schedule", "constant")
        rest = {
            name: value
            for name, value in arm.items()
            if name not in ("method", "verification", "assistant_model", "num_assistant_tokens", *_DRAFT)
        }
        if method == "plain":
            return target, rest
        if method == "prompt_lookup":
            length = (
                arm.get("num_assistant_tokens")
                or arm.get("prompt_lookup_num_tokens")
                or default("num_assistant_tokens", method)
            )
            return target, {**rest, "prompt_lookup_num_tokens": length}
        if method == "early_exit":
            return _with_generation_config(target, draft), rest
        if method == "mtp_layers":
            return _with_mtp_patterns(target), {**rest, "use_mtp": True}
        assistant = arm.get("assistant_model", getattr(self.pair, "assistant", None))
        if method == "universal":
            rest |= {
                "tokenizer": self._tokenizer("tokenizer"),
                "assistant_tokenizer": self._tokenizer("assistant_tokenizer"),
            }
        return target, {**rest, "assistant_model": _with_generation_config(assistant, draft)}

    def _tokenizer(self, name: str) -> Any:
        return self.given.get(name) or getattr(self.pair, name, None)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """transformers warns of what its own assisted generation does."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _with_generation_config(model: Any, draft: Mapping[str, Any]) -> Any:
    """A shallow copy whose own generation config says how to draft."""
    theirs = copy.copy(model)
    theirs.generation_config = copy.deepcopy(model.generation_config)
    theirs.generation_config.update(**draft)
    return theirs


def _with_mtp_patterns(model: Any) -> Any:
    """transformers finds the MTP layers of the released depths only; here it is told this model's."""
    known = module_view(model, {})
    known._keys_to_ignore_on_load_unexpected = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *mtp_layer_patterns(model),
    ]
    return known
