"""Drafters trained from a target's own answers: what is learned, what is kept, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import specnb
from specnb.models.eagle3 import Eagle3Drafter
from specnb.training import Progress, TrainingResult, checkpoint, measure, train_drafter
from specnb.training import run as training_run
from specnb.training.drafter import default_layers, draft_vocabulary, new_drafter
from specnb.training.examples import Example
from specnb.training.fitting import Fitting
from specnb.training.kept_states import KeptStates
from specnb.training.objective import Unrolled
from specnb.training.states import StateStore, TargetStates, collect
from specnb.training.target_head import TargetHead

PROMPTS = [
    f"Repeat this text exactly: {name} is a {job}. {name} lives in a {home}."
    for name in ("Mia", "Tom", "Anna", "Ben")
    for job in ("doctor", "baker")
    for home in ("flat", "house")
]
QUICK: dict[str, Any] = {
    "steps": 12,
    "learning_rate": 2e-2,
    "max_new_tokens": 12,
    "rows": 8,
    "batch_size": 4,
    "on_progress": lambda progress: None,
}


@pytest.fixture(scope="module")
def pair() -> specnb.Pair:
    return specnb.load("tiny-llama")


@pytest.fixture(scope="module")
def trained(pair: specnb.Pair, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    before = {name: value.clone() for name, value in pair.target.state_dict().items()}
    config = json.dumps(pair.target.config.to_dict(), default=str, sort_keys=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "MAX_NEW_TOKENS", 6)
        result = train_drafter(pair, PROMPTS, out=tmp_path_factory.mktemp("drafter") / "out", **QUICK)
    assert all(torch.equal(before[name], value) for name, value in pair.target.state_dict().items())
    assert json.dumps(pair.target.config.to_dict(), default=str, sort_keys=True) == config
    assert pair.assistant is None or not isinstance(pair.assistant, Eagle3Drafter)
    return result


def objective(pair: specnb.Pair, examples: list[Example], folder: Path) -> tuple[Unrolled, Eagle3Drafter]:
    layers = default_layers(pair.target)
    states, store = TargetStates(pair.target, layers), StateStore(10**9, folder)
    collect(states, examples, store, batch_tokens=512, on_examples=lambda number: True)
    drafter = new_drafter(pair.target, layers, draft_vocabulary(examples, 64), 2, seed=3).eval()
    last = states([examples[0]])[0][:, -pair.target.config.hidden_size :]
    with torch.no_grad():
        logits = pair.target(torch.tensor([examples[0].ids])).logits[0]
    head = TargetHead(pair.target, last, logits)
    embedding = pair.target.get_input_embeddings().weight
    return Unrolled(drafter, head, embedding, examples, store, [0], 3, 4), drafter


def some(count: int, seed: int = 0) -> list[Example]:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 200, (12 + i,), generator=draw).tolist() for i in range(count)]
    return [Example(one[:4], one[4:]) for one in ids]


def test_an_unrolled_step_is_a_step_of_drafting(pair: specnb.Pair, tmp_path: Path) -> None:
    """Against entries that are run one by one, as the drafter does it."""
    examples = some(1)
    learned, drafter = objective(pair, examples, tmp_path)
    tokens, states, _, _ = learned._batch([0])
    embedding = pair.target.get_input_embeddings().weight
    with torch.no_grad():
        steps = [drafter.compute_logits(one)[0] for one in learned._unroll(tokens, states, 3)]
        combined = drafter.combine_hidden_states(states)
        for entry in range(len(examples[0].ids) - 4):
            known, keys = combined[:, : entry + 1], Keys()
            for step in range(3):
                first = 0 if step == 0 else entry + step
                ids = tokens[:, first + 1 : entry + step + 2]
                at = torch.arange(first, entry + step + 1)[None]
                angles = drafter.rotary_emb(known, at)
                causal = torch.ones(ids.shape[1], entry + step + 1, dtype=torch.bool).tril(first)[None, None]
                out = drafter(torch.nn.functional.embedding(ids, embedding), known, angles, causal, keys)
                logits, after = drafter.compute_logits(out[:, -1:])
                assert torch.allclose(logits[0, 0], steps[step][0, entry], atol=2e-4), (entry, step)
                known = after


def test_the_loss_is_that_of_each_entry_by_itself(pair: specnb.Pair, tmp_path: Path) -> None:
    """Against a sum over entries, steps and tokens, with all entries unrolled."""
    examples = some(3)
    learned, drafter = objective(pair, examples, tmp_path)
    ids, total = drafter.target_ids(), 0.0
    with torch.no_grad():
        for step in range(3):
            found = []
            for example in examples:
                tokens = torch.tensor([example.ids])
                laws = pair.target(tokens).logits[0][:, ids].softmax(-1)
                states = learned._batch([examples.index(example)])[1]
                logits = drafter.compute_logits(list(learned._unroll(tokens, states, 3))[step])[0][0].log_softmax(-1)
                for entry in range(len(example.prompt) - 1, len(example.ids) - 1 - step):
                    found.append(-float((laws[entry + 1 + step] * logits[entry]).sum()))
            total += 0.8**step * sum(found) / len(found)
        assert float(learned.loss([0, 1, 2])) == pytest.approx(total, rel=1e-3)


class Keys:
    """Keys and values in order."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        if layer in self.layers:
            keys = torch.cat([self.layers[layer][0], keys], 2)
            values = torch.cat([self.layers[layer][1], values], 2)
        self.layers[layer] = keys, values
        return keys, values


def test_padding_and_neighbours_do_not_change_the_loss(pair: specnb.Pair, tmp_path: Path) -> None:
    examples = some(3)
    learned, _ = objective(pair, examples, tmp_path)
    with torch.no_grad():
        alone = [list(learned._unroll(*learned._batch([i])[:2], 3)) for i in range(3)]
        together = list(learned._unroll(*learned._batch([0, 1, 2])[:2], 3))
    for i, example in enumerate(examples):
        for step in range(3):
            n = len(example.ids) - 1 - step
            assert torch.allclose(alone[i][step][0, :n], together[step][i, :n], atol=1e-4)
    assert learned.loss([1, 1]).item() == pytest.approx(learned.loss([1]).item(), rel=1e-5)


def test_acceptance_is_that_of_greedy_drafting(trained: TrainingResult, pair: specnb.Pair) -> None:
    """What training counts on held-out texts, against the drafts that the engine makes after each of their prefixes."""
    assert trained.pair is not None
    lines = (Path(trained.out) / "answers.jsonl").read_text().splitlines()
    right, counted = [0] * 5, [0] * 5
    for one in map(json.loads, lines[: trained.counts["held-out examples"]]):
        ids, start = [*one["prompt"], *one["answer"]], len(one["prompt"])
        with torch.no_grad():
            choices = pair.target(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert choices[start - 1 : -1] == one["answer"]
        for end in range(start, len(ids)):
            result = specnb.generate(
                trained.pair,
                torch.tensor([ids[:end]]),
                num_assistant_tokens=5,
                assistant_confidence_threshold=0.0,
                max_new_tokens=8,
                do_sample=False,
            )
            drafted = next(step.drafted for step in result.steps if step.drafted)
            wanted = choices[end : end + 5]
            for i in range(len(wanted)):
                counted[i] += 1
                right[i] += list(drafted[: i + 1]) == wanted[: i + 1]
    assert sum(right)
    assert trained.best.acceptance == pytest.approx([r / n for r, n in zip(right, counted, strict=True)])


def test_the_result_says_what_was_reached(trained: TrainingResult) -> None:
    assert trained.finished and trained.comparison is not None and trained.pair is not None
    assert [one.step for one in trained.history] == sorted({one.step for one in trained.history})
    assert trained.best.mean_acceptance_length == max(one.mean_acceptance_length for one in trained.history)
    assert trained.best_k in (2, 4, 6) and trained.speed_up is not None and trained.pays in (True, False)
    assert all(run.same_text for run in trained.comparison.rows)
    assert "tokens per target pass" in trained.verdict and ("pays" in trained.verdict or "not pay" in trained.verdict)
    again = TrainingResult.from_json(trained.to_json())
    assert again.verdict == trained.verdict and again.history == trained.history and again.pair is None
    assert json.loads((Path(trained.out) / "training.json").read_text()) == json.loads(trained.to_json())
    assert "Training of a drafter" in trained.plot().alt
    with pytest.raises(ValueError, match="not a training result"):
        TrainingResult.from_json("{}")


def test_the_drafter_is_loaded_by_name_and_exact(trained: TrainingResult, pair: specnb.Pair) -> None:
    loaded = specnb.load("tiny-llama", trained.out)
    assert isinstance(loaded.assistant, Eagle3Drafter)
    plain = specnb.generate(pair, PROMPTS[0], method="plain", max_new_tokens=20, do_sample=False)
    drafted = specnb.generate(loaded, PROMPTS[0], max_new_tokens=20, do_sample=False, num_assistant_tokens=3)
    assert drafted.method == "eagle3" and drafted.ids == plain.ids and drafted.num_draft_tokens


def test_the_same_seed_gives_the_same_drafter_also_after_an_interrupt(
    pair: specnb.Pair, trained: TrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MAX_NEW_TOKENS", 6)

    def stop(progress: Progress) -> None:
        if progress.part == "training" and "step 6" in progress.message:
            raise KeyboardInterrupt

    quick = {name: value for name, value in QUICK.items() if name != "on_progress"}
    with pytest.raises(KeyboardInterrupt) as interrupt:
        train_drafter(pair, PROMPTS, out=tmp_path / "out", on_progress=stop, **quick)
    partial = interrupt.value.partial_result  # type: ignore[attr-defined]
    assert isinstance(partial, TrainingResult) and not partial.finished and partial.history[-1].step == 6
    assert isinstance(specnb.load("tiny-llama", tmp_path / "out").assistant, Eagle3Drafter)
    answered: list[str] = []
    result = train_drafter(
        pair,
        PROMPTS,
        out=tmp_path / "out",
        resume=True,
        on_progress=lambda progress: answered.append(progress.part),
        **quick,
    )
    assert "answers" not in answered  # they are in the folder
    assert [one.acceptance for one in result.history] == [one.acceptance for one in trained.history]
    mine, theirs = (load_file(Path(one.out) / "checkpoint.safetensors") for one in (result, trained))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_more_prompts_use_the_answers_that_are_there(pair: specnb.Pair, tmp_path: Path) -> None:
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.part == "states":
            raise KeyboardInterrupt

    options = {**QUICK, "on_progress": stop, "steps": 2}
    with pytest.raises(KeyboardInterrupt):
        train_drafter(pair, PROMPTS[:8], out=tmp_path / "out", **options)
    before = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert len(before) == 8
    with pytest.raises(KeyboardInterrupt):
        train_drafter(pair, PROMPTS, out=tmp_path / "out", resume=True, **options)
    after = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert after[:8] == before and 16 <= len(after) <= 17  # one that is held out now may have been sampled


def test_a_checkpoint_of_another_training_is_named(pair: specnb.Pair, tmp_path: Path) -> None:
    train_drafter(pair, texts=PROMPTS, out=tmp_path / "out", **QUICK)
    with pytest.raises(ValueError, match="is of another training: the draft vocabulary or the drafter's shape differs"):
        train_drafter(pair, texts=PROMPTS, out=tmp_path / "out", resume=True, **{**QUICK, "num_hidden_layers": 2})
    (tmp_path / "out" / "checkpoint.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="is damaged .* remove it to train anew"):
        train_drafter(pair, texts=PROMPTS, out=tmp_path / "out", resume=True, **QUICK)


def test_an_interrupt_while_measuring_keeps_the_result(
    pair: specnb.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_run, "measure", stop)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        train_drafter(pair, PROMPTS, out=tmp_path / "out", **QUICK)
    partial = interrupt.value.partial_result  # type: ignore[attr-defined]
    assert isinstance(partial, TrainingResult) and partial.finished and "was not measured" in partial.verdict
    assert json.loads((tmp_path / "out" / "training.json").read_text())["comparison"] is None


def test_an_error_of_on_progress_keeps_the_best(pair: specnb.Pair, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        if progress.part == "training":
            raise RuntimeError("no page")

    options = {**QUICK, "on_progress": fail, "steps": 2}
    with pytest.raises(RuntimeError, match="no page") as error:
        train_drafter(pair, texts=PROMPTS[:6], out=tmp_path / "out", **options)
    partial = error.value.partial_result  # type: ignore[attr-defined]
    assert isinstance(partial, TrainingResult) and not partial.finished
    assert isinstance(specnb.load_drafter(tmp_path / "out"), Eagle3Drafter)


def test_the_forecast_counts_new_answers_alone(tmp_path: Path) -> None:
    run = training_run.Run(None, tmp_path, {"minutes": 1.0, "steps": None}, print)  # type: ignore[arg-type]
    assert run._forecast(1000, 10.0, 1e9).startswith("10 tokens/s: about 1,240 tokens")
    assert "about 1,100 tokens" in run._forecast(1000, 10.0, 1100)


def test_three_layers_are_read_all_different_from_four_on() -> None:
    for depth in range(1, 40):
        layers = default_layers(SimpleNamespace(config=LlamaConfig(num_hidden_layers=depth)))  # type: ignore[arg-type]
        assert len(layers) == 3 and list(layers) == sorted(layers) and layers[0] >= 1
        assert layers[2] <= max(1, depth - 1) and (len(set(layers)) == 3) == (depth >= 4)


def test_it_pays_only_if_something_is_accepted(trained: TrainingResult) -> None:
    assert trained.comparison is not None
    lucky = [
        replace(run, speed_ups=(3.0,), predicted=0.9) if run.options.get("method") == "eagle3" else run
        for run in trained.comparison.rows
    ]
    result = replace(trained, comparison=replace(trained.comparison, rows=lucky))
    assert result.speed_up == 3.0 and not result.pays and "It does not pay" in result.verdict


def test_states_on_disk_are_those_in_memory(pair: specnb.Pair, tmp_path: Path) -> None:
    examples = some(4)
    target = TargetStates(pair.target, default_layers(pair.target))
    whole, spilled = StateStore(10**9, tmp_path), StateStore(3000, tmp_path)
    for store in (whole, spilled):
        collect(target, examples, store, batch_tokens=32, on_examples=lambda number: True)
    assert spilled._file is not None and whole._file is None and whole.nbytes == spilled.nbytes
    for i, example in enumerate(examples):
        assert torch.equal(whole[i], spilled[i])
        with torch.no_grad():
            out = pair.target(torch.tensor([example.ids]), output_hidden_states=True).hidden_states
        wanted = torch.cat([out[layer][0] for layer in (*default_layers(pair.target), -1)], -1)
        assert torch.allclose(whole[i].float(), wanted, rtol=2e-3, atol=2e-3)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def seek(self, *_: int) -> int:
            return 0

        def write(self, data: object) -> None:
            raise OSError(28, "No space left on device")

    store = StateStore(0, tmp_path)
    store._file = Full()
    with pytest.raises(OSError, match=r"states do not fit: .*No space left.*free some space"):
        store.add(0, Example([], [1, 2, 3, 4]), torch.ones(4, 8))


def test_a_full_disk_loses_no_checkpoint(pair: specnb.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "measure", lambda *_: None)
    save, out = checkpoint.save_file, tmp_path / "out"

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        if json.loads(metadata["specnb"])["step"] > 1:
            file.write_bytes(b"half of it")
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        save(tensors, file, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="cannot be written to .*No space left .*resume=True goes on"):
        train_drafter(pair, PROMPTS, out=out, **QUICK)
    assert not list(out.glob("*.part")) and len((out / "answers.jsonl").read_text().splitlines()) == len(PROMPTS)
    monkeypatch.setattr(checkpoint, "save_file", save)
    result = train_drafter(pair, PROMPTS, out=out, resume=True, **QUICK)
    assert [one.step for one in result.history] == list(range(13))  # it went on from step 1


def test_a_stop_from_another_thread_returns_the_best(
    pair: specnb.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.part == "training" and "step 3" in progress.message:
            cancel.set()

    result = train_drafter(pair, PROMPTS, out=tmp_path / "out", cancel=cancel, **{**QUICK, "on_progress": stop})
    assert not result.finished and result.history[-1].step == 3 and result.pair is not None
    with pytest.raises(KeyboardInterrupt):  # nothing yet
        train_drafter(pair, PROMPTS, out=tmp_path / "other", cancel=cancel, **QUICK)


def test_kept_states_are_found_again(pair: specnb.Pair, tmp_path: Path) -> None:
    layers, examples = default_layers(pair.target), some(5)

    def collected(which: list[Example]) -> tuple[StateStore, int]:
        passes: list[int] = []
        target = TargetStates(pair.target, layers)
        store = StateStore(10**9, tmp_path, KeptStates(tmp_path, pair.target, layers))

        def counted(batch: Any) -> list[torch.Tensor]:
            passes.append(len(batch))
            return target(batch)

        collect(counted, which, store, batch_tokens=32, on_examples=lambda number: True)  # type: ignore[arg-type]
        return store, sum(passes)

    first, run = collected(examples[:3])
    assert run == 3
    index = tmp_path / "states.jsonl"
    index.write_text(index.read_text() + '{"ids": "cut o')
    again, run = collected([examples[4], *examples[:3]])
    assert run == 1 and torch.equal(again[3], first[2])
    assert collected([examples[4], examples[1]])[1] == 0
    other = specnb.load("tiny-llama")
    other.target.model.norm.weight.data *= 2
    assert KeptStates(tmp_path, other.target, layers).find(examples[1].ids) is None


def test_batches_are_of_similar_length(pair: specnb.Pair) -> None:
    drafter = torch.nn.Linear(1, 1)
    lengths = [(7 * i) % 97 for i in range(64)]
    learned: Any = type("Learned", (), {"drafter": drafter})
    fitting = Fitting(learned, 0.1, 4, range(100, 164), lengths, 5, lambda one: one, lambda loss: None)
    seen = []
    for fitting.step in range(32):
        seen.append(fitting._numbers())
    for epoch in (seen[:16], seen[16:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(100, 164))
    spread = [max(lengths[i - 100] for i in batch) - min(lengths[i - 100] for i in batch) for batch in seen]
    assert max(spread) < 30 and seen[:16] != seen[16:]


@pytest.mark.parametrize("name", [pytest.param("tiny-gemma4", marks=pytest.mark.slow), "tiny-qwen3-5"])
def test_other_kinds_of_targets(name: str, tmp_path: Path) -> None:
    """A soft cap and scaled embeddings; layers with running states."""
    pair = specnb.load(name)
    result = train_drafter(pair, texts=[f"{one} {one}" for one in PROMPTS], out=tmp_path / "out", **QUICK)
    assert result.comparison is None and "was not measured" in result.verdict and result.pair is not None
    plain = specnb.generate(pair, PROMPTS[0], method="plain", max_new_tokens=16, do_sample=False)
    drafted = specnb.generate(result.pair, PROMPTS[0], max_new_tokens=16, do_sample=False, num_assistant_tokens=2)
    assert drafted.ids == plain.ids and drafted.num_draft_tokens
    assert result.history[-1].loss is not None and result.history[1].loss is not None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prompts": []}, "0 different prompts and 0 different texts are too few"),
        ({"prompts": ["one"]}, "1 different prompts and 0 different texts are too few"),
        ({"prompts": "one text"}, "takes a list of texts, not a str"),
        ({"prompts": ["a", "b", " ", "d", "e"]}, "number 3 of 5 is empty"),
        ({"prompts": ["a", "b", 3, "d", "e"]}, "number 3 of 5 is a int"),
        ({"prompts": PROMPTS, "minutes": 0}, "minutes=0 is not valid: minutes must be a number > 0"),
        (
            {"prompts": PROMPTS, "minutes": 1, "steps": 2},
            "minutes=1 and steps=2 given: training ends after one of them",
        ),
        ({"prompts": PROMPTS, "out": None}, "out=None names no folder"),
        ({"prompts": PROMPTS, "out": ""}, "out='' names no folder"),
        ({"prompts": PROMPTS, "epochs": 3}, "unknown option 'epochs'"),
        ({"prompts": PROMPTS, "steps": 1.5}, "steps=1.5 is not valid: steps must be an int"),
        ({"prompts": PROMPTS, "draft_vocab_size": "all"}, "draft_vocab_size='all' is not valid"),
        ({"prompts": PROMPTS, "ttt_steps": True}, "ttt_steps=True is not valid"),
        ({"prompts": PROMPTS, "resume": True}, "holds no training to resume"),
        ({"prompts": PROMPTS, "held_out": ["", "x"]}, "held_out=: number 1 of 2 is empty"),
        ({"prompts": [*PROMPTS, "word " * 600]}, "more than max_length=512"),
        ({"texts": PROMPTS, "held_out": ["日本語の文章です。これは別の言語です。"] * 2}, "of another kind or language"),
    ],
)
def test_bad_arguments_are_named(pair: specnb.Pair, tmp_path: Path, given: dict[str, Any], match: str) -> None:
    options = {**QUICK, **given}
    if "minutes" in given:
        options["steps"] = None
    with pytest.raises(ValueError, match=match):
        train_drafter(pair, out=tmp_path / "out", **options)


def test_a_folder_with_something_else_is_left_alone(pair: specnb.Pair, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty \(mine.txt\)"):
        train_drafter(pair, PROMPTS, out=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="is a file"):
        train_drafter(pair, PROMPTS, out=tmp_path / "mine.txt", **QUICK)


def test_a_loss_that_is_no_number_ends_the_training(
    pair: specnb.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss: Callable[..., torch.Tensor] = Unrolled.loss
    calls = []

    def broken(self: Unrolled, numbers: list[int]) -> torch.Tensor:
        calls.append(numbers)
        return loss(self, numbers) * (float("nan") if len(calls) > 3 else 1.0)

    monkeypatch.setattr(Unrolled, "loss", broken)
    with pytest.raises(ValueError, match=r"the loss became nan at step 3 .*best drafter so far was kept") as error:
        train_drafter(pair, PROMPTS, out=tmp_path / "out", **QUICK)
    assert not error.value.partial_result.finished  # type: ignore[attr-defined]
    assert isinstance(specnb.load("tiny-llama", tmp_path / "out").assistant, Eagle3Drafter)


@pytest.mark.slow
def test_minutes_are_a_promise(pair: specnb.Pair, tmp_path: Path) -> None:
    seen: list[Progress] = []
    options = {**QUICK, "steps": None, "minutes": 0.2, "on_progress": seen.append}
    result = train_drafter(pair, PROMPTS, out=tmp_path / "out", **options)
    assert sum(result.seconds.values()) < 12 * 1.25
    assert {one.part for one in seen} == {"answers", "states", "training", "measuring"}
    assert all(one.remaining_seconds is not None and one.remaining_seconds <= 12 for one in seen)
