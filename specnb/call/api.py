"""`specnb.generate` and `specnb.decoder`: transformers' `generate()` with speculative methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from specnb import drafters
from specnb.call import peft_adapters, unsupported
from specnb.call.custom_generate import CustomGenerate
from specnb.call.inputs import check_arguments, check_prompt, encode, in_effect, plainly, unwrapped
from specnb.call.method_selection import OF_ASSISTANTS, OF_SPECNB, asks, method_name, of_config, select_method, settings
from specnb.call.streamers import ended
from specnb.models import Pair
from specnb.models.mistral import for_stop_strings
from specnb.options import ASKED_BY, BY_NAME, METHODS, Method, unknown
from specnb.text import text_tokenizer
from specnb.trace import GenerationResult, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate(
    model: PreTrainedModel | Pair,
    inputs: Tensor | str | Sequence[str] | None = None,
    *,
    method: Method | str | None = None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    on_step: Callable[[Step], object] | None = None,
    cancel: threading.Event | None = None,
    seed: int | None = None,
    probabilities: bool = False,
    logprobs: bool = True,
    top_logprobs: int = 0,
    **options: Any,
) -> GenerationResult:
    """Generate with a speculative method; the text is what the target alone would have written.

    Greedy output equals the target's own token for token (in half precision up to ties, see `Step.margins`); sampling
    follows the target's distribution. Models, configs and tokenizers are left as they are.

    Args:
        model: the target, or a `Pair` from `specnb.load`, which also brings tokenizer and assistant.
        inputs: token ids `[rows, length]`, a text, or a list of texts; `input_ids=` works too. Prompts of different
            lengths are rows, each decoded as if alone.
        method: a method's name or a `Method`. Left out: `draft_model` where there is an assistant, `prompt_lookup` with
            `prompt_lookup_num_tokens`, else plain decoding.
        assistant_model: the draft model; a `Pair` stands for its target and tokenizer.
        tokenizer, assistant_tokenizer: the models' tokenizers; needed for texts, stop strings and `result.text`.
        streamer: a transformers streamer; gets the prompt, then each step's tokens at once.
        on_step: called with every `Step` as soon as it is committed.
        cancel: when set, generation ends before the next step with finish_reason "cancelled".
        seed: seed of this call's random numbers (row i uses seed + i); the global generator is never touched. None draws
            one; `result.seed` tells which.
        probabilities: have the steps record how probable each drafted token was to drafter and target (see `Step`).
        logprobs: have them record the log-probability of each generated token under the target.
        top_logprobs: have them record so many (0 to 20) of the best tokens of target and drafter at each place.
        options: options of transformers' `generate()` under their names, drafting options (`num_assistant_tokens`,
            `num_assistant_tokens_schedule`, `assistant_confidence_threshold`, `max_matching_ngram_size`,
            `verification`) among them. One given here decides, then a `generation_config` given here, then the target's
            own; for the draft's length, schedule and confidence then the draft model's, as in transformers; then
            specnb's default. `result.option_sources` says which it was. `temperature=0` is greedy.

    Returns:
        A `GenerationResult`; `.sequences` is what `generate()` would have returned.

    Raises:
        ValueError: an option with a wrong value or one that cannot apply, a pair that does not fit, a model whose
            cache cannot be rolled back; all before the first token.
        KeyboardInterrupt: as raised, with the result so far as `.partial_result` (any other exception likewise). A streamer is
            told the end in any case.
    """
    with ended(streamer) as once:
        return _checked(
            model, inputs, method, options,
            CustomGenerate(None, None, assistant_model, assistant_tokenizer, tokenizer, once, on_step, cancel, BY_NAME["seed"].check(seed),
                    probabilities=probabilities, logprobs=BY_NAME["logprobs"].check(logprobs),
                    top_logprobs=BY_NAME["top_logprobs"].check(top_logprobs)),
        )  # fmt: skip


def _checked(
    model: Any, inputs: Any, method: Method | str | None, options: dict[str, Any], engine: CustomGenerate
) -> GenerationResult:
    """`generate` with what was bound in `engine`; what can be said of each argument alone is checked here."""
    tokenizer, assistant_model, assistant_tokenizer = (
        engine.tokenizer,
        engine.assistant_model,
        engine.assistant_tokenizer,
    )
    if isinstance(model, Pair):
        pair, model = model, model.target
        tokenizer = tokenizer if tokenizer is not None else pair.tokenizer
        other = method is None and any(asks(options.get(option)) for option in ASKED_BY)
        if assistant_model is None and not other and method_name(method) in (None, *OF_ASSISTANTS):
            assistant_model, assistant_tokenizer = pair.assistant, pair.assistant_tokenizer
    assistant_model, assistant_tokenizer = unwrapped("assistant_model", assistant_model, assistant_tokenizer)
    wrapper, (model, _) = model, unwrapped("model", model)
    streamer = engine.streamer and engine.streamer.streamer
    functions = {"streamer": streamer, "on_step": engine.on_step, "cancel": engine.cancel}
    check_arguments(model, {**options, **functions, "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer})
    checked = {name: BY_NAME[name].check(value) if name in BY_NAME else value for name, value in options.items()}
    engine.tokenizer, engine.assistant_model, engine.assistant_tokenizer = (
        tokenizer,
        assistant_model,
        assistant_tokenizer,
    )
    with peft_adapters.own_config(wrapper, model):
        return _generate(model, inputs, method, checked, engine)


def _generate(
    model: PreTrainedModel, inputs: Any, method: Method | str | None, checked: dict[str, Any], engine: CustomGenerate
) -> GenerationResult:
    """`generate` with its arguments unwrapped and looked at one by one; what belongs together is checked here."""
    tokenizer, called = engine.tokenizer, checked.get("generation_config")
    unsupported.check_assistant(engine.assistant_model)
    engine.assistant_for = drafters.method_for(model, engine.assistant_model, tokenizer, engine.assistant_tokenizer)
    configs = settings(
        of_config(called), model.generation_config, getattr(engine.assistant_model, "generation_config", None)
    )
    engine.method = select_method(method, checked, configs, engine.assistant_for)
    unsupported.check_cache_use(model, in_effect("use_cache", checked, model))
    unsupported.check_options({name: in_effect(name, checked, model) for name in unsupported.REFUSED | checked.keys()})
    passed = {name: value for name, value in checked.items() if name not in OF_SPECNB}
    unsupported.check_names(model, passed)
    unsupported.check_cache(passed.get("past_key_values", passed.get("cache")))
    passed = encode(model, inputs, passed, tokenizer)
    check_prompt(model, passed)
    unsupported.check_model(model, passed)
    strings = in_effect("stop_strings", passed, model)
    engine.stopping_criteria = stopping(strings, tokenizer)
    engine.called = {**({} if called is None else vars(called)), **passed}
    if engine.called.get("temperature") == 0:
        engine.called["do_sample"] = False  # which it stands for
    passed = plainly(passed, model)
    passed.pop("stop_strings", None)
    if strings is not None:  # transformers cannot build the criterion for a callable
        passed["stop_strings"] = None
    model.generate(**passed, custom_generate=engine)
    if engine.result is None:
        raise RuntimeError("transformers' generate() did not call the engine.")
    return engine.result


def decoder(
    *,
    method: Method | str | None = None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    on_step: Callable[[Step], object] | None = None,
    cancel: threading.Event | None = None,
    seed: int | None = None,
    probabilities: bool = False,
    logprobs: bool = True,
    top_logprobs: int = 0,
    stop_strings: str | Sequence[str] | None = None,
    **options: Any,
) -> CustomGenerate:
    """The engine as a `custom_generate` callable: `model.generate(**inputs, custom_generate=specnb.decoder(...))`.

    For code, or a pipeline, that calls `generate()` itself. What `generate()` does not hand to a callable is bound here:
    the assistant, tokenizers, streamer and stop strings; the rest goes to `generate()` as ever. Drafting options may be
    given in either place; the call's decide. Where neither has one, the generation configs and the defaults are those
    of `specnb.generate`. `.result` of the decoder is the last call's `GenerationResult`. Arguments as in
    `specnb.generate`.

    With `return_dict_in_generate`, scores, logits and cache are what `generate()` returns. The cache is a DynamicCache
    with all but the last token, ready for the next turn; None where rows were padded or ended at different lengths.
    """
    assistant_model, assistant_tokenizer = unwrapped("assistant_model", assistant_model, assistant_tokenizer)
    if method is not None and not isinstance(method, Method) and method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    for name in options:
        if name not in OF_SPECNB:
            raise ValueError(unknown("option", name, sorted(OF_SPECNB)) + " Give other options to generate() itself.")
    if assistant_model is not None and method_name(method) not in (None, *OF_ASSISTANTS):
        raise ValueError(f"method {method_name(method)!r} does not use assistant_model=; leave it out.")
    bound = {name: BY_NAME[name].check(value) if name in BY_NAME else value for name, value in options.items()}
    return CustomGenerate(method, bound, assistant_model, assistant_tokenizer, tokenizer, streamer, on_step, cancel,
                   BY_NAME["seed"].check(seed), stopping(stop_strings, tokenizer), probabilities,
                   logprobs=BY_NAME["logprobs"].check(logprobs), top_logprobs=BY_NAME["top_logprobs"].check(top_logprobs))  # fmt: skip


def stopping(stop_strings: str | Sequence[str] | None, tokenizer: Any) -> list[StopStringCriteria]:
    """The stop-string criterion, which transformers cannot build for a callable. Refuses a tokenizer that is none."""
    if tokenizer is not None:
        text_tokenizer(tokenizer)
    if stop_strings is None or stop_strings == []:
        return []
    if tokenizer is None:
        raise ValueError("stop_strings need tokenizer=, to know where the text of a token ends.")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not all(strings):
        raise ValueError("stop_strings holds an empty text, which every text ends with; leave it out.")
    return [StopStringCriteria(for_stop_strings(tokenizer), strings)]
