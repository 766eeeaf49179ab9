"""A call that can be made again from other tokens: what `GenerationResult.branch` runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from specnb import compat
from specnb.call.inputs import override_configs
from specnb.call.method_selection import specnb_options
from specnb.trace import GenerationResult

_PROMPT = ("inputs", "input_ids", "attention_mask", "inputs_embeds", "position_ids", "cache_position")
_CACHES = ("past_key_values", "cache")
_MIN_NEW_TOKENS = 16  # so that a branch at the end of a run has something to show


def model_name(model: Any, name: str = "") -> str:
    """The name of a model: `name`, or what it was loaded from, without folders of this machine; else its class."""
    name = name or str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if PurePath(name).is_absolute() or name.startswith((".", "~")):
        name = PurePath(name).name
    return name or type(model).__name__


@dataclass
class Call:
    """A call of `specnb.generate` without its prompt. It keeps no model in memory.

    Args:
        model, assistant: the models as they were given.
        arguments: arguments of `specnb.generate` that have names of their own there, but for models and functions.
        options: all other options of the call.
        names: names of target and assistant.
        max_new_tokens: how many tokens the call could generate.
        eos: ids that end a text.
        seed: the seed that was used.
    """

    model: weakref.ref[Any]
    assistant: weakref.ref[Any] | None
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    names: tuple[str, str]
    max_new_tokens: int = 0
    eos: Sequence[int] = ()
    seed: int | None = None

    def __reduce__(self) -> Any:
        return _nothing, ()  # models stay behind when a result is pickled

    def __deepcopy__(self, memo: object) -> Call:
        return self

    def __call__(
        self, prompt_ids: Sequence[int], new_ids: Sequence[int], rows: int = 1, **changes: Any
    ) -> GenerationResult:
        """Generate from a prompt and tokens after it.

        Args:
            prompt_ids: ids of a row's prompt, without padding.
            new_ids: the tokens that follow; they count as generated.
            rows: number of rows of the first call.
            changes: arguments of `specnb.generate`. Another `method` starts from its own defaults.

        Returns:
            The result. As many tokens are generated as the first call had left, but at least 16.

        Raises:
            ValueError: the models are gone, the text has ended, or inputs of the call belong to several rows.
        """
        from specnb.call.api import generate

        model, assistant = self.model(), self.assistant and self.assistant()
        if model is None or (self.assistant is not None and assistant is None):
            raise ValueError("the model of this result is no longer in memory: load it, and generate again.")
        if new_ids and new_ids[-1] in self.eos:
            raise ValueError(f"the token {new_ids[-1]} ends the text, so nothing follows it; branch with another one.")
        arguments, options = dict(self.arguments), dict(self.options)
        if "method" in changes:
            options = {name: value for name, value in options.items() if name not in specnb_options()}
            arguments = {name: value for name, value in arguments.items() if name not in ("memory", "prediction")}
            assistant = None if changes["method"] == "plain" else assistant
        ids = [*prompt_ids, *new_ids]
        options = _extended(options, len(prompt_ids), len(ids), rows)
        left = max(_MIN_NEW_TOKENS, self.max_new_tokens - len(new_ids))
        lengths = {"max_new_tokens": changes.pop("max_new_tokens", left)}
        config = options.get("generation_config")
        least = options.get("min_new_tokens", getattr(config, "min_new_tokens", None))
        if least is not None:
            lengths["min_new_tokens"] = max(0, least - len(new_ids))
        options = override_configs(options, **lengths, num_return_sequences=1)
        tokens = torch.tensor([ids], device=model.device)
        given = {**arguments, "seed": self.seed, **options, **changes}
        return generate(
            model, input_ids=tokens, attention_mask=torch.ones_like(tokens), assistant_model=assistant, **given
        )


def _nothing() -> None:
    return None


def remember_call(
    model: Any, assistant: Any, names: tuple[str, str], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Call:
    """A `Call` from the arguments of `specnb.generate`."""
    left_out = (*_PROMPT, *_CACHES, compat.cache_field(), "max_length", "num_return_sequences")
    kept = {name: value for name, value in options.items() if name not in left_out}
    return Call(weakref.ref(model), None if assistant is None else weakref.ref(assistant), dict(arguments), kept, names)


def origin(call: Call | None, model: Any, assistant: Any, used: Mapping[str, Any]) -> dict[str, Any]:
    """Where a result comes from, as fields of it: the names of the models, and the call.

    Args:
        call: the call of `specnb.generate`; None if `generate()` was called.
        model, assistant: the models that were used.
        used: fields of the call that are known once it was prepared.
    """
    names = (model_name(model), model_name(assistant)) if call is None else call.names
    return {
        "model": names[0],
        "assistant": "" if assistant is None else names[1],
        "call": None if call is None else replace(call, **used),
    }


def _extended(options: dict[str, Any], prompt: int, length: int, rows: int) -> dict[str, Any]:
    """Inputs of the model beside the ids: those of one value per token are as long as the new prompt."""
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor) and value.dim()}
    inputs = {name: value for name, value in tensors.items() if not name.endswith("_id")}
    if inputs and rows > 1:
        raise ValueError(
            f"a branch of several rows cannot tell which {', '.join(sorted(inputs))} belong to its row: generate from "
            "that row alone first."
        )
    for name, value in inputs.items():
        if value.dim() == 2 and value.shape == (1, prompt) and not value.is_floating_point():
            options = options | {name: torch.nn.functional.pad(value, (0, length - prompt))}
    return options
