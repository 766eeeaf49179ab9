"""The adapter between transformers' `generate(custom_generate=...)` and specnb's decoding loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specnb import compat, drafters
from specnb.call import peft_adapters, unsupported
from specnb.call.generate_options import LOOP_ARGUMENTS
from specnb.call.inputs import check_filled, prepare_inputs
from specnb.call.memory_arguments import MemoryArguments
from specnb.call.method_selection import (
    TRANSFORMERS_DEFAULTS,
    SelectedMethod,
    call_signature,
    check_values,
    configs_in_order,
    effective_options,
    merge_options,
    option_sources_in_effect,
    options_in_config,
    select_method,
    specnb_options,
)
from specnb.call.streamers import SingleEndStreamer, ensure_end
from specnb.decoding import padding
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.lm.base import model_device
from specnb.decoding.lm.block_check import check_blocks
from specnb.decoding.lm.model_inputs import CacheSize
from specnb.decoding.loop import decode
from specnb.decoding.recorder import Recorder
from specnb.decoding.stops import StoppingChecker
from specnb.decoding.verifiers import VERIFIERS
from specnb.options import BY_NAME, Method
from specnb.text import step_pieces
from specnb.trace import GenerationResult, RowResult, Step

_UNCHECKED = ""  # the value of `assistant_method` if the models were not checked before
_INITIAL_NEW_TOKENS = 512  # the kv cache is first allocated for the prompt and this many tokens


@dataclass
class CustomGenerate:
    """specnb's decoding as a `custom_generate` callable; see `specnb.decoder`.

    Args:
        assistant_method: the method that the assistant model is for (None without one), if the models were checked
            before.
        remembered: the arguments `memory` and `prediction`.
        call_options: what the call and its generation config set; None if unknown.
        result: the result of the last call. Nothing else is kept from call to call.
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
    assistant_method: str | None = _UNCHECKED
    logprobs: bool = True
    top_logprobs: int = 0
    remembered: MemoryArguments = MemoryArguments()
    call_options: dict[str, Any] | None = None  # what the call and its config set; None if unknown
    result: GenerationResult | None = None

    def __post_init__(self) -> None:
        self.__signature__ = call_signature(type(self).__call__)

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
        """Decode; `generate()` calls this in place of its own loop.

        Args:
            method, seed: may be given to `generate()` itself.
            model_kwargs: what `generate()` prepared.

        Returns:
            The ids `[rows, length]`, or with `return_dict_in_generate` what `generate()` returns then.
        """
        began, self.result = time.perf_counter(), None
        with ensure_end(self.streamer) as streamer:
            requested = {name: model_kwargs.pop(name) for name in specnb_options() & model_kwargs.keys()}
            assistant = self._check_call(model, input_ids, generation_config, model_kwargs)
            sample = bool(generation_config.do_sample)
            selected, sources = self._selected_method(method, requested, generation_config, model, assistant)
            selected = drafters.with_defaults(selected, model, sample, self.assistant_model)
            self.remembered.check(selected.name)
            self.remembered.bind(self.tokenizer)
            seed = self.seed if seed is None else BY_NAME["seed"].check(seed)
            if sample and seed is None:
                seed = int.from_bytes(os.urandom(4), "little")
            stops = self._stops(stopping_criteria, generation_config)
            max_new_tokens = (stops.max_length or generation_config.max_length) - input_ids.shape[1]
            processors = Processors(logits_processor)
            unsupported.check_verification(selected, sample, processors)
            past = compat.cache_among(model_kwargs)
            user_cache = compat.given_by_caller(past)
            keeps_outputs = generation_config.output_scores or generation_config.output_logits
            prompts, pads = padding.unpad(input_ids, model_kwargs.get("attention_mask"))
            lockstep = len(prompts) > 1 and bool(processors.stateful or stops.lockstep or keeps_outputs or user_cache)
            padded_prompts = input_ids.tolist()
            if not lockstep:  # without lockstep, no padding follows the prompt
                padded_prompts = [
                    row[: pad + len(ids)] for row, ids, pad in zip(padded_prompts, prompts, pads, strict=True)
                ]
            schedules = drafters.make_schedules(selected, model, sample, len(prompts))
            device = model_device(model)
            rows = [
                Row(
                    index=i,
                    ids=ids,
                    remaining_tokens=max_new_tokens,
                    generator=torch.Generator(device).manual_seed((seed or 0) + i),
                    processors=processors.for_row(i, len(prompts)),
                    schedule=schedules[i],
                    padded_prompt=padded_prompts[i],
                )
                for i, ids in enumerate(prompts)
            ]
            unsupported.check_streamer(self.streamer, rows)
            unsupported.check_cache(past, made_by_generate=generation_config.cache_implementation is not None)
            unsupported.check_past(past, rows, pads)
            extras = {name: value for name, value in model_kwargs.items() if name not in LOOP_ARGUMENTS}
            prepared = prepare_inputs(model, input_ids, model_kwargs, extras, prompts, pads)
            unsupported.check_length(model, rows)
            drafters.check_method(selected.name, model)
            unsupported.check_takes_cache(model, past, user_cache)
            check_blocks(model, rows, prepared, selected.name != "plain")
            context = drafters.MethodContext(
                model=model,
                rows=rows,
                options=selected.options,
                sample=sample,
                eos=stops.eos,
                size=CacheSize(
                    max(map(len, prompts)) + min(max_new_tokens, _INITIAL_NEW_TOKENS) + 16,
                    generation_config.prefill_chunk_size,
                ),
                prepared=prepared,
                assistant_model=self.assistant_model,
                tokenizer=self.tokenizer,
                assistant_tokenizer=self.assistant_tokenizer,
                probabilities=self.probabilities,
                top_logprobs=self.top_logprobs,
                **self.remembered.for_drafter(self.tokenizer, model),
            )
            target, drafter = drafters.build_method(selected.name, context)
            if user_cache:
                unsupported.check_user_cache(model, generation_config, past, target, rows)
            recorder = self._recorder(model, generation_config)
            pad = compat.pad_token_id(generation_config)
            verification = selected.options.get("verification", "token") if sample else "greedy"
            steps = decode(
                target,
                drafter,
                rows,
                verifier=VERIFIERS[verification],
                stops=stops,
                ensemble_weight=selected.options.get("assistant_ensemble_weight"),
                lockstep=processors if lockstep else None,
                pad=pad,
                recorder=recorder,
            )

            def finish() -> Tensor:
                self.remembered.keep(rows)
                sequences = padding.append_generated(input_ids, [row.ids[row.prompt_length :] for row in rows], pad)
                effective = selected.options | effective_options(generation_config, max_new_tokens)
                self.result = GenerationResult(
                    method=selected.name,
                    rows=[self._row(row) for row in rows],
                    options=effective,
                    seed=seed if sample else None,
                    seconds=time.perf_counter() - began,
                    lossy=selected.options.get("assistant_ensemble_weight") is not None,
                    target_passes=target.passes,
                    sequences=sequences,
                    scores=recorder.scores,
                    logits=recorder.logits,
                    option_sources=option_sources_in_effect(
                        effective, sources, self.call_options, model.generation_config
                    ),
                    runtime=drafters.runtime_by_role(target, drafter),
                )
                return sequences

            try:
                self._stream(steps, input_ids, streamer)
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
                sequences=sequences, scores=recorder.scores, logits=recorder.logits, **{compat.cache_field(): kept}
            )

    def _check_call(
        self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: Mapping[str, Any]
    ) -> str | None:
        """Run the checks that need no decoding; returns the method that the assistant model is for."""
        assistant = self.assistant_method
        unsupported.check_handed_on()
        peft_adapters.check_adapters(model)
        if assistant == _UNCHECKED:
            unsupported.check_model(model, model_kwargs)
            unsupported.check_assistant(self.assistant_model)
            assistant = drafters.assistant_method(model, self.assistant_model, self.tokenizer, self.assistant_tokenizer)
        check_filled(input_ids)
        unsupported.check_options(config)
        unsupported.check_cache_use(model, config.use_cache)
        return assistant

    def _stops(self, criteria: Sequence[Any], config: GenerationConfig) -> StoppingChecker:
        """The stopping criteria that generate() prepared, and the stop strings given to `specnb.decoder`."""
        criteria = list(criteria)
        if config.is_assistant:  # then there is a criterion for drafts, which must not end the text
            criteria = [criterion for criterion in criteria if type(criterion) is not compat.ConfidenceCriteria]
        return StoppingChecker([*criteria, *self.stopping_criteria], self.cancel)

    def _recorder(self, model: PreTrainedModel, config: GenerationConfig) -> Recorder:
        """What the steps record in addition to the tokens."""
        return Recorder(
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            margins=not config.do_sample and model.dtype in (torch.float16, torch.bfloat16),
            probabilities=self.probabilities,
            scores=() if config.output_scores else None,
            logits=() if config.output_logits else None,
            shows_scores=bool(config.output_scores and config.return_dict_in_generate),
        )

    def _stream(self, steps: Iterator[Step], input_ids: Tensor, streamer: SingleEndStreamer | None) -> None:
        """Run the loop; each step goes to the streamer and to `on_step`."""
        with ensure_end(streamer):
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for step in steps:
                if streamer is not None:
                    streamer.put(torch.tensor(step.emitted))
                if self.on_step is not None:
                    self.on_step(step)

    def _selected_method(
        self,
        called: Method | str | None,
        requested: Mapping[str, Any],
        config: GenerationConfig,
        model: PreTrainedModel,
        assistant: str | None,
    ) -> SelectedMethod:
        """The method with its options.

        In order of precedence an option comes from the `generate()` call, from `specnb.decoder` or from a generation
        config.
        """
        if isinstance(self.method, SelectedMethod):
            return self.method
        method, bound = called if called is not None else self.method, dict(self.options or {})
        requested = check_values(requested)
        if isinstance(method, Method):
            bound = {}
            if called is None and merge_options({}, requested):  # the call overrides options of the bound Method
                bound, method = dict(method.given), method.name
        target = options_in_config(model.generation_config)
        # generate() has merged the configs: what is neither the target's nor a default of transformers is the call's.
        own = {
            name: value
            for name, value in options_in_config(config).items()
            if value != target.get(name, TRANSFORMERS_DEFAULTS.get(name))
        }
        assistant_config = getattr(self.assistant_model, "generation_config", None)
        configs = configs_in_order(own, model.generation_config, assistant_config)
        return select_method(method, merge_options(bound, requested), configs, assistant)

    def _row(self, row: Row) -> RowResult:
        ids = tuple(token for step in row.steps for token in step.emitted)
        prompt, reason = tuple(row.ids[: row.prompt_length]), row.finish_reason or "interrupted"
        result = RowResult(prompt, ids, tuple(row.steps), reason)
        if self.tokenizer is not None:
            result.pieces, result.rejected_pieces = step_pieces(self.tokenizer, row.steps)
        return result
