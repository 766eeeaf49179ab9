"""Runs transformers' own implementation of a method on the same models, called as its documentation says."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from transformers.utils import logging

from specnb import compat
from specnb.models.mtp import mtp_layer_patterns
from specnb.options import default, greedy_at_zero, method_info
from specnb.runtime.module_view import module_view

_DRAFT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class Reference:
    """Runs transformers' `generate()` with the options that a run of a comparison gives to specnb.

    transformers reads draft lengths from the generation config of the drafter, and writes to it. So the drafter (in
    early exit, the target) is a shallow copy with a generation config of its own. transformers' defaults apply where no
    length is given, and for `adaptive` schedules, which transformers does not have.

    Args:
        pair_or_model: a `Pair`, or a target.
        common: options of all runs.

    Attributes:
        failed: by label of the run, why transformers cannot do it.
    """

    def __init__(self, pair_or_model: Any, common: Mapping[str, Any]) -> None:
        self.pair, self.target = pair_or_model, getattr(pair_or_model, "target", pair_or_model)
        self.common = {
            name: value
            for name, value in common.items()
            if name not in ("cancel", "seed", "tokenizer", "assistant_tokenizer")
        }
        self.given = common
        self.failed: dict[str, str] = {}

    def run(
        self, label: str, arguments: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], tokens: int
    ) -> tuple[list[list[int]], float] | None:
        """Generate from all prompts.

        Args:
            label: the label of the run.
            arguments: the run's arguments of `specnb.generate`.
            inputs: the encoded prompts.
            tokens: `max_new_tokens`.

        Returns:
            The generated ids of the first row of each prompt, and the seconds of all calls; None where transformers
            raises, with the reason in `failed`.
        """
        if label in self.failed:
            return None
        try:
            model, own = self.reference_arguments(arguments)
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

    def reference_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model to call, and the arguments that select the run's method in transformers.

        Raises:
            ValueError: transformers does not have what the run asks for.
        """
        method, target = arguments.get("method", "plain"), self.target
        info = method_info(method)
        if info.factory is not None or info.parts is not None:
            raise ValueError(f"transformers does not have {'hybrids' if info.parts else 'this drafter'}")
        if method == "eagle3":
            raise ValueError("transformers has no EAGLE-3 drafters")
        if arguments.get("verification", default("verification", method)) != "token":
            raise ValueError("transformers has no block verification")
        if method == "suffix":
            raise ValueError("transformers has no suffix decoding")
        draft = {name: arguments[name] for name in _DRAFT if arguments.get(name) is not None}
        if draft.get("num_assistant_tokens_schedule") == "adaptive":
            del draft["num_assistant_tokens_schedule"]
        elif "num_assistant_tokens" in draft:
            draft.setdefault("num_assistant_tokens_schedule", "constant")
        rest = {
            name: value
            for name, value in arguments.items()
            if name not in ("method", "verification", "assistant_model", "num_assistant_tokens", *_DRAFT)
        }
        if method == "plain":
            return target, rest
        if method == "prompt_lookup":
            length = (
                arguments.get("num_assistant_tokens")
                or arguments.get("prompt_lookup_num_tokens")
                or default("num_assistant_tokens", method)
            )
            return target, {**rest, "prompt_lookup_num_tokens": length}
        if method == "early_exit":
            return _with_generation_config(target, draft), rest
        if method == "mtp_layers":
            return _with_mtp_patterns(target), {**rest, "use_mtp": True}
        assistant = arguments.get("assistant_model", getattr(self.pair, "assistant", None))
        if method == "dflash" and type(assistant).__module__.startswith("specnb."):
            raise ValueError("transformers has no DFlash drafters but its own")
        if method == "dflash":
            return target, {**rest, "assistant_model": assistant, "speculation_type": "dflash"}
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
    """Suppress the warnings of transformers' assisted generation."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _with_generation_config(model: Any, draft: Mapping[str, Any]) -> Any:
    """A shallow copy of a drafter with its own generation config, updated with drafting options."""
    configured = copy.copy(model)
    configured.generation_config = copy.deepcopy(model.generation_config)
    configured.generation_config.update(**draft)
    return configured


def _with_mtp_patterns(model: Any) -> Any:
    """A view of a model in which transformers finds the MTP layers; by itself it only knows released models' depths."""
    known = module_view(model, {})
    compat.set_ignored_keys(known, compat.ignored_keys(model) + mtp_layer_patterns(model))
    return known
