"""What a drafter learns: the target's distribution at the next tokens, with its own states unrolled.

Training-time test of EAGLE-3 (Li et al. 2503.01840, section 3.2). Entry t pairs the token at position t + 1 with the
states at position t. At unrolled step s it has gone on s times with its own states, and is asked what the target says
after the token at position t + 1 + s. A step's keys are those of the true states up to entry t, and one of its own per
step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from specnb.training.examples import Example
from specnb.training.states import StateStore

if TYPE_CHECKING:
    from specnb.models.eagle3 import Eagle3Drafter
    from specnb.training.target_head import TargetHead

DECAY = 0.8
"""Weight of a step's loss, relative to the step before."""
_EVALUATED_POSITIONS = 5


class Unrolled:
    """The objective for examples whose states are in a store.

    Args:
        drafter: what is trained.
        head: the target's head.
        target_embedding: the target's embedding, for a drafter without one.
        examples: those of the store, by number.
        store: the states of the drafter's layers and the last ones.
        held_out: numbers of the examples to evaluate with.
        steps: number of unrolled steps.
        batch_size: examples per pass of an evaluation.
        autocast: a context for the passes of training (mixed precision).
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        head: TargetHead,
        target_embedding: Tensor,
        examples: Sequence[Example],
        store: StateStore,
        held_out: Sequence[int],
        steps: int,
        batch_size: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.drafter, self._head, self._examples, self._store = drafter, head, examples, store
        own = drafter.embed_tokens
        self._embedding = target_embedding.detach() if own is None else own.weight
        self._held_out, self._steps, self._batch_size, self._autocast = held_out, steps, batch_size, autocast
        self._ids = drafter.target_ids()
        self._choices: dict[int, Tensor] = {}  # of held-out examples, what the target would say at each position

    @property
    def device(self) -> torch.device:
        """Where the drafter is trained."""
        device: torch.device = self.drafter.fc.weight.device
        return device

    def loss(self, numbers: Sequence[int]) -> Tensor:
        """Cross entropy against the target's distribution over the draft vocabulary, summed over unrolled steps.

        The logits, the target's and the drafter's, are computed where they count only: a third of the work is the head.
        """
        tokens, states, last, mask = self._batch(numbers)
        with torch.no_grad():
            wanted = self._head.logits(last[mask], self._ids).float().softmax(-1)
        rank = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # of a position among those in `wanted`
        total = states.new_zeros((), dtype=torch.float32)
        with self._autocast():
            for step, found in enumerate(self._unroll(tokens, states, self._steps, _first(mask))):
                counted = self._counted(mask, step)
                logits = self.drafter.compute_logits(found[:, : counted.shape[1]][counted])[0]
                asked = wanted[rank[:, 1 + step :][counted]]
                entropy = -(asked * logits.float().log_softmax(-1)).sum()
                total = total + DECAY**step * entropy / max(1, len(asked))
        return total

    @staticmethod
    def _counted(mask: Tensor, step: int) -> Tensor:
        """The entries `[rows, width - 1 - step]` that a step is asked about."""
        n = max(0, mask.shape[1] - 1 - step)
        return mask[:, :n] & mask[:, 1 + step :]

    @torch.no_grad()
    def acceptance(self) -> tuple[float, ...]:
        """By position, the share of held-out tokens at which a greedy draft is right up to this position."""
        hits, counts = [0.0] * _EVALUATED_POSITIONS, [0.0] * _EVALUATED_POSITIONS
        training = self.drafter.training
        self.drafter.eval()
        for first in range(0, len(self._held_out), self._batch_size):
            numbers = self._held_out[first : first + self._batch_size]
            tokens, states, last, mask = self._batch(numbers)
            choices = self._target_choices(numbers, last)
            alive = torch.ones_like(mask)
            for step, found in enumerate(self._unroll(tokens, states, _EVALUATED_POSITIONS, _first(mask))):
                counted = self._counted(mask, step)
                n = counted.shape[1]
                logits = self.drafter.compute_logits(found[:, :n][counted])[0]
                right = torch.zeros_like(counted)
                right[counted] = self._ids[logits.argmax(-1)] == choices[:, 1 + step :][counted]
                alive = alive[:, :n] & right
                hits[step] += float(alive.sum())
                counts[step] += float(counted.sum())
        self.drafter.train(training)
        return tuple(hit / count if count else 0.0 for hit, count in zip(hits, counts, strict=True))

    def _unroll(self, tokens: Tensor, states: Tensor, steps: int, start: int = 0) -> Iterator[Tensor]:
        """The states `[rows, width, size]` after the drafter's last layer, of each step.

        Entries before `start` are not unrolled: nobody asks about them, and none sees their later states.
        """
        rows, width = tokens.shape
        cache = _UnrolledKeys()
        states = self.drafter.combine_hidden_states(states)
        for step in range(min(steps, width - 1)):
            begin = start if step else 0
            ahead = torch.cat([tokens[:, begin + 1 + step :], tokens.new_zeros(rows, 1 + step)], 1)
            embedded = embedding(ahead, self._embedding).to(states.dtype)
            positions = torch.arange(begin, width, device=tokens.device)[None] + step
            angles = self.drafter.rotary_emb(embedded, positions)
            states = states[:, states.shape[1] - (width - begin) :]
            states = self.drafter(embedded, states, angles, _unrolled_mask(width, step, states), cache)
            yield pad(states, (0, 0, begin, 0))
            if self.drafter.config.norm_output:
                states = self.drafter.norm(states)

    def _batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens `[rows, width]`, states of the layers, last states, and after which positions an answer goes on."""
        examples, found = [self._examples[i] for i in numbers], [self._store[i] for i in numbers]
        width, size = max(len(one.ids) for one in examples), self._head.hidden_size
        tokens = torch.zeros(len(numbers), width, dtype=torch.long)
        states = torch.zeros(len(numbers), width, found[0].shape[1] - size)
        last = torch.zeros(len(numbers), width, size)
        mask = torch.zeros(len(numbers), width, dtype=torch.bool)
        for row, (example, one) in enumerate(zip(examples, found, strict=True)):
            n = len(example.ids)
            tokens[row, :n] = torch.tensor(example.ids)
            states[row, :n], last[row, :n] = one[:, :-size], one[:, -size:]
            mask[row, max(0, len(example.prompt) - 1) : n] = True
        return tokens.to(self.device), states.to(self.device), last.to(self.device), mask.to(self.device)

    def _target_choices(self, numbers: Sequence[int], last: Tensor) -> Tensor:
        """The target's most probable tokens `[rows, width]` after each position."""
        rows = []
        for row, number in enumerate(numbers):
            if number not in self._choices:
                n = len(self._examples[number].ids)
                self._choices[number] = self._head.logits(last[row, :n], None).argmax(-1)
            rows.append(pad(self._choices[number], (0, last.shape[1] - len(self._choices[number]))))
        return torch.stack(rows).to(self.device)


class _UnrolledKeys:
    """Stands for a cache: each update adds the keys and values of a step after those of the steps before."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all steps of a layer, `[rows, heads, keys, dim]`."""
        if layer in self._layers:
            old = self._layers[layer]
            keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
        self._layers[layer] = keys, values
        return keys, values


def _unrolled_mask(width: int, step: int, like: Tensor) -> Tensor:
    """What the last n of `width` entries see: true states up to themselves, then one key of each step.

    Args:
        like: the entries' states, `[rows, n, size]`.

    Returns:
        `[1, 1, n, width + step * n]`.
    """
    n = like.shape[1]
    causal = torch.ones(n, width, dtype=torch.bool, device=like.device).tril(width - n)
    own = torch.eye(n, dtype=torch.bool, device=like.device)
    return torch.cat([causal, *[own] * step], 1)[None, None]


def _first(mask: Tensor) -> int:
    """The first position that counts in any row of a mask `[rows, width]`."""
    return int(mask.any(0).int().argmax())
