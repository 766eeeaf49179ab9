"""`python -m specnb demo`: compares plain decoding, prompt lookup and a draft model on one prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specnb.models import embedded
from specnb.options import WARM_UP_TOKENS
from specnb.text import prompt_inputs
from specnb.trace import GenerationResult
from specnb.views.table import Table
from specnb.views.text import marked_text, speed_text

DEFAULT_MODEL, DRAFT = embedded.DEFAULT
REAL_MODEL = "smollm2-135m-q4"
TINY_PROMPT = """Tell this story with a sheep instead of a turtle: There was once a slow turtle called Paula. Paula \
lived at the beach and liked to eat leaves. Paula hid a torn map behind a door, so that nobody could take it. It was a \
cold winter day. But a kind duck had seen it. "Your map is safe with me," said the duck. Paula was glad, and together \
they followed the map to the river."""
PROMPT = """Copy this text:

The old fisherman rowed out to the lighthouse every morning before sunrise. The keeper of the lighthouse gave the old \
fisherman a cup of hot tea, and the old fisherman gave the keeper of the lighthouse a basket of fresh fish. One winter \
the lighthouse stayed dark, and the old fisherman rowed out in the storm to light the lamp himself."""


@dataclass
class _TimedRun:
    """A method's result. `note` says which draft model was used."""

    title: str
    result: GenerationResult
    note: str = ""


def run_methods(pair: Any, prompt: str, max_new_tokens: int) -> Iterator[_TimedRun]:
    """Generate greedily from the same prompt with plain decoding, prompt lookup, and a draft model if there is one.

    Args:
        pair: the `Pair` to run.
        prompt: the text of the prompt.
        max_new_tokens: most tokens to generate.
    """
    import specnb

    inputs = prompt_inputs(pair.tokenizer, prompt, device=pair.target.device)

    def run(method: str | None, tokens: int = max_new_tokens, **options: Any) -> GenerationResult:
        return specnb.generate(pair, **inputs, method=method, max_new_tokens=tokens, do_sample=False, **options)

    run("plain", min(WARM_UP_TOKENS, max_new_tokens))
    yield _TimedRun("plain", run("plain"))
    yield _TimedRun("prompt_lookup", run("prompt_lookup"))
    draft, note = select_draft(pair)
    if draft is not None:
        result = run(None, **({} if draft is pair.assistant else {"assistant_model": draft}))
        yield _TimedRun(result.method, result, note)


def select_draft(pair: Any) -> tuple[Any, str]:
    """Choose a draft model: the pair's, or else the first third of the target's own layers.

    Returns:
        The draft model (None if the target is too small to be truncated), and a note that says what it is.
    """
    import specnb

    if pair.assistant is not None:
        return pair.assistant, "draft: the assistant of the pair"
    layers = int(pair.target.config.get_text_config().num_hidden_layers)
    if layers < 2:
        return None, ""
    third = max(1, round(layers / 3))
    note = f"draft: the target's own first {third} of {layers} layers, not trained to draft, so expect no speed-up"
    return specnb.truncate(pair.target, third), note


def comparison_table(done: Sequence[_TimedRun]) -> str:
    """A table with one row per run: speed, speed-up over plain decoding, target passes, acceptance, and equality.

    Args:
        done: the runs, plain decoding first.
    """
    plain = done[0].result
    headers = (
        "method",
        "tokens/s",
        "speed-up",
        "target passes",
        "acceptance rate",
        "mean acceptance length",
        "same text as plain",
    )
    lines = []
    for run in done:
        result = run.result
        drafted = bool(result.num_draft_tokens)
        speed = result.tokens_per_second
        lines.append(
            (
                run.title,
                f"{speed:.1f}",
                f"{speed / plain.tokens_per_second:.2f}x" if plain.tokens_per_second else None,
                result.target_passes or len(result.steps),
                f"{result.draft_acceptance_rate:.1%}" if drafted else None,
                result.mean_acceptance_length if drafted else None,
                result.ids == plain.ids,
            )
        )
    return Table(lines, headers).to_text()


def demo(model: str, prompt: str | None, max_new_tokens: int) -> None:
    """Load a model, run the methods, and print texts, statistics and a table.

    Args:
        model: what `specnb.load` takes.
        prompt: the text of the prompt; None chooses one that suits the model.
        max_new_tokens: most tokens to generate.
    """
    import specnb

    ansi = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    tiny = model in embedded.CARDS
    if prompt is None:
        prompt = TINY_PROMPT if tiny else PROMPT
    print(f"loading {model} ...", flush=True)
    pair = specnb.load(model, assistant=DRAFT if model == DEFAULT_MODEL else "auto")
    print(f"{pair.describe()}\n\nprompt: {prompt}\n", flush=True)
    done = []
    for run in run_methods(pair, prompt, max_new_tokens):
        done.append(run)
        print(f"--- {run.title}" + (f" ({run.note})" if run.note else ""))
        print(f"{marked_text(run.result, ansi)}\n{speed_text(run.result)}\n", flush=True)
    print(comparison_table(done))
    print("One run each: times vary from run to run.")
    if tiny:
        print(
            "A tiny model shows how it works, not what it saves. "
            f"With a real one: python -m specnb demo --model {REAL_MODEL}"
        )
