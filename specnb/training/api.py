"""`train_drafter`: answers, states, training, measuring, within a promised time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from specnb.training import checkpoint
from specnb.training.drafter import default_layers, draft_vocabulary, new_drafter
from specnb.training.examples import AnswerFile, Example, answer_prompts, encode_prompts, encode_texts
from specnb.training.fitting import Budget, DivergedError, Fitting
from specnb.training.objective import Unrolled
from specnb.training.result import Evaluation, TrainingResult
from specnb.training.states import StateStore, TargetStates, collect
from specnb.training.target_head import TargetHead

if TYPE_CHECKING:
    from specnb.bench import Comparison
    from specnb.models import Pair

ANSWERS, RESULT = "answers.jsonl", "training.json"
"""Files in the drafter's folder besides the drafter."""
_ANSWERS_SHARE, _STATES_SHARE, _MEASURE_SHARE = 0.4, 0.65, 0.12
"""Shares of the time: answers end at the first, states at the second, and the last is kept for measuring."""
_MOST_HELD_OUT = 40
_LEAST_EXAMPLES = 4
_EVALUATIONS = 12
_FIRST_REPORT = 30.0  # seconds
_LEAST_COVERAGE = 0.6
_BATCH_TOKENS = 4096  # of a pass that collects states
_MEASURED_LENGTHS = (2, 4, 6)
_MEASURED_PROMPTS, _MEASURED_TOKENS = 12, 96
_PROBED = 16  # tokens on which the head is checked
_BOUNDS: dict[str, tuple[float, float]] = {
    "minutes": (0.1, 100_000),
    "steps": (1, 10**9),
    "seed": (0, 2**63 - 1),
    "num_hidden_layers": (1, 8),
    "draft_vocab_size": (2, 10**7),
    "ttt_steps": (1, 16),
    "learning_rate": (1e-7, 1.0),
    "batch_size": (1, 4096),
    "rows": (1, 1024),
    "max_new_tokens": (2, 100_000),
    "max_length": (8, 1_000_000),
    "sampled_share": (0, 1),
    "memory_gb": (0, 10_000),
}
"""Smallest and largest value of each setting."""
_SAFETY = 1.5  # the first call of each run is warmed up


@dataclass(frozen=True)
class Progress:
    """What a training is doing.

    Attributes:
        part: "answers", "states", "training" or "measuring".
        share: how much of the part is done, 0 to 1.
        seconds: since the start of the call.
        remaining_seconds: until its end; None with a budget of steps.
        message: one line for people.
    """

    part: str
    share: float
    seconds: float
    remaining_seconds: float | None
    message: str


@dataclass
class _Run:
    """One call of `train_drafter`."""

    pair: Pair
    out: Path
    settings: dict[str, Any]
    on_progress: Callable[[Progress], object]

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
        self.on_progress(Progress(part, min(1.0, share), now - self.began, left, message))

    def timed(self, part: str, began: float) -> None:
        """Count the seconds of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began

    # ---- the parts
    def train(
        self, prompts: Sequence[str], texts: Sequence[str], held_out: Sequence[str], resume: bool
    ) -> TrainingResult:
        """Answers, states, training, measuring."""
        _check_folder(self.out, resume)
        self.out.mkdir(parents=True, exist_ok=True)
        test, train = self._examples(prompts, texts, held_out)
        layers = default_layers(self.pair.target)
        vocabulary = draft_vocabulary(train, self.settings["draft_vocab_size"])
        self._check_coverage(test, train, vocabulary)
        store = StateStore(self._memory(), self.out)
        test, train, head = self._collect(layers, store, test, train)
        drafter = new_drafter(
            self.pair.target, layers, vocabulary, self.settings["num_hidden_layers"], self.settings["seed"]
        )
        self.counts["parameters"] = sum(one.numel() for one in drafter.parameters())
        accelerator = _accelerator()
        drafter.to(accelerator.device).train()
        embedding = self.pair.target.get_input_embeddings().weight.detach().to(accelerator.device, torch.float32)
        objective = Unrolled(
            drafter,
            head,
            embedding,
            [*test, *train],
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
            range(len(test), len(test) + len(train)),
            self.settings["seed"],
            accelerator.prepare_optimizer,
            accelerator.backward,
        )
        if resume:
            checkpoint.read(self.out, fitting)
        try:
            self._fit(fitting)
        except (KeyboardInterrupt, DivergedError) as stop:
            if fitting.best is not None:
                stop.partial_result = self._finish(fitting, None, finished=False)  # type: ignore[union-attr]
            raise
        measured = self._measure(self._save(fitting), held_out if prompts else ())
        return self._finish(fitting, measured, finished=True)

    def _examples(
        self, prompts: Sequence[str], texts: Sequence[str], held_out: Sequence[str]
    ) -> tuple[list[Example], list[Example]]:
        """The held-out examples and those to learn from. Answers are kept in a file."""
        given, began = self.settings, time.monotonic()
        train = encode_texts(self.pair, texts, given["max_length"])
        if not prompts:
            return encode_texts(self.pair, held_out, given["max_length"]), train
        asked = encode_prompts(self.pair, [*held_out, *prompts], given["chat"])
        asked = _within(asked, given["max_length"])
        file = AnswerFile(self.out / ANSWERS)
        answers = file.read()[: len(asked)]
        told = [False]

        def on_answers(new: list[Example]) -> None:
            file.append(new)
            answers.extend(new)
            tokens, seconds = sum(len(one.answer) for one in answers), time.monotonic() - began
            message = f"answers: {len(answers):,} of {len(asked):,} prompts, {tokens:,} tokens"
            if seconds >= _FIRST_REPORT and not told[0]:
                told[0] = True
                message += f". {self._forecast(tokens / seconds, tokens / len(answers) * len(asked))}"
            self.report("answers", len(answers) / len(asked), message)

        common = {name: given[name] for name in ("rows", "max_new_tokens", "seed")}
        for part, share in ((asked[: len(held_out)], 0.0), (asked, given["sampled_share"])):
            answer_prompts(
                self.pair,
                part,
                start=len(answers),
                sampled_share=share,
                until=self.until(_ANSWERS_SHARE),
                on_answers=on_answers,
                **common,
            )
        self.timed("answers", began)
        learned = [one for one in answers[len(held_out) :] if len(one.answer) > 1]
        test = [one for one in answers[: len(held_out)] if len(one.answer) > 1]
        if len(learned) + len(train) < _LEAST_EXAMPLES or not test:
            raise ValueError(
                f"only {len(answers)} of {len(asked)} prompts were answered in {given['minutes']:g} minutes, too few to "
                "learn from: give more minutes, a smaller max_new_tokens, or texts=."
            )
        return test, [*learned, *train]

    def _forecast(self, rate: float, most: float) -> str:
        """What to expect, after the first answers."""
        if self.end is None:
            return f"{rate:.0f} tokens/s"
        seconds = _ANSWERS_SHARE * (self.end - self.began)
        return (
            f"{rate:.0f} tokens/s: about {min(most, rate * seconds):,.0f} tokens to learn from in "
            f"{self.settings['minutes']:g} minutes"
        )

    def _check_coverage(self, test: Sequence[Example], train: Sequence[Example], vocabulary: Tensor) -> None:
        """Count the tokens, and refuse held-out texts that are of another kind."""
        known = set(vocabulary.tolist())
        tokens = [token for example in test for token in example.answer]
        coverage = sum(token in known for token in tokens) / max(1, len(tokens))
        self.counts |= {
            "examples": len(train),
            "training tokens": sum(len(example.answer) for example in train),
            "held-out examples": len(test),
            "draft vocabulary": len(vocabulary),
            "coverage": coverage,
        }
        if coverage < _LEAST_COVERAGE:
            raise ValueError(
                f"only {coverage:.0%} of the held-out tokens are in the draft vocabulary of {len(vocabulary)} tokens: the "
                "held-out texts are of another kind or language than the others, or there are too few of these. Give "
                "held_out= of the same kind, more texts, or a larger draft_vocab_size."
            )

    def _memory(self) -> int:
        """Bytes for states in memory."""
        given = self.settings["memory_gb"]
        return int(given * 1e9) if given is not None else psutil.virtual_memory().available // 4

    def _collect(
        self, layers: Sequence[int], store: StateStore, test: list[Example], train: list[Example]
    ) -> tuple[list[Example], list[Example], TargetHead]:
        """Collect states. With a promised time, examples for which there is none left are dropped."""
        began, target = time.monotonic(), TargetStates(self.pair.target, layers)
        head = _head(self.pair.target, target, test[0])
        until, examples = self.until(_STATES_SHARE), [*test, *train]

        def on_examples(number: int) -> bool:
            self.report("states", number / len(examples), f"states: {number:,} of {len(examples):,} texts")
            return until is None or time.monotonic() < until or number < len(test) + _LEAST_EXAMPLES

        collect(target, examples, store, batch_tokens=_BATCH_TOKENS, on_examples=on_examples)
        self.timed("states", began)
        kept = train[: len(store) - len(test)]
        self.counts["training tokens"] = sum(len(example.answer) for example in kept)
        self.counts["examples"] = len(kept)
        return test, kept, head

    def _fit(self, fitting: Fitting) -> None:
        """Train, and tell how it goes."""
        began = time.monotonic()
        budget = Budget(self.until(1 - _MEASURE_SHARE), self.settings["steps"])

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

        drafter = fitting.objective.drafter
        drafter.load_state_dict(fitting.best_weights)
        drafter.eval().to(self._dtype()).save_pretrained(self.out)
        target = self.pair
        return Pair(target.target, target.tokenizer, load_drafter(self.out), None, target.name, target.card)

    def _dtype(self) -> torch.dtype:
        """The dtype of the stored drafter: the target's, which it runs beside."""
        dtype: torch.dtype = self.pair.target.dtype
        return dtype if dtype.is_floating_point else torch.float32

    def _measure(self, pair: Pair, prompts: Sequence[str]) -> Comparison | None:
        """Compare the drafter with plain decoding and prompt lookup on held-out prompts, in the time that is left."""
        from specnb.bench import compare

        self.measured = pair
        if not prompts:
            return None
        began = time.monotonic()
        cancel, end = threading.Event(), self.end
        timer = threading.Timer(max(0.0, end - began), cancel.set) if end is not None else None
        runs = ["prompt_lookup", *({"method": "eagle3", "num_assistant_tokens": k} for k in _MEASURED_LENGTHS)]
        tokens = _MEASURED_TOKENS
        one = self._seconds_per_token() * tokens * (len(runs) + 1)
        fits = _MEASURED_PROMPTS if end is None else int((end - began) / (_SAFETY * one))
        chosen = prompts[: max(1, min(fits, _MEASURED_PROMPTS))]
        self.report("measuring", 0.0, f"measuring: {len(chosen)} held-out prompts, {len(runs) + 1} runs")
        if timer is not None:
            timer.start()
        try:
            return compare(
                pair,
                chosen,
                runs,
                repeats=1,
                max_new_tokens=tokens,
                do_sample=False,
                chat=self.settings["chat"],
                cancel=cancel,
            )
        except ValueError:
            if not cancel.is_set():
                raise
            return None  # the time was too short for one repeat
        finally:
            if timer is not None:
                timer.cancel()
            self.timed("measuring", began)

    def _seconds_per_token(self) -> float:
        """Of plain decoding, measured on a few tokens."""
        import specnb

        began, tokens = time.monotonic(), 8
        specnb.generate(self.pair, "a", method="plain", max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return (time.monotonic() - began) / tokens

    def _finish(self, fitting: Fitting, comparison: Comparison | None, finished: bool) -> TrainingResult:
        """The result, written beside the drafter."""
        pair = self.measured if finished else self._save(fitting)
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


def train_drafter(
    pair: Pair,
    prompts: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    *,
    out: str | os.PathLike[str],
    minutes: float = 15.0,
    steps: int | None = None,
    held_out: Sequence[str] | None = None,
    resume: bool = False,
    chat: bool | None = None,
    seed: int = 0,
    num_hidden_layers: int = 1,
    draft_vocab_size: int = 4096,
    ttt_steps: int = 3,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    rows: int = 16,
    max_new_tokens: int = 192,
    max_length: int = 512,
    sampled_share: float = 0.5,
    memory_gb: float | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> TrainingResult:
    """Train an EAGLE-3 drafter for a target, from the target's own answers to prompts, or from texts.

    The target answers the prompts in rows, part of them greedily and part sampled. Its states at three layers are kept,
    and a drafter of one layer learns to predict its next tokens from them, `ttt_steps` tokens ahead (training-time
    test of EAGLE-3, Li et al. 2503.01840). The drafter is written in the speculators format. The target is only read.

    Args:
        pair: a target with its tokenizer, from `specnb.load`.
        prompts: what the target is to answer; as many and as much like the later prompts as possible.
        texts: texts to learn from as they are, instead of prompts or in addition to them.
        out: folder of the drafter. `specnb.load(TARGET, out)` and vLLM read it.
        minutes: for all of it, measuring included.
        steps: number of optimizer steps instead of minutes. All prompts are answered then, and the same data and seed
            give the same drafter.
        held_out: prompts (or, with `texts` alone, texts) to measure with. None takes a tenth of those given, at most 40.
        resume: go on with what is in `out`: answers, weights and optimizer are read from there.
        chat: whether prompts are sent as chat messages; None if the tokenizer has a chat template.
        seed: of everything that is random.
        num_hidden_layers: layers of the drafter.
        draft_vocab_size: most tokens that the drafter can propose: those that are most frequent in the answers.
        ttt_steps: number of tokens that are unrolled in training.
        learning_rate: the highest; it falls along a cosine.
        batch_size: texts per optimizer step.
        rows: prompts that are answered together.
        max_new_tokens: most tokens of an answer.
        max_length: most tokens of a text; longer texts are cut into pieces.
        sampled_share: share of the answers that is sampled, at temperature 0.6.
        memory_gb: memory for the target's states, in gigabytes; more of them go to a file in `out`. None takes a quarter
            of the memory that is free.
        on_progress: called with each `Progress`; None prints the messages.

    Returns:
        The result: what is accepted on held-out texts, the measured speed, and the pair with its drafter.

    Raises:
        ValueError: an argument is not valid, there are too few prompts, `out` holds something else, held-out texts have
            tokens that the others do not have, or the loss is not a number any more.
        OSError: the disk is full.
        KeyboardInterrupt: with the result so far as `.partial_result`; the best drafter so far is in `out`.
    """
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("pair", "prompts", "texts", "out", "held_out", "resume", "on_progress")
    }
    _check_settings(settings)
    asked, given = _texts("prompts", prompts), _texts("texts", texts)
    testing, asked, given = _split(asked, given, held_out, seed)
    run = _Run(pair, Path(out), settings, on_progress or (lambda progress: print(progress.message, flush=True)))
    return run.train(asked, given, testing, resume)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a value out of bounds."""
    for name, (low, high) in _BOUNDS.items():
        value = settings[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = name in ("minutes", "learning_rate", "sampled_share", "memory_gb")
        if value is None and name in ("steps", "memory_gb"):
            continue
        if not number or not (whole or isinstance(value, int)) or not low <= value <= high:
            kind = "a number" if whole else "an int"
            raise ValueError(f"{name}={value!r} is not valid: {name} must be {kind} from {low:g} to {high:g}.")


def _texts(name: str, given: Any) -> list[str]:
    """Texts as a list. Raises ValueError if one is empty or no text."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{name}= takes a list of texts, not a {type(given).__name__}.")
    texts = list(given)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            what = "is empty" if isinstance(text, str) else f"is a {type(text).__name__}"
            raise ValueError(f"{name}=: number {number} of {len(texts)} {what}; each must be a text.")
    return texts


def _split(prompts: list[str], texts: list[str], held_out: Any, seed: int) -> tuple[list[str], list[str], list[str]]:
    """Held-out texts, prompts and texts. A tenth of the prompts, or of the texts, is held out if none are given."""
    source = prompts or texts
    if len(set(prompts)) + len(set(texts)) < _LEAST_EXAMPLES:
        raise ValueError(
            f"{len(prompts)} prompts and {len(texts)} texts are too few to learn from: give at least {_LEAST_EXAMPLES} "
            "different ones. A useful drafter takes hundreds."
        )
    testing = _texts("held_out", held_out)
    if not testing:
        source = list(dict.fromkeys(source))
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed)).tolist()
        count = min(_MOST_HELD_OUT, max(1, len(source) // 10))
        testing = [source[i] for i in sorted(order[:count])]
    left = set(testing)
    return testing, [one for one in prompts if one not in left], [one for one in texts if one not in left]


def _check_folder(out: Path, resume: bool) -> None:
    """Raise ValueError if the folder holds something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file: give a folder.")
    found = sorted(one.name for one in out.iterdir()) if out.exists() else []
    if found and not resume:
        raise ValueError(
            f"out={str(out)!r} is not empty ({', '.join(found[:3])}): give another folder, or resume=True to go on with "
            "a training there."
        )
    if resume and not {ANSWERS, checkpoint.FILE} & set(found):
        raise ValueError(f"out={str(out)!r} holds no training to resume: leave resume=True out.")


def _within(prompts: list[list[int]], most: int) -> list[list[int]]:
    """The prompts. Raises ValueError for one that is too long."""
    for number, ids in enumerate(prompts, 1):
        if len(ids) > most:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, more than max_length={most}: shorten it, or raise it."
            )
    return prompts


def _head(model: Any, target: TargetStates, example: Example) -> TargetHead:
    """The target's head, checked on the first tokens of an example."""
    ids = example.ids[:_PROBED]
    last = target([Example([], ids)])[0][:, -int(model.get_output_embeddings().weight.shape[1]) :]
    with torch.no_grad():
        given = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
        logits = model(input_ids=given, use_cache=False).logits[0]
    return TargetHead(model, last, logits)


def _accelerator() -> Any:
    """accelerate's Accelerator: mixed precision where a GPU has bfloat16, else float32."""
    from accelerate import Accelerator

    half = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return Accelerator(mixed_precision="bf16" if half else "no")
