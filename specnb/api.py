"""`specnb.generate` and `specnb.decoder`: transformers' `generate()` with speculative methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from specnb import drafters, refusals
from specnb.engine import Decoder
from specnb.inputs import check_arguments, check_prompt, encode, unwrapped
from specnb.listeners import Once, ended
from specnb.models import Pair
from specnb.models.mistral import for_stop_strings
from specnb.options import ASKED_BY, BY_NAME, METHODS, Method, unknown
from specnb.resolve import OF_ASSISTANTS, OF_SPECNB, asks, method_name, resolve
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
    follows the target's law. Models, configs and tokenizers are left as they are.

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
            `verification`) among them. One given here decides; else the target's own generation config; nothing is
            read from the draft's.

    Returns:
        A `GenerationResult`; `.sequences` is what `generate()` would have returned.

    Raises:
        ValueError: an option with a wrong value or one that cannot apply, a pair that does not fit, a model whose
            cache cannot be rolled back; all before the first token.
        KeyboardInterrupt: as raised, with the result so far as `.partial_result` (any other exception likewise). A streamer is
            told the end in any case.
    """
    with ended(streamer) as once:
        return _generate(model, inputs, method, assistant_model, tokenizer, assistant_tokenizer, once, on_step, cancel,
                         seed, probabilities, logprobs, top_logprobs, options)  # fmt: skip


def _generate(model: Any, inputs: Any, method: Method | str | None, assistant_model: Any, tokenizer: Any, assistant_tokenizer: Any,
              streamer: Once | None, on_step: Callable[[Step], object] | None, cancel: threading.Event | None, seed: int | None,
              probabilities: bool, logprobs: bool, top_logprobs: int, options: dict[str, Any]) -> GenerationResult:  # fmt: skip
    assistant_model, assistant_tokenizer = unwrapped("assistant_model", assistant_model, assistant_tokenizer)
    if isinstance(model, Pair):
        pair, model = model, model.target
        tokenizer = tokenizer if tokenizer is not None else pair.tokenizer
        other = method is None and any(asks(options.get(option)) for option in ASKED_BY)
        if assistant_model is None and not other and method_name(method) in (None, *OF_ASSISTANTS):
            assistant_model, assistant_tokenizer = pair.assistant, pair.assistant_tokenizer
    model, _ = unwrapped("model", model)
    check_arguments(model, streamer and streamer.streamer, options.get("generation_config"))
    checked = {name: BY_NAME[name].check(value) if name in BY_NAME else value for name, value in options.items()}
    config = checked.get("generation_config") or model.generation_config
    assistant = drafters.method_for(model, assistant_model, tokenizer, assistant_tokenizer)
    chosen = resolve(method, checked, config, assistant)
    refusals.check_options(checked)
    passed = {name: value for name, value in checked.items() if name not in OF_SPECNB}
    refusals.check_names(model, passed)
    passed = encode(model, inputs, passed, tokenizer)
    check_prompt(model, passed)
    refusals.check_model(model, passed)
    stop_strings = passed.pop("stop_strings", None)
    engine = Decoder(chosen, None, assistant_model, assistant_tokenizer, tokenizer, streamer, on_step, cancel, BY_NAME["seed"].check(seed),
                     stopping(stop_strings if stop_strings is not None else config.stop_strings, tokenizer), probabilities, assistant,
                     BY_NAME["logprobs"].check(logprobs), BY_NAME["top_logprobs"].check(top_logprobs))  # fmt: skip
    if config.stop_strings is not None:
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
) -> Decoder:
    """The engine as a `custom_generate` callable: `model.generate(**inputs, custom_generate=specnb.decoder(...))`.

    For code, or a pipeline, that calls `generate()` itself. What `generate()` does not hand to a callable is bound here:
    the assistant, tokenizers, streamer and stop strings; the rest goes to `generate()` as ever. Drafting options may be
    given in either place; the call's decide. Where neither has one, transformers' own default applies, as it would there.
    `.result` of the decoder is the last call's `GenerationResult`. Arguments as in `specnb.generate`.

    With `return_dict_in_generate`, scores, logits and cache are what `generate()` returns. The cache is a DynamicCache with all but
    the last token, ready for the next turn; None where rows were padded or ended at different lengths.
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
    return Decoder(method, bound, assistant_model, assistant_tokenizer, tokenizer, streamer, on_step, cancel,
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
