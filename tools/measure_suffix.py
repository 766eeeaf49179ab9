"""What suffix decoding gains and costs: `python -m tools.measure_suffix [--repeats 3] [--output STEM]`.

SmolLM2-135M-Instruct on the prompts of `specnb.bench.prompts`, greedy, default settings. Plain decoding, prompt lookup
and suffix decoding take turns call by call, and each repeat begins with another one. Suffix decoding runs

- first: without a memory,
- again: with a memory of the same prompt's run,
- edited: one sentence or line of the prompt was changed; with a memory of the run of the prompt as it was,
- stale: with a memory of 100,000 tokens of other topics (the topics of Python's own help).

Ratios are of the seconds of whole calls, per prompt the median of the repeats. Every text is compared with plain
decoding's. The time of look-up and append is measured alone, in steps of one token. Target passes are counted, so they
are the same on every run up to the adaptive draft length, which goes by measured times.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import specnb
from specnb.bench import environment
from specnb.bench.prompts import PROMPTS
from specnb.bench.suite import MODEL
from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.schedules import Constant
from specnb.drafters.suffix import Suffix
from specnb.text import prompt_inputs

EDITS = {
    "edit code": (
        ("count=1", "count=2"),
        ("value < 20", "value < 25"),
        ('open(path, "a")', 'open(path, "w")'),
        ('"the stack is empty"', '"nothing to pop"'),
    ),
    "summarise": (
        (
            "In 1955 the lamp was replaced by an electric light",
            "In 1961 the lamp was replaced by a gas light",
        ),
        ("Other bees follow her in the dark of the hive", "Young bees sit around her in the hive"),
        ("In the first years a journey took two hours", "At first a journey took three hours"),
        ("Raw clay holds water", "Wet clay is soft"),
    ),
    "open story": (("clockmaker", "baker"), ("crows", "wolves"), ("raining", "snowing"), ("river", "mountain")),
}
"""By kind, what is replaced in each prompt; in the stories it is the topic word."""
STALE_TOKENS = 100_000
Arm = Callable[[], Any]


def stale_memory(tokenizer: Any) -> specnb.Memory:
    """A memory of texts that have nothing to do with the prompts."""
    memory = specnb.Memory(max_tokens=STALE_TOKENS, tokenizer=tokenizer)
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: STALE_TOKENS + 500]
    for start in range(0, len(ids), 500):
        memory.add(ids[start : start + 500])
    return memory


class Measurement:
    """Runs arms in turns; keeps seconds, target passes and whether the texts are plain decoding's."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.records = repeats, []

    def compare(self, kind: str, number: int, what: str, arms: dict[str, Arm]) -> None:
        """Time the arms, of which the first is plain decoding. An arm returns a result."""
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        passes: dict[str, int] = {}
        texts: dict[str, Any] = {}
        names = list(arms)
        for turn in range(self.repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.perf_counter()
                result = arms[name]()
                seconds[name].append(time.perf_counter() - began)
                passes[name], texts[name] = result.target_passes, result.ids
        record = {
            "kind": kind,
            "prompt": number,
            "what": what,
            "tokens": len(texts[names[0]]),
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "passes": passes,
            "same text": all(ids == texts[names[0]] for ids in texts.values()),
        }
        self.records.append(record)
        shown = ", ".join(f"{name} {record['seconds'][name]:.2f} s / {passes[name]}" for name in names)
        print(f"{kind} {number}, {what}: {shown}{'' if record['same text'] else ' OTHER TEXT'}", flush=True)


def copies(memory: specnb.Memory) -> specnb.Memory:
    """A memory with the same requests, since a run adds its own."""
    copied = specnb.Memory(memory.max_tokens + 10_000)
    for ids in memory.requests():
        copied.add(ids)
    return copied


def measure(pair: Any, repeats: int, new: int, kinds: Iterable[str], prompts: int) -> list[dict[str, Any]]:
    """All records."""
    measurement, stale = Measurement(repeats), copies(stale_memory(pair.tokenizer))

    def arm(inputs: dict[str, Any], method: str, memory: Callable[[], specnb.Memory] | None = None) -> Arm:
        def run() -> Any:
            given = {"memory": memory()} if memory else {}
            return specnb.generate(pair, **inputs, method=method, max_new_tokens=new, do_sample=False, **given)

        return run

    for kind in kinds:
        for number, text in enumerate(PROMPTS[kind][:prompts]):
            inputs = prompt_inputs(pair.tokenizer, text, device="cpu")
            first = arm(inputs, "suffix")()  # a warm-up, too
            prompt_ids, ids = inputs["input_ids"][0].tolist(), first.ids

            def remembered(prompt_ids: Sequence[int] = prompt_ids, ids: Sequence[int] = ids) -> specnb.Memory:
                memory = specnb.Memory(tokenizer=pair.tokenizer)
                memory.add(ids, prompt_ids)
                return memory

            arms = {
                "plain": arm(inputs, "plain"),
                "prompt lookup": arm(inputs, "prompt_lookup"),
                "suffix, first": arm(inputs, "suffix"),
                "suffix, again": arm(inputs, "suffix", remembered),
                "suffix, stale": arm(inputs, "suffix", lambda: stale),
            }
            measurement.compare(kind, number, "as it is", arms)
            if kind in EDITS:
                old, changed = EDITS[kind][number]
                assert old in text, (kind, number)
                edited = prompt_inputs(pair.tokenizer, text.replace(old, changed), device="cpu")
                arms = {
                    "plain": arm(edited, "plain"),
                    "prompt lookup": arm(edited, "prompt_lookup"),
                    "suffix, edited": arm(edited, "suffix", remembered),
                }
                measurement.compare(kind, number, "edited", arms)
    return measurement.records


def microseconds_per_token(pair: Any) -> dict[str, float]:
    """Of look-up and append, in steps of one token on an open text, without a memory and with 100,000 tokens."""
    text = " ".join(prompt for prompts in PROMPTS.values() for prompt in prompts)
    words = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    memory = stale_memory(pair.tokenizer)
    found = {}
    for name, given in (("own text", None), ("own text and memory", memory)):
        rounds = []
        for _ in range(5):
            row = Row(0, words[:200], 10**6, torch.Generator(), Processors(), Constant(10))
            drafter = Suffix(given)
            drafter.propose([row], [10])
            spent = []
            for token in words[200:]:
                row.ids.append(token)
                began = time.perf_counter()
                drafter.propose([row], [10])
                spent.append(time.perf_counter() - began)
            rounds.append(statistics.fmean(spent))
        found[f"look-up and append, {name}"] = 1e6 * min(rounds)
    began = time.perf_counter()
    copies(memory)
    found["append to the memory"] = 1e6 * (time.perf_counter() - began) / memory.num_tokens
    return found


def ratios(records: list[dict[str, Any]], what: str, one: str, other: str) -> dict[str, list[float]]:
    """By kind, seconds of `one` / seconds of `other`, for each prompt."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["what"] == what:
            found.setdefault(record["kind"], []).append(record["seconds"][one] / record["seconds"][other])
    return found


def report(records: list[dict[str, Any]], micros: dict[str, float]) -> str:
    """The table in Markdown."""
    lines = ["| | " + " | ".join(PROMPTS) + " |", "|---" * (len(PROMPTS) + 1) + "|"]
    for title, what, one, other in (
        ("first run, x prompt lookup", "as it is", "prompt lookup", "suffix, first"),
        ("first run, x plain", "as it is", "plain", "suffix, first"),
        ("prompt lookup, x plain", "as it is", "plain", "prompt lookup"),
        ("the same prompt again, x plain", "as it is", "plain", "suffix, again"),
        ("edited prompt, x prompt lookup", "edited", "prompt lookup", "suffix, edited"),
        ("edited prompt, x plain", "edited", "plain", "suffix, edited"),
        ("stale memory, x no memory", "as it is", "suffix, first", "suffix, stale"),
    ):
        found = ratios(records, what, one, other)
        cells = [
            f"{statistics.median(found[kind]):.2f} ({min(found[kind]):.2f})" if kind in found else ""
            for kind in PROMPTS
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    stale = [r for values in ratios(records, "as it is", "suffix, first", "suffix, stale").values() for r in values]
    edited = [
        r
        for kind, values in ratios(records, "edited", "prompt lookup", "suffix, edited").items()
        for r in values
        if kind != "open story"
    ]
    lines += ["", f"All prompts, stale memory: {statistics.median(stale):.3f} (median), {min(stale):.3f} (worst)."]
    if edited:
        lines.append(f"Edited code and summaries, x prompt lookup: {statistics.median(edited):.2f} (median).")
    lines.append(f"Microseconds per token: {', '.join(f'{name} {value:.1f}' for name, value in micros.items())}.")
    same = sum(record["same text"] for record in records)
    lines.append(f"Same text as plain decoding: {same} of {len(records)} comparisons.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--kinds", nargs="*", default=list(PROMPTS))
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--output", type=Path, help="write STEM.json and STEM.md")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    pair = specnb.load(MODEL, None)
    micros = microseconds_per_token(pair)
    records = measure(pair, given.repeats, given.max_new_tokens, given.kinds, given.prompts)
    where = environment(pair) | {"repeats": given.repeats, "max_new_tokens": given.max_new_tokens}
    text = report(records, micros)
    print(f"\n{', '.join(f'{key}: {value}' for key, value in where.items())}\n\n{text}")
    if given.output:
        data = {"environment": where, "microseconds": micros, "records": records}
        given.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        facts = ", ".join(f"{key}: {value}" for key, value in where.items())
        given.output.with_suffix(".md").write_text(f"{facts}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
