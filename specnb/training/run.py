"""One training: answers, states, training, measuring."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from specnb.training import checkpoint
from specnb.training.arguments import ANSWERS, LEAST_EXAMPLES, check_folder, within
from specnb.training.drafter import default_layers, draft_vocabulary, new_drafter
from specnb.training.examples import AnswerFile, Example, answer_prompts, encode_prompts, encode_texts
from specnb.training.fitting import Budget, Fitting, make_accelerator
from specnb.training.kept_states import KeptStates
from specnb.training.measure import measure
from specnb.training.objective import Unrolled
from specnb.training.result import Evaluation, Progress, TrainingResult
from specnb.training.states import SORTED, StateStore, TargetStates, collect
from specnb.training.target_head import TargetHead, checked_head

if TYPE_CHECKING:
    from specnb.bench import Comparison
    from specnb.models import Pair

RESULT = "training.json"
"""The file with the result, in the drafter's folder."""
_ANSWERS_SHARE, _STATES_SHARE, _MEASURE_SHARE = 0.4, 0.65, 0.12
"""Shares of the time: answers end at the first, states at the second, and the last is kept for measuring."""
_EVALUATIONS = 12
_FIRST_REPORT = 30.0  # seconds
_LEAST_COVERAGE = 0.6
_BATCH_TOKENS = 4096  # of a pass that collects states


@dataclass
class Run:
    """One call of `train_drafter`."""

    pair: Pair
    out: Path
    settings: dict[str, Any]
    on_progress: Callable[[Progress], object]
    keep_states: bool = False
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        minutes = self.settings["minutes"]
        self.end = None if self.settings["steps"] is not None else self.began + 60 * minutes
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, Any] = {}

    def until(self, share: float) -> float | None:
        """The time at which a share of the promised time has passed; None with a budget of steps."""
        return None if self.end is None else self.began + share * (self.end - self.began)

    def report(self, part: str, share: float, message: str) -> None:
        """Tell the user."""
        now = time.monotonic()
        left = None if self.end is None else max(0.0, self.end - now)
        if self.cancel is not None and self.cancel.is_set() and share < 1:
            raise KeyboardInterrupt
        try:
            self.on_progress(Progress(part, min(1.0, share), now - self.began, left, message))
        except BaseException:
            self.on_progress = lambda progress: None  # what was reached is still written, without it
            raise

    def timed(self, part: str, began: float) -> None:
        """Count the seconds of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began

    # ---- the parts
    def train(
        self, prompts: Sequence[str], texts: Sequence[str], held_out: Sequence[str], resume: bool
    ) -> TrainingResult:
        """Answers, states, training, measuring."""
        check_folder(self.out, resume)
        self.out.mkdir(parents=True, exist_ok=True)
        test, train = self._examples(prompts, texts, held_out)
        layers = default_layers(self.pair.target)
        vocabulary = draft_vocabulary(train, self.settings["draft_vocab_size"])
        self._check_coverage(test, vocabulary)
        stored = KeptStates(self.out, self.pair.target, layers) if self.keep_states else None
        store, examples = StateStore(self._memory(), self.out, stored), [*test, *train]
        numbers, head = self._collect(layers, store, examples, len(test))
        drafter = new_drafter(
            self.pair.target, layers, vocabulary, self.settings["num_hidden_layers"], self.settings["seed"]
        )
        self.counts["parameters"] = sum(one.numel() for one in drafter.parameters())
        accelerator = make_accelerator()
        drafter.to(accelerator.device).train()
        embedding = self.pair.target.get_input_embeddings().weight.detach().to(accelerator.device, torch.float32)
        objective = Unrolled(
            drafter,
            head,
            embedding,
            examples,
            store,
            range(len(test)),
            self.settings["ttt_steps"],
            self.settings["batch_size"],
            accelerator.autocast,
        )
        fitting = Fitting(
            objective,
            self.settings["learning_rate"],
            self.settings["batch_size"],
            numbers,
            [len(examples[i].ids) for i in numbers],
            self.settings["seed"],
            accelerator.prepare_optimizer,
            accelerator.backward,
        )
        if resume:
            checkpoint.read(self.out, fitting)
        try:
            self._fit(fitting)
        except BaseException as stop:  # an interrupt, a loss that is not a number, an error of on_progress
            if fitting.best is not None:
                partial = self._finish(fitting, self._save(fitting), None, False)
                stop.partial_result = partial  # type: ignore[attr-defined]
            raise
        pair = self._save(fitting)
        try:
            measured = self._measure(pair, held_out if prompts else ())
        except BaseException as stop:
            stop.partial_result = self._finish(fitting, pair, None, True)  # type: ignore[attr-defined]
            raise
        return self._finish(fitting, pair, measured, True)

    def _examples(
        self, prompts: Sequence[str], texts: Sequence[str], held_out: Sequence[str]
    ) -> tuple[list[Example], list[Example]]:
        """The held-out examples and those to learn from. Answers are kept in a file."""
        given, began = self.settings, time.monotonic()
        train = encode_texts(self.pair, texts, given["max_length"])
        if not prompts:
            return encode_texts(self.pair, held_out, given["max_length"]), train
        asked = encode_prompts(self.pair, [*held_out, *prompts], given["chat"])
        asked = within(asked, given["max_length"])
        file = AnswerFile(self.out / ANSWERS)
        known = {(tuple(one.prompt), one.sampled): one for one in file.read()}
        told = False

        def found(number: int) -> Example | None:
            """The answer to a prompt: greedy for those held out, else of either kind."""
            greedy, key = known.get((tuple(asked[number]), False)), (tuple(asked[number]), True)
            return greedy if number < len(held_out) else greedy or known.get(key)

        read = [one for i in range(len(asked)) if (one := found(i)) is not None]
        there, tokens = len(read), sum(len(one.answer) for one in read)
        resumed = tokens

        def on_answers(new: list[Example]) -> None:
            nonlocal there, tokens, told
            file.append(new)
            known.update({(tuple(one.prompt), one.sampled): one for one in new})
            there, tokens = there + len(new), tokens + sum(len(one.answer) for one in new)
            seconds = time.monotonic() - began
            message = f"answers: {there:,} of {len(asked):,} prompts, {tokens:,} tokens"
            if seconds >= _FIRST_REPORT and not told:
                told = True
                message += f". {self._forecast(resumed, (tokens - resumed) / seconds, tokens / there * len(asked))}"
            self.report("answers", there / len(asked), message)

        common = {name: given[name] for name in ("rows", "max_new_tokens", "seed")}
        parts = range(len(held_out)), range(len(held_out), len(asked))
        for part, share in zip(parts, (0.0, given["sampled_share"]), strict=True):
            answer_prompts(
                self.pair,
                asked,
                numbers=[i for i in part if found(i) is None],
                sampled_share=share,
                until=self.until(_ANSWERS_SHARE),
                on_answers=on_answers,
                cancel=self.cancel,
                **common,
            )
        self.timed("answers", began)
        answers = [one for i in parts[1] if (one := found(i)) is not None]
        learned = [one for one in answers if len(one.answer) > 1]
        test = [one for i in parts[0] if (one := found(i)) is not None and len(one.answer) > 1]
        if len(learned) + len(train) < LEAST_EXAMPLES or not test:
            late = len(answers) + len(held_out) < len(asked)
            why = (
                f" after {len(answers)} of {len(parts[1])} prompts were answered in the time for answers"
                if late
                else ""
            )
            more = "more minutes, a smaller max_new_tokens" if late else "more prompts"
            raise ValueError(
                f"only {len(learned) + len(train)} texts are there to learn from and {len(test)} to measure with{why}: "
                f"give {more}, or texts=. The answers are kept in {self.out}; resume=True uses them."
            )
        return test, [*learned, *train]

    def _forecast(self, resumed: int, rate: float, most: float) -> str:
        """What to expect, after the first new answers, with tokens that were there before."""
        if self.end is None:
            return f"{rate:.0f} tokens/s"
        seconds = _ANSWERS_SHARE * (self.end - self.began)
        return (
            f"{rate:.0f} tokens/s: about {min(most, resumed + rate * seconds):,.0f} tokens to learn from in "
            f"{self.settings['minutes']:g} minutes"
        )

    def _check_coverage(self, test: Sequence[Example], vocabulary: Tensor) -> None:
        """Count the tokens, and refuse held-out texts that are of another kind."""
        known = set(vocabulary.tolist())
        tokens = [token for example in test for token in example.answer]
        coverage = sum(token in known for token in tokens) / max(1, len(tokens))
        self.counts |= {
            "held-out examples": len(test),
            "draft vocabulary": len(vocabulary),
            "coverage": coverage,
        }
        if coverage < _LEAST_COVERAGE:
            full = len(vocabulary) >= self.settings["draft_vocab_size"]
            raise ValueError(
                f"only {coverage:.0%} of the held-out tokens are in the draft vocabulary of {len(vocabulary)} tokens: "
                "the held-out texts are of another kind or language than the others, or there are too few of these. "
                f"Give more texts, {'a larger draft_vocab_size, ' if full else ''}or held_out= of the same kind."
            )

    def _memory(self) -> int:
        """Bytes for states in memory."""
        given = self.settings["memory_gb"]
        return int(given * 1e9) if given is not None else psutil.virtual_memory().available // 4

    def _collect(
        self, layers: Sequence[int], store: StateStore, examples: list[Example], test: int
    ) -> tuple[list[int], TargetHead]:
        """Collect states; returns the numbers of the examples to learn from, and the head.

        The first `test` examples are to measure with. With a promised time, those for which there is none left are
        dropped.
        """
        began, target = time.monotonic(), TargetStates(self.pair.target, layers)
        head = checked_head(self.pair.target, target, examples[0])
        until, least = self.until(_STATES_SHARE), -(-(test + LEAST_EXAMPLES) // SORTED) * SORTED

        def on_examples(number: int) -> bool:
            self.report("states", number / len(examples), f"states: {number:,} of {len(examples):,} texts")
            return until is None or time.monotonic() < until or number < least

        collect(target, examples, store, batch_tokens=_BATCH_TOKENS, on_examples=on_examples)
        self.timed("states", began)
        numbers = [i for i in range(test, len(examples)) if i in store]
        self.counts["training tokens"] = sum(len(examples[i].answer) for i in numbers)
        self.counts["examples"] = len(numbers)
        return numbers, head

    def _fit(self, fitting: Fitting) -> None:
        """Train, and tell how it goes."""
        began = time.monotonic()
        budget = Budget(self.until(1 - _MEASURE_SHARE), self.settings["steps"], self.cancel)

        def on_evaluation(found: Evaluation, progress: float) -> None:
            checkpoint.write(self.out, fitting)
            shares = " ".join(f"{share:.2f}" for share in found.acceptance)
            loss = "" if found.loss is None else f", loss {found.loss:.3f}"
            message = f"training: step {found.step}{loss}, accepted {shares}, {found.mean_acceptance_length:.2f} a pass"
            self.report("training", progress, message)

        try:
            fitting.run(budget, [i / _EVALUATIONS for i in range(1, _EVALUATIONS + 1)], on_evaluation)
        finally:
            self.timed("training", began)

    def _save(self, fitting: Fitting) -> Pair:
        """Write the best drafter; returns the pair with it, as `specnb.load` reads it."""
        from specnb.models import Pair, load_drafter

        drafter: Any = fitting.objective.drafter
        drafter.load_state_dict(fitting.best_weights)
        drafter.eval().to(self._dtype()).save_pretrained(self.out)
        target = self.pair
        return Pair(target.target, target.tokenizer, load_drafter(self.out), None, target.name, target.card)

    def _dtype(self) -> torch.dtype:
        """The dtype of the stored drafter: the target's, which it runs beside."""
        dtype: torch.dtype = self.pair.target.dtype
        return dtype if dtype.is_floating_point else torch.float32

    def _measure(self, pair: Pair, prompts: Sequence[str]) -> Comparison | None:
        """Compare the drafter with plain decoding and prompt lookup, in the time that is left."""
        began = time.monotonic()
        if not prompts:
            return None
        self.report("measuring", 0.0, f"measuring on up to {len(prompts)} held-out prompts")
        found = measure(pair, prompts, self.settings["chat"], self.end, self.cancel)
        self.timed("measuring", began)
        return found

    def _finish(self, fitting: Fitting, pair: Pair, comparison: Comparison | None, finished: bool) -> TrainingResult:
        """The result, written beside the drafter."""
        assert fitting.best is not None
        result = TrainingResult(
            out=str(self.out),
            settings=self.settings,
            counts=self.counts,
            seconds=self.seconds,
            history=fitting.history,
            best=fitting.best,
            comparison=comparison,
            finished=finished,
            pair=pair,
        )
        (self.out / RESULT).write_text(result.to_json(indent=1), encoding="utf-8")
        self.report("measuring", 1.0, result.verdict)
        return result
