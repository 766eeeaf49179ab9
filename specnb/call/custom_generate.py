"""The adapter between transformers' `generate(custom_generate=...)` and the loop: it takes what generate() has prepared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import ConfidenceCriteria
from transformers.generation.streamers import BaseStreamer

from specnb import drafters
from specnb.call import peft_adapters, unsupported
from specnb.call.inputs import check_filled
from specnb.call.method_selection import (
    OF_SPECNB,
    STANDARD,
    SelectedMethod,
    of_config,
    override,
    select_method,
    settings,
    sources_in_effect,
)
from specnb.call.streamers import Once, ended
from specnb.decoding import padding
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.lm.base import LM, model_device
from specnb.decoding.lm.block_check import check_blocks
from specnb.decoding.lm.cached import CachedLM
from specnb.decoding.lm.model_inputs import CacheSize, ModelInputs, PreparedInputs, types_at_first
from specnb.decoding.loop import decode
from specnb.decoding.recorder import Recorder
from specnb.decoding.schedules import SCHEDULES
from specnb.decoding.stops import Stops
from specnb.decoding.verifiers import VERIFIERS
from specnb.options import BY_NAME, Method
from specnb.text import step_pieces
from specnb.trace import GenerationResult, RowResult, Step

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
_GROWTH = 512  # new tokens for which a kv cache is allocated at first


@dataclass
class CustomGenerate:
    """specnb's decoding as a `custom_generate` callable; `specnb.decoder` makes and documents it.

    `result` is the result of the last call. Nothing else is kept from call to call.
    """

    method: Method | str | SelectedMethod | None = None
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

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        method: Method | str | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode. `method` and `seed` may be given to `generate()` itself; the rest is what it prepared."""
        began, self.result = time.perf_counter(), None
        with ended(self.streamer) as streamer:
            asked = {name: model_kwargs.pop(name) for name in OF_SPECNB & model_kwargs.keys()}
            assistant = self._checked(model, input_ids, generation_config, model_kwargs)
            sample = bool(generation_config.do_sample)
            chosen, sources = self._method(method, asked, generation_config, model, assistant)
            chosen = drafters.with_defaults(chosen, model, sample)
            seed = self.seed if seed is None else BY_NAME["seed"].check(seed)
            if sample and seed is None:
                seed = int.from_bytes(os.urandom(4), "little")
            stops = self._stops(stopping_criteria, generation_config)
            max_new_tokens = (stops.max_length or generation_config.max_length) - input_ids.shape[1]
            processors = Processors(logits_processor)
            unsupported.check_verification(chosen, sample, processors)
            past = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
            own_cache = bool(getattr(past, "_is_user_defined", False))
            keeps = generation_config.output_scores or generation_config.output_logits
            prompts, pads = padding.split(input_ids, model_kwargs.get("attention_mask"))
            lockstep = len(prompts) > 1 and bool(processors.stateful or stops.lockstep or keeps or own_cache)
            shown = input_ids.tolist()
            if not lockstep:  # rows that do not grow in step are shown without what pads them behind
                shown = [row[: pad + len(ids)] for row, ids, pad in zip(shown, prompts, pads, strict=True)]
            schedule = SCHEDULES[chosen.options.get("num_assistant_tokens_schedule", "constant")]
            device = model_device(model)
            rows = [
                Row(
                    index=i,
                    ids=ids,
                    remaining_tokens=max_new_tokens,
                    generator=torch.Generator(device).manual_seed((seed or 0) + i),
                    processors=processors.for_row(i, len(prompts)),
                    schedule=schedule(chosen.options.get("num_assistant_tokens", 0)),
                    padded_prompt=shown[i],
                )
                for i, ids in enumerate(prompts)
            ]
            if len(rows) > 1 and self.streamer is not None:
                raise ValueError(
                    f"a streamer shows one row, but there are {len(rows)}; generate the prompts one by one to stream them."
                )
            unsupported.check_cache(past, made=generation_config.cache_implementation is not None)
            unsupported.check_past(past, rows, pads)
            prepared = _prepared(model, input_ids, model_kwargs, prompts, pads, past)
            unsupported.check_length(model, rows)
            check_blocks(model, rows, prepared, chosen.name != "plain")
            context = drafters.MethodContext(
                model=model,
                rows=rows,
                options=chosen.options,
                sample=sample,
                eos=stops.eos,
                size=CacheSize(
                    max(map(len, prompts)) + min(max_new_tokens, _GROWTH) + 16, generation_config.prefill_chunk_size
                ),
                prepared=prepared,
                assistant_model=self.assistant_model,
                tokenizer=self.tokenizer,
                assistant_tokenizer=self.assistant_tokenizer,
                probabilities=self.probabilities,
                top_logprobs=self.top_logprobs,
            )
            target, drafter = drafters.assemble(chosen.name, context)
            if own_cache:
                _check_own_cache(model, generation_config, target, rows)
            recorder = self._recorder(model, generation_config)
            pad = _pad(generation_config)
            verification = chosen.options.get("verification", "token") if sample else "greedy"
            steps = decode(
                target,
                drafter,
                rows,
                verifier=VERIFIERS[verification],
                stops=stops,
                ensemble_weight=chosen.options.get("assistant_ensemble_weight"),
                lockstep=processors if lockstep else None,
                pad=pad,
                recorder=recorder,
            )

            def finish() -> Tensor:
                sequences = padding.join(input_ids, [row.ids[row.prompt_length :] for row in rows], pad)
                effective = chosen.options | _in_effect(generation_config, max_new_tokens)
                self.result = GenerationResult(
                    method=chosen.name,
                    rows=[self._row(row) for row in rows],
                    options=effective,
                    seed=seed if sample else None,
                    seconds=time.perf_counter() - began,
                    lossy=chosen.options.get("assistant_ensemble_weight") is not None,
                    target_passes=target.passes,
                    sequences=sequences,
                    scores=recorder.scores,
                    logits=recorder.logits,
                    option_sources=sources_in_effect(effective, sources, self.called, model.generation_config),
                    runtime=_runtime(target, drafter),
                )
                return sequences

            try:
                self._tell(steps, input_ids, streamer)
            except BaseException as error:  # also KeyboardInterrupt: what was generated is not lost
                for row in rows:
                    row.finish_reason = row.finish_reason or "interrupted"
                finish()
                error.partial_result = self.result  # type: ignore[attr-defined]
                raise
            sequences = finish()
            kept = target.export_cache(past, rows) if isinstance(past, DynamicCache) else None
            if not generation_config.return_dict_in_generate:
                return sequences
            return GenerateDecoderOnlyOutput(
                sequences=sequences, scores=recorder.scores, logits=recorder.logits, **{_CACHE_FIELD: kept}
            )

    def _checked(
        self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: Mapping[str, Any]
    ) -> str | None:
        """The method that the assistant is for, after everything that can be said of the call before decoding."""
        assistant = self.assistant_for
        peft_adapters.check(model)
        if assistant == _UNCHECKED:
            unsupported.check_model(model, model_kwargs)
            unsupported.check_assistant(self.assistant_model)
            assistant = drafters.method_for(model, self.assistant_model, self.tokenizer, self.assistant_tokenizer)
        check_filled(input_ids)
        unsupported.check_options(config)
        unsupported.check_cache_use(model, config.use_cache)
        return assistant

    def _stops(self, criteria: Sequence[Any], config: GenerationConfig) -> Stops:
        """When rows end: what generate() prepared, and the stop strings that are bound here."""
        criteria = list(criteria)
        if config.is_assistant:  # it brings along what ends drafts, and never a text
            criteria = [criterion for criterion in criteria if type(criterion) is not ConfidenceCriteria]
        return Stops([*criteria, *self.stopping_criteria], self.cancel)

    def _recorder(self, model: PreTrainedModel, config: GenerationConfig) -> Recorder:
        """What is kept beside the tokens."""
        return Recorder(
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            margins=not config.do_sample and model.dtype in (torch.float16, torch.bfloat16),
            probabilities=self.probabilities,
            scores=() if config.output_scores else None,
            logits=() if config.output_logits else None,
            shows_scores=bool(config.output_scores and config.return_dict_in_generate),
        )

    def _tell(self, steps: Iterator[Step], input_ids: Tensor, streamer: Once | None) -> None:
        """Run the loop, and tell whoever listens."""
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
    ) -> SelectedMethod:
        """The method in effect: the call's options decide, then the bound ones, then the configs'."""
        if isinstance(self.method, SelectedMethod):
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
        return select_method(method, override(bound, asked), configs, assistant)

    def _row(self, row: Row) -> RowResult:
        ids = tuple(token for step in row.steps for token in step.emitted)
        result = RowResult(
            tuple(row.ids[: row.prompt_length]), ids, tuple(row.steps), row.finish_reason or "interrupted"
        )
        if self.tokenizer is not None:
            result.pieces, result.rejected_pieces = step_pieces(self.tokenizer, row.steps)
        return result


def _prepared(
    model: PreTrainedModel,
    input_ids: Tensor,
    model_kwargs: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    pads: Sequence[int],
    past: Any,
) -> PreparedInputs:
    """What `generate()` prepared beside token ids, aligned with the rows."""
    extras = {
        name: padding.shift(value, pads, input_ids.shape)
        for name, value in model_kwargs.items()
        if name not in _FOR_ITS_LOOP and value is not None and not (isinstance(value, Mapping) and not value)
    }
    planes = padding.planes(model_kwargs.get("position_ids"), prompts, pads)
    inputs = ModelInputs(extras, planes, types_at_first(model), [*map(len, prompts)])
    return PreparedInputs(input_ids, model_kwargs, inputs, past)


def _check_own_cache(model: PreTrainedModel, config: GenerationConfig, target: LM, rows: Sequence[Row]) -> None:
    """Raise ValueError where the cache that the call gave cannot be filled."""
    if config.use_cache is False:
        raise ValueError("a cache is given, but use_cache=False: leave the cache out, or give use_cache=True.")
    if not isinstance(target, CachedLM) and (len(rows) > 1 or rows[0].padding):
        raise ValueError(
            f"the given cache cannot be filled: {type(model).__name__} takes one row without padding at a time; leave "
            "the cache out."
        )


def _runtime(target: LM, drafter: Any) -> dict[str, dict[str, Any]]:
    """What made the passes of the models cheaper, by role."""
    lm = getattr(drafter, "lm", None)
    return {"target": asdict(target.runtime)} | ({} if lm is None else {"assistant": asdict(lm.runtime)})


def _pad(config: GenerationConfig) -> int:
    """What fills the rows that end before others, as generate() has it: an end of sequence where there is no pad."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return int(config.pad_token_id or 0) if prepared is None else int(prepared)


@cache
def _handed_over() -> Signature:
    """What `generate()` reads: it hands over, as given, the options that a callable's signature names.

    So the call's drafting options arrive apart from those of the generation configs, which it merges.
    """
    *first, rest = list(signature(CustomGenerate.__call__).parameters.values())[1:]
    named = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in sorted(OF_SPECNB)]
    return Signature([*first, *named, rest])


def _in_effect(config: GenerationConfig, max_new_tokens: int) -> dict[str, Any]:
    """The length and sampling options that this generation ran with."""
    names = [name for name, option in BY_NAME.items() if option.group == "sampling" and name != "seed"]
    if not config.do_sample:
        names = ["do_sample", "repetition_penalty", "no_repeat_ngram_size"]
    values = {name: getattr(config, name, None) for name in names} | {"do_sample": bool(config.do_sample)}
    return {"max_new_tokens": max_new_tokens} | {name: value for name, value in values.items() if value is not None}
