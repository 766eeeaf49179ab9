"""What several test modules need: the reference (transformers' own greedy), recorders and counters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor
from traitlets.config import Config
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import specnb
from specnb.drafters.draft_builder import DraftBuilder
from specnb.notebook import unload_ipython_extension
from specnb.trace import GenerationResult

EAGER = {"assistant_confidence_threshold": 0.0}  # draft as many tokens as asked for
STEADY = EAGER | {"num_assistant_tokens_schedule": "constant"}  # in every step, whatever the clock says


def cache_name(model: PreTrainedModel) -> str:
    """The keyword under which this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plain(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> list[int]:
    """The new ids of transformers' own greedy search for one prompt."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    out = model.generate(input_ids, do_sample=False, **options)
    assert isinstance(out, Tensor)
    return out[0, input_ids.shape[1] :].tolist()


def spec(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> GenerationResult:
    """specnb's greedy result for the prompt(s)."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    return specnb.generate(model, input_ids, do_sample=False, **options)


def padded(rows: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts `[1, n]` as a left-padded batch and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=pad) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return ids, mask


def true_shares(p: Tensor, n: int, times: int) -> Tensor:
    """The shares `[times, outcomes]` of the outcomes in samples of size `n`, drawn from the distribution `p` itself."""
    generator = torch.Generator().manual_seed(0)
    edges = p.cumsum(0).clamp(max=1)
    drawn = torch.searchsorted(edges, torch.rand(times, n, generator=generator, dtype=torch.float64))
    codes = drawn.clamp(max=len(p) - 1) + len(p) * torch.arange(times)[:, None]
    return codes.flatten().bincount(minlength=times * len(p)).view(times, -1) / n


def consistent(result: GenerationResult) -> None:
    """What must hold for every result, however it ended."""
    for row in result.rows:
        assert row.ids == tuple(token for step in row.steps for token in step.emitted)
        position = len(row.prompt_ids)
        for step in row.steps:
            assert step.position == position
            assert step.emitted
            assert len(step.emitted) <= len(step.drafted) + 1
            assert step.emitted[: step.accepted] == step.drafted[: step.accepted]
            assert len(step.emitted) - step.accepted in (0, 1)
            position += len(step.emitted)
        cut = sum(len(step.emitted) == step.accepted for step in row.steps)  # a stop fell into the block
        assert cut <= 1
        assert sum(step.accepted for step in row.steps) + len(row.steps) - cut == len(row.ids)
        assert row.finish_reason in specnb.trace.FINISH_REASONS
    assert result.num_emitted_tokens == sum(len(row.ids) for row in result.rows)
    assert 0 <= result.draft_acceptance_rate <= 1


class Recorder(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1

    @property
    def ids(self) -> list[int]:
        return [token for put in self.puts for token in put]


@dataclass
class Calls:
    """The forward calls of a model: how many, how many tokens in each, the largest position."""

    widths: list[int] = field(default_factory=list)
    largest_position: int = -1
    inputs: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.widths)


@contextmanager
def watched(model: PreTrainedModel, before: Callable[[int], None] | None = None) -> Iterator[Calls]:
    """Count `model`'s forward calls; `before` is called with the index of each and may raise."""
    calls = Calls()

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if before is not None:
            before(len(calls))
        calls.widths.append(kwargs["input_ids"].shape[1])
        calls.inputs.append({k: v for k, v in kwargs.items() if isinstance(v, Tensor)})
        if kwargs.get("position_ids") is not None:
            calls.largest_position = max(calls.largest_position, int(kwargs["position_ids"].max()))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def no_forward(*models: PreTrainedModel) -> Iterator[None]:
    """Fails if one of the models runs."""

    def hook(module: Any, args: tuple[Any, ...]) -> None:
        raise AssertionError("a model ran before the call was refused")

    handles = [model.register_forward_pre_hook(hook) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def drafting() -> Iterator[list[tuple[list[int], list[int], Tensor]]]:
    """Every draft of a run: the committed ids, the tokens, the drafter's logits that they were picked from."""
    seen: dict[tuple[int, int], tuple[list[int], list[int], list[Tensor]]] = {}
    found: list[tuple[list[int], list[int], Tensor]] = []
    add = DraftBuilder.add

    def record(self: DraftBuilder, logits: Tensor, ids: Tensor | None = None) -> None:
        _, tokens, rows = seen.setdefault((self.row.index, len(self.row.ids)), (list(self.row.ids), [], []))
        rows.append(logits.detach().clone())
        add(self, logits, ids)
        tokens[:] = self.tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftBuilder, "add", record)
        yield found
    found += [(ids, tokens, torch.stack(rows)) for ids, tokens, rows in seen.values()]


def configs(*models: PreTrainedModel) -> list[Any]:
    """Everything configurable about models, for comparing before and after."""
    return [
        (model.config.to_dict(), model.generation_config.to_dict(), model.training, sorted(vars(model)))
        for model in models
    ]


@contextmanager
def shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An IPython shell without history, with the extension loaded."""
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=config)
    made.run_line_magic("load_ext", "specnb")
    try:
        yield made
    finally:
        unload_ipython_extension(made)
        made.run_line_magic("unload_ext", "specnb")
        InteractiveShell.clear_instance()


def run_cell(ip: Any, source: str, history: bool = True) -> str:
    """Run a cell; the one line of its error, or an empty string."""
    outcome = ip.run_cell(source, store_history=history)
    error = outcome.error_in_exec or outcome.error_before_exec
    assert error is None or "\n" not in str(error)
    return "" if error is None else f"{type(error).__name__}: {error}"
