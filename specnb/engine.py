"""Decoder: the callable that transformers' `generate(custom_generate=...)` hands everything it has prepared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import ConfidenceCriteria
from transformers.generation.streamers import BaseStreamer

from specnb import adapters, drafters, refusals
from specnb.decoding import batch
from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Row
from specnb.decoding.feed import Feed, types_at_first
from specnb.decoding.follow import Given, Size
from specnb.decoding.lm import model_device
from specnb.decoding.loop import decode
from specnb.decoding.probabilities import Processors
from specnb.decoding.record import Record
from specnb.decoding.schedules import SCHEDULES
from specnb.decoding.stops import Stops
from specnb.decoding.trial import trial
from specnb.decoding.verify import RULES
from specnb.inputs import check_filled
from specnb.listeners import Once, ended
from specnb.options import BY_NAME, Method
from specnb.resolve import OF_SPECNB, STANDARD, Chosen, of_config, override, resolve, settings, sources_in_effect
from specnb.text import step_pieces
from specnb.trace import GenerationResult, Step
from specnb.trace import Row as RowResult

# What generate() adds for its own loop; CachedLM makes its own.
_FOR_ITS_LOOP = (
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_params",  # a cache, too, in the recurrent families before transformers 5.24
    "use_cache",
    "logits_to_keep",
    "cache_position",
)

_CACHE_FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
_UNCHECKED = ""  # `assistant_for` is the assistant's method (None without one) where model and pair were checked before


@dataclass
class Decoder:
    """specnb's engine as a `custom_generate` callable; `specnb.decoder` makes and documents it.

    `result` is the result of the last call. Nothing else is kept from call to call.
    """

    method: Method | str | Chosen | None = None
    options: Mapping[str, Any] | None = None
    assistant_model: PreTrainedModel | None = None
    assistant_tokenizer: Any = None
    tokenizer: Any = None
    streamer: BaseStreamer | None = None
    on_step: Callable[[Step], object] | None = None
    cancel: threading.Event | None = None
    seed: int | None = None
    stopping_criteria: Sequence[Any] = ()
    probabilities: bool = False
    assistant_for: str | None = _UNCHECKED
    logprobs: bool = True
    top_logprobs: int = 0
    called: dict[str, Any] | None = None  # what the call and its config set, where that is known
    result: GenerationResult | None = None

    def __post_init__(self) -> None:
        self.__signature__ = _handed_over()

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
                 stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                 method: Method | str | None = None, seed: int | None = None, **model_kwargs: Any
                 ) -> Tensor | GenerateDecoderOnlyOutput:  # fmt: skip
        """Decode. `method` and `seed` may be given to `generate()` itself; the rest is what it prepared."""
        with ended(self.streamer) as streamer:
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                method,
                seed,
                streamer,
                model_kwargs,
            )

    def _decode(self, model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
                stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, method: Method | str | None,
                seed: int | None, streamer: Once | None, model_kwargs: dict[str, Any]) -> Tensor | GenerateDecoderOnlyOutput:  # fmt: skip
        began, self.result = time.perf_counter(), None
        asked = {name: model_kwargs.pop(name) for name in OF_SPECNB & model_kwargs.keys()}
        assistant = self.assistant_for
        adapters.check(model)
        if assistant == _UNCHECKED:
            refusals.check_model(model, model_kwargs)
            refusals.check_assistant(self.assistant_model)
            assistant = drafters.method_for(model, self.assistant_model, self.tokenizer, self.assistant_tokenizer)
        check_filled(input_ids)
        refusals.check_options(generation_config)
        refusals.check_cache_use(model, generation_config.use_cache)
        sample = bool(generation_config.do_sample)
        chosen, sources = self._method(method, asked, generation_config, model, assistant)
        chosen = drafters.with_defaults(chosen, model, sample)
        seed = self.seed if seed is None else BY_NAME["seed"].check(seed)
        if sample and seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        criteria = list(stopping_criteria)
        if generation_config.is_assistant:  # which brings along what ends drafts, and never a text
            criteria = [criterion for criterion in criteria if type(criterion) is not ConfidenceCriteria]
        stops = Stops([*criteria, *self.stopping_criteria], self.cancel)
        room = (stops.max_length or generation_config.max_length) - input_ids.shape[1]
        processors = Processors(logits_processor)
        refusals.check_rule(chosen, sample, processors)

        prompts, pads = batch.split(input_ids, model_kwargs.get("attention_mask"))
        device = model_device(model)
        schedule = SCHEDULES[chosen.options.get("num_assistant_tokens_schedule", "constant")]
        past = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        own_cache = bool(getattr(past, "_is_user_defined", False))
        keeps = generation_config.output_scores or generation_config.output_logits
        together = len(prompts) > 1 and bool(processors.foreign or stops.together or keeps or own_cache)
        shown = input_ids.tolist()
        if not together:  # rows that do not grow in step are shown without what pads them behind
            shown = [row[: pad + len(ids)] for row, ids, pad in zip(shown, prompts, pads, strict=True)]
        rows = [
            Row(i, ids, room, torch.Generator(device).manual_seed((seed or 0) + i),
                processors.for_row(i, len(prompts)), schedule(chosen.options.get("num_assistant_tokens", 0)), shown[i])
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        if len(rows) > 1 and self.streamer is not None:
            raise ValueError(
                f"a streamer shows one row, but there are {len(rows)}; generate the prompts one by one to stream them."
            )
        refusals.check_cache(past, made=generation_config.cache_implementation is not None)
        refusals.check_past(past, rows, pads)
        extras = {
            name: batch.shift(value, pads, input_ids.shape)
            for name, value in model_kwargs.items()
            if name not in _FOR_ITS_LOOP and value is not None and not (isinstance(value, Mapping) and not value)
        }
        feed = Feed(
            extras,
            batch.planes(model_kwargs.get("position_ids"), prompts, pads),
            types_at_first(model),
            [*map(len, prompts)],
        )
        given = Given(input_ids, model_kwargs, feed, past)
        refusals.check_length(model, rows)
        trial(model, rows, given, chosen.name != "plain")
        size = Size(max(map(len, prompts)) + min(room, 512) + 16, generation_config.prefill_chunk_size)
        run = drafters.Run(model, rows, chosen.options, sample, stops.eos, size, given,
                           self.assistant_model, self.tokenizer, self.assistant_tokenizer, self.probabilities, self.top_logprobs)  # fmt: skip
        target, drafter = drafters.assemble(chosen.name, run)
        record = Record(
            self.logprobs,
            self.top_logprobs,
            margins=not sample and model.dtype in (torch.float16, torch.bfloat16),
            probabilities=self.probabilities,
            scores=() if generation_config.output_scores else None,
            logits=() if generation_config.output_logits else None,
            shown=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
        )
        pad = _pad(generation_config)
        if own_cache and generation_config.use_cache is False:
            raise ValueError("a cache is given, but use_cache=False: leave the cache out, or give use_cache=True.")
        if own_cache and not isinstance(target, CachedLM) and (len(rows) > 1 or rows[0].padding):
            raise ValueError(
                f"the given cache cannot be filled: {type(model).__name__} takes one row without padding at a time; leave the cache out."
            )
        steps = decode(
            target, drafter, rows, stops=stops, together=processors if together else None, pad=pad, record=record,
            rule=RULES[chosen.options.get("verification", "token") if sample else "greedy"],
            ensemble_weight=chosen.options.get("assistant_ensemble_weight"),
        )  # fmt: skip

        def finish() -> Tensor:
            seconds = time.perf_counter() - began
            sequences = batch.join(input_ids, [row.ids[row.prompt_length :] for row in rows], pad)
            effective = chosen.options | _in_effect(generation_config, room)
            self.result = GenerationResult(
                chosen.name, [self._row(row) for row in rows], effective,
                seed if sample else None, seconds, lossy=chosen.options.get("assistant_ensemble_weight") is not None, target_passes=target.passes, sequences=sequences,
                scores=record.scores, logits=record.logits,
                option_sources=sources_in_effect(effective, sources, self.called, model.generation_config),
            )  # fmt: skip
            return sequences

        try:
            self._follow(steps, input_ids, streamer)
        except BaseException as error:  # also KeyboardInterrupt: what was generated is not lost
            for row in rows:
                row.finish_reason = row.finish_reason or "interrupted"
            finish()
            error.partial_result = self.result  # type: ignore[attr-defined]
            raise
        sequences = finish()
        kept = target.hand_back(past, rows) if isinstance(past, DynamicCache) else None
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=record.scores, logits=record.logits, **{_CACHE_FIELD: kept}
        )

    def _follow(self, steps: Iterator[Step], input_ids: Tensor, streamer: Once | None) -> None:
        """Run the loop, telling whoever listens."""
        with ended(streamer):
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for step in steps:
                if streamer is not None:
                    streamer.put(torch.tensor(step.emitted))
                if self.on_step is not None:
                    self.on_step(step)

    def _method(
        self,
        called: Method | str | None,
        asked: Mapping[str, Any],
        config: GenerationConfig,
        model: PreTrainedModel,
        assistant: str | None,
    ) -> Chosen:
        """The method in effect: the call's options decide, then the bound ones, then the configs'."""
        if isinstance(self.method, Chosen):
            return self.method
        method, bound = called if called is not None else self.method, dict(self.options or {})
        asked = {name: BY_NAME[name].check(value) if name in BY_NAME else value for name, value in asked.items()}
        if isinstance(method, Method):
            bound = {}
            if called is None and override({}, asked):  # the bound one's options with the call's
                bound, method = dict(method.given), method.name
        target = of_config(model.generation_config)
        # generate() merged the configs: what is neither the target's nor transformers' default was in the call's.
        own = {
            name: value for name, value in of_config(config).items() if value != target.get(name, STANDARD.get(name))
        }
        configs = settings(own, model.generation_config, getattr(self.assistant_model, "generation_config", None))
        return resolve(method, override(bound, asked), configs, assistant)

    def _row(self, row: Row) -> RowResult:
        ids = tuple(token for step in row.steps for token in step.emitted)
        result = RowResult(
            tuple(row.ids[: row.prompt_length]), ids, tuple(row.steps), row.finish_reason or "interrupted"
        )
        if self.tokenizer is not None:
            result.pieces, result.rejected_pieces = step_pieces(self.tokenizer, row.steps)
        return result


def _pad(config: GenerationConfig) -> int:
    """What fills the rows that end before others, as generate() has it: an end of sequence where there is no pad."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return int(config.pad_token_id or 0) if prepared is None else int(prepared)


@cache
def _handed_over() -> Signature:
    """What `generate()` reads: it hands over, as given, the options that a callable's signature names.

    So the call's drafting options arrive apart from those of the generation configs, which it merges.
    """
    *first, rest = list(signature(Decoder.__call__).parameters.values())[1:]
    named = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in sorted(OF_SPECNB)]
    return Signature([*first, *named, rest])


def _in_effect(config: GenerationConfig, room: int) -> dict[str, Any]:
    """The length and sampling options that this generation ran with."""
    names = [name for name, option in BY_NAME.items() if option.group == "sampling" and name != "seed"]
    if not config.do_sample:
        names = ["do_sample", "repetition_penalty", "no_repeat_ngram_size"]
    values = {name: getattr(config, name, None) for name in names} | {"do_sample": bool(config.do_sample)}
    return {"max_new_tokens": room} | {name: value for name, value in values.items() if value is not None}
