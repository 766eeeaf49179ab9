"""`specnb.generate` and `specnb.decoder`: transformers' `generate()` with speculative methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from specnb import compat, drafters
from specnb.call import peft_adapters, unsupported
from specnb.call.custom_generate import CustomGenerate
from specnb.call.inputs import (
    check_arguments,
    check_prompt,
    encode,
    prepare_options,
    unwrap_model,
    value_in_effect,
    with_cache_name,
)
from specnb.call.memory_arguments import MemoryArguments, Prediction
from specnb.call.method_selection import (
    check_values,
    configs_in_order,
    is_requested,
    method_name,
    methods_for,
    options_in_config,
    select_method,
    specnb_options,
    takes_assistant,
)
from specnb.call.option_types import DraftingOptions, GenerateOptions
from specnb.call.streamers import ensure_end
from specnb.memory import Memory
from specnb.models import Pair
from specnb.models.mistral import for_stop_strings
from specnb.options import ASKED_BY, BY_NAME, Method, method_info, unknown
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
    memory: Memory | None = None,
    prediction: Prediction = None,
    **options: Unpack[GenerateOptions],
) -> GenerationResult:
    """Generate with a speculative method. The text is what the target alone would have written.

    Greedy output equals the target's own token by token (in half precision up to ties, see `Step.margins`). Sampling
    follows the target's distribution. Models, configs and tokenizers are not changed.

    Args:
        model: the target, or a `Pair` from `specnb.load`, which also has the tokenizer and the assistant.
        inputs: token ids `[rows, length]`, a text, or a list of texts; `input_ids=` works too. Prompts of different
            lengths are rows, each decoded as if alone.
        method: the name of a method or of a registered drafter, or a `Method`. None selects `draft_model` if there is
            an assistant, `prompt_lookup` with `prompt_lookup_num_tokens`, `suffix` with `memory` or `prediction`, else
            plain decoding.
        assistant_model: the draft model; of a `Pair`, its target and tokenizer.
        tokenizer, assistant_tokenizer: the models' tokenizers; needed for texts, stop strings and `result.text`.
        streamer: a transformers streamer; it gets the prompt, then all tokens of each step together.
        on_step: called with every `Step` as soon as it is committed.
        cancel: when set, generation ends before the next step with finish_reason "cancelled".
        seed: seed of this call's random numbers (row i uses seed + i); the global generator is not used. None draws a
            seed, which is in `result.seed`.
        probabilities: the steps record the probability of each drafted token under drafter and target (see `Step`).
        logprobs: the steps record the log-probability of each generated token under the target.
        top_logprobs: the steps record this many (0 to 20) of the best tokens of target and drafter at each position.
        memory: past requests, for method "suffix"; this one is added to it.
        prediction: a text, or token ids, that the output will mostly repeat, for method "suffix" (OpenAI's "predicted
            outputs"). It never changes the output. Several rows share it.
        options: options of transformers' `generate()`, and drafting options (`num_assistant_tokens`,
            `num_assistant_tokens_schedule`, `assistant_confidence_threshold`, `max_matching_ngram_size`,
            `suffix_decoding_*`, `verification`, those of a registered drafter). In order of precedence a value comes
            from the call, from its `generation_config`, from the target's generation config, from the draft model's
            (draft length, schedule and confidence threshold only, as in transformers), or is specnb's default.
            `result.option_sources` says which. `temperature=0` is greedy.

    Returns:
        A `GenerationResult`; its `.sequences` is what `generate()` would have returned.

    Raises:
        ValueError: before the first token, for a wrong value, an option that cannot apply, a draft model that does not
            fit, or a model whose cache cannot be rolled back.
        KeyboardInterrupt: with the result so far as `.partial_result`, as any other exception. The streamer is ended in
            any case.
    """
    with ensure_end(streamer) as wrapped:
        custom_generate = CustomGenerate(
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            tokenizer=tokenizer,
            streamer=wrapped,
            on_step=on_step,
            cancel=cancel,
            seed=BY_NAME["seed"].check(seed),
            probabilities=probabilities,
            logprobs=BY_NAME["logprobs"].check(logprobs),
            top_logprobs=BY_NAME["top_logprobs"].check(top_logprobs),
            remembered=MemoryArguments(memory, prediction),
        )
        method = custom_generate.remembered.method(assistant_model, options) if method is None else method
        return _check_arguments(model, inputs, method, dict(options), custom_generate)


def _check_arguments(
    model: Any, inputs: Any, method: Method | str | None, options: dict[str, Any], custom_generate: CustomGenerate
) -> GenerationResult:
    """Unwrap models and tokenizers, check each argument by itself, then generate."""
    tokenizer, assistant_model, assistant_tokenizer = (
        custom_generate.tokenizer,
        custom_generate.assistant_model,
        custom_generate.assistant_tokenizer,
    )
    if isinstance(model, Pair):
        pair, model = model, model.target
        tokenizer = tokenizer if tokenizer is not None else pair.tokenizer
        other_method = method is None and any(
            is_requested(options.get(option)) for option, name in ASKED_BY.items() if not takes_assistant(name)
        )
        fits = method is None or takes_assistant(method_name(method))
        if assistant_model is None and not other_method and fits:
            assistant_model, assistant_tokenizer = pair.assistant, pair.assistant_tokenizer
    assistant_model, assistant_tokenizer = unwrap_model("assistant_model", assistant_model, assistant_tokenizer)
    wrapper, (model, _) = model, unwrap_model("model", model)
    streamer = custom_generate.streamer and custom_generate.streamer.streamer
    functions = {"streamer": streamer, "on_step": custom_generate.on_step, "cancel": custom_generate.cancel}
    check_arguments(model, {**options, **functions, "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer})
    checked = check_values(options)
    custom_generate.tokenizer, custom_generate.assistant_model, custom_generate.assistant_tokenizer = (
        tokenizer,
        assistant_model,
        assistant_tokenizer,
    )
    with peft_adapters.use_wrapper_config(wrapper, model):
        return _generate(model, inputs, method, checked, custom_generate)


def _generate(
    model: PreTrainedModel,
    inputs: Any,
    method: Method | str | None,
    checked: dict[str, Any],
    custom_generate: CustomGenerate,
) -> GenerationResult:
    """Check what depends on several arguments, then call transformers' `generate()`."""
    tokenizer, config = custom_generate.tokenizer, checked.get("generation_config")
    unsupported.check_assistant(custom_generate.assistant_model)
    custom_generate.assistant_method = drafters.assistant_method(
        model, custom_generate.assistant_model, tokenizer, custom_generate.assistant_tokenizer
    )
    configs = configs_in_order(
        options_in_config(config),
        model.generation_config,
        getattr(custom_generate.assistant_model, "generation_config", None),
    )
    custom_generate.method = select_method(method, checked, configs, custom_generate.assistant_method)
    unsupported.check_cache_use(model, value_in_effect("use_cache", checked, model))
    unsupported.check_options(
        {name: value_in_effect(name, checked, model) for name in unsupported.UNSUPPORTED_OPTIONS | checked.keys()}
    )
    own = specnb_options()
    passed = {name: value for name, value in checked.items() if name not in own}
    unsupported.check_option_names(model, passed)
    unsupported.check_cache(compat.cache_among(passed))
    passed = encode(model, inputs, passed, tokenizer)
    check_prompt(model, passed)
    unsupported.check_model(model, passed)
    strings = value_in_effect("stop_strings", passed, model)
    custom_generate.stopping_criteria = stop_string_criteria(strings, tokenizer)
    custom_generate.call_options = {**({} if config is None else vars(config)), **passed}
    if custom_generate.call_options.get("temperature") == 0:
        custom_generate.call_options["do_sample"] = False
    passed = with_cache_name(prepare_options(passed, model))
    passed.pop("stop_strings", None)
    if strings is not None:  # transformers cannot build the criterion for a callable
        passed["stop_strings"] = None
    model.generate(**passed, custom_generate=custom_generate)
    if custom_generate.result is None:
        raise RuntimeError("transformers' generate() did not call custom_generate.")
    return custom_generate.result


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
    memory: Memory | None = None,
    prediction: Prediction = None,
    stop_strings: str | Sequence[str] | None = None,
    **options: Unpack[DraftingOptions],
) -> CustomGenerate:
    """specnb's decoding as a callable: `model.generate(**inputs, custom_generate=specnb.decoder(...))`.

    For code, or a pipeline, that calls `generate()` itself. `assistant_model`, `assistant_tokenizer`, `tokenizer`,
    `streamer` and `stop_strings` must be given here: `generate()` does not hand them on to a callable. (It refuses stop
    strings, asking for a tokenizer, and drops tokenizers; a streamer or an assistant given there is refused here.) All
    else goes to `generate()`. Drafting options may be given here or there; those of the `generate()` call take
    precedence. `.result` of the decoder is the `GenerationResult` of the last call.

    With `return_dict_in_generate`, scores, logits and cache are those that `generate()` returns. The cache is a
    DynamicCache that holds all tokens but the last, ready for the next turn; None if rows were padded or ended at
    different lengths.

    Args:
        stop_strings: texts that end a row; they need `tokenizer`.
        options: drafting options. The other arguments are those of `specnb.generate`.

    Raises:
        ValueError: an unknown method or option, or a wrong value. When it is called: a streamer or an assistant that
            was given to `generate()`.
    """
    assistant_model, assistant_tokenizer = unwrap_model("assistant_model", assistant_model, assistant_tokenizer)
    if method is not None and not isinstance(method, Method):
        method_info(method)
    known = sorted(specnb_options())
    for name in options:
        if name not in known:
            raise ValueError(unknown("option", name, known) + " Give other options to generate() itself.")
    if assistant_model is not None and method is not None and not takes_assistant(method_name(method)):
        use = methods_for(drafters.drafter_kind(assistant_model) or "draft_model", str(method_name(method)))
        raise ValueError(
            f"method {method_name(method)!r} does not use assistant_model=: choose {' or '.join(map(repr, use))}, or "
            "leave it out."
        )
    bound = check_values(options)
    remembered = MemoryArguments(memory, prediction)
    remembered.check(method_name(method))
    return CustomGenerate(
        method=remembered.method(assistant_model, options) if method is None else method,
        remembered=remembered,
        options=bound,
        assistant_model=assistant_model,
        assistant_tokenizer=assistant_tokenizer,
        tokenizer=tokenizer,
        streamer=streamer,
        on_step=on_step,
        cancel=cancel,
        seed=BY_NAME["seed"].check(seed),
        stopping_criteria=stop_string_criteria(stop_strings, tokenizer),
        probabilities=probabilities,
        logprobs=BY_NAME["logprobs"].check(logprobs),
        top_logprobs=BY_NAME["top_logprobs"].check(top_logprobs),
    )


def stop_string_criteria(stop_strings: str | Sequence[str] | None, tokenizer: Any) -> list[StopStringCriteria]:
    """The stopping criterion for stop strings, which `generate()` cannot make for a callable.

    Raises:
        ValueError: there is no tokenizer, it is not one, or a stop string is empty.
    """
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
