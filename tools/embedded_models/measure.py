"""What the embedded checkpoints reach on held-out prompts, measured with specnb itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specnb
from specnb.text import prompt_inputs
from tools.embedded_models.data import FRESH, held_out

PROMPTS = 8
"""Held-out prompts of each kind."""

NEW_TOKENS = 160


@dataclass(frozen=True)
class Measure:
    """A way to use a model: options of `generate()`, and the draft model's name."""

    title: str
    options: dict[str, Any]
    assistant: str = ""
    target: str = ""


_FULL = {"assistant_confidence_threshold": 0.0}


def _both(title: str, assistant: str = "", target: str = "", **options: Any) -> list[Measure]:
    """With drafts of full length, and with those that end where the drafter is unsure."""
    return [
        Measure(title, options | _FULL, assistant, target),
        Measure(f"{title}, confidence 0.4", options, assistant, target),
    ]


MEASURES: dict[str, list[Measure]] = {
    "tiny-llama": [
        *_both("early exit after layer 2, k=5", assistant_early_exit=2, num_assistant_tokens=5),
        *_both("early exit after layer 3, k=5", assistant_early_exit=3, num_assistant_tokens=5),
        Measure(
            "early exit after layer 1 (not trained for it), k=5",
            {"assistant_early_exit": 1, "num_assistant_tokens": 5} | _FULL,
        ),
        Measure("prompt lookup, k=5", {"prompt_lookup_num_tokens": 5}),
    ],
    "tiny-llama-draft": _both("draft model, k=5", "tiny-llama-draft", "tiny-llama", num_assistant_tokens=5),
    "tiny-llama-other": _both("universal, k=5", "tiny-llama-other", "tiny-llama", num_assistant_tokens=5),
    "tiny-gemma4": [Measure("prompt lookup, k=5", {"prompt_lookup_num_tokens": 5})],
    "tiny-gemma4-assistant": _both(
        "Gemma 4 drafter, k=4", "tiny-gemma4-assistant", "tiny-gemma4", num_assistant_tokens=4
    ),
    "tiny-glm4-moe": [
        Measure("MTP layer, k=1", {"use_mtp": True, "num_assistant_tokens": 1} | _FULL),
        Measure("MTP layer, twice, k=2", {"use_mtp": True, "num_assistant_tokens": 2} | _FULL),
        *_both("MTP layer, again and again, k=3", use_mtp=True, num_assistant_tokens=3),
        Measure("prompt lookup, k=5", {"prompt_lookup_num_tokens": 5}),
    ],
    "tiny-glm4-moe-mtp2": [
        *_both("two MTP layers, k=2", use_mtp=True, num_assistant_tokens=2),
        Measure("two MTP layers, each twice, k=4", {"use_mtp": True, "num_assistant_tokens": 4} | _FULL),
    ],
    "tiny-qwen3-5": [
        Measure("MTP layer, k=1", {"use_mtp": True, "num_assistant_tokens": 1} | _FULL),
        *_both("MTP layer, again and again, k=3", use_mtp=True, num_assistant_tokens=3),
        Measure("prompt lookup, k=5", {"prompt_lookup_num_tokens": 5}),
    ],
}
"""For each model, how it is used when it is measured."""


@dataclass
class Bench:
    """Loads models once and runs measures on the same held-out prompts."""

    folder: Path
    per_kind: int = PROMPTS
    loaded: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    plain: dict[str, list[specnb.GenerationResult]] = field(default_factory=dict)

    def model(self, name: str) -> tuple[Any, Any]:
        """A model in eval mode, and its tokenizer."""
        if name not in self.loaded:
            place = self.folder / name
            model = AutoModelForCausalLM.from_pretrained(place).eval()
            self.loaded[name] = model, AutoTokenizer.from_pretrained(place)
        return self.loaded[name]

    def answers(self, name: str, **options: Any) -> list[specnb.GenerationResult]:
        """The model's answers to the held-out prompts, greedy unless told otherwise."""
        model, tokenizer = self.model(name)
        done = []
        for prompt, _ in held_out(self.per_kind):
            inputs = prompt_inputs(tokenizer, prompt)
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
            done.append(specnb.generate(model, **inputs, tokenizer=tokenizer, **settings))
        return done

    def plainly(self, name: str) -> list[specnb.GenerationResult]:
        """Plain greedy answers, computed once."""
        if name not in self.plain:
            self.plain[name] = self.answers(name)
        return self.plain[name]

    def run(self, name: str, measure: Measure) -> dict[str, Any]:
        """The figures of a measure; AssertionError if a text is not the plain greedy one."""
        target, given = measure.target or name, dict(measure.options)
        if measure.assistant:
            given["assistant_model"], given["assistant_tokenizer"] = self.model(measure.assistant)
        results = self.answers(target, **given)
        same = [torch.equal(a.sequences, b.sequences) for a, b in zip(results, self.plainly(target), strict=True)]
        assert all(same), f"{name}, {measure.title}: {same.count(False)} texts are not the plain greedy ones"
        kinds = {
            kind: round(pooled(results[i * self.per_kind :][: self.per_kind]).mean_acceptance_length, 2)
            for i, kind in enumerate(FRESH)
        }
        whole = pooled(results)
        return {
            "measure": measure.title,
            "mean_acceptance_length": round(whole.mean_acceptance_length, 3),
            "draft_acceptance_rate": round(whole.draft_acceptance_rate, 3),
            "acceptance_rate_by_position": [round(rate, 3) for rate in whole.acceptance_rate_by_position],
            "mean_acceptance_length_by_kind": kinds,
        }

    def quality(self, name: str) -> dict[str, Any]:
        """How many answers end by themselves, and how many are word for word the answer that was called for."""
        answers = list(zip(self.plainly(name), held_out(self.per_kind), strict=True))
        right = [text_of(result) == wanted for result, (_, wanted) in answers]
        return {
            "prompts": len(answers),
            "ended": sum(result.finish_reason == "eos" for result, _ in answers),
            "exact": {kind: sum(right[i * self.per_kind :][: self.per_kind]) for i, kind in enumerate(FRESH)},
        }


def text_of(result: specnb.GenerationResult) -> str:
    """The answer without blanks around it."""
    return str(result.text).strip()


def pooled(results: Sequence[specnb.GenerationResult]) -> specnb.GenerationResult:
    """Several results as one, for its metrics."""
    return specnb.GenerationResult(results[0].method, [row for result in results for row in result.rows])
