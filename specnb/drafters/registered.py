"""Runs a registered drafter: what it is given, and the checks of what it gives back.

A registered drafter is code that specnb does not know. So it gets nothing through which it could change a run: rows are
read-only, and random numbers come from generators of its own, so that no draw of the verifier depends on them. What it
proposes is checked before the verifier sees it.
"""

from __future__ import annotations

import hashlib
import math
import operator
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Row
from specnb.drafters.draw_check import DrawCheck
from specnb.options import MethodInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUM_TOLERANCE = 1e-4  # a float32 softmax over 256,000 tokens sums to 1 within 1e-5
_MESSAGE_LENGTH = 200


class DrafterError(ValueError):
    """A registered drafter failed, or proposed what cannot be verified; the message names the drafter.

    As with an interrupt, the text until then is in `.partial_result`, if there is any.
    """


@dataclass(frozen=True)
class DrafterContext:
    """What the factory of a registered drafter is given, once per call of `generate`.

    Attributes:
        model: the target. It may be read, its embedding for example, and must not be changed.
        tokenizer: the target's tokenizer; None if the call has none.
        vocab_size: of the target: ids are 0 to vocab_size - 1.
        device: of the target, where `Draft.probs` must be.
        eos: the ids that end a text.
        sample: whether the call samples; else it is greedy.
        options: the drafting options in effect by name, with the drafter's own.
    """

    model: PreTrainedModel
    tokenizer: Any
    vocab_size: int
    device: torch.device
    eos: frozenset[int]
    sample: bool
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class DraftRow:
    """One row (a prompt and what was generated for it), as a registered drafter sees it: read-only.

    Attributes:
        index: its number in the batch, the same in every step.
        ids: all its token ids, prompt first. Only what the target wrote or accepted is among them.
        prompt_length: how many of them are the prompt.
        generator: the drafter's random numbers for this row, on the target's device, seeded by the call's `seed`.
    """

    index: int
    ids: tuple[int, ...]
    prompt_length: int
    generator: torch.Generator
    _row: Row = field(repr=False)
    _vocab_size: int = field(repr=False)

    def probs(self, logits: Tensor, drafted: Sequence[int] = ()) -> Tensor | None:
        """The distribution to draw the next token from: the softmax of logits after the call's logits processors.

        A q that went through the same temperature, top-k and so on as the target's p is accepted more often. It is
        not needed for the text to be right.

        Args:
            logits: the drafter's own, `[vocab_size]`, float, on the target's device; the log of probabilities will do.
            drafted: the tokens drafted before in this step.

        Returns:
            `[vocab_size]`, float32. None if the processors leave no token: end the draft.
        """
        if not isinstance(logits, Tensor) or logits.shape != (self._vocab_size,):
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"row.probs takes logits of shape [{self._vocab_size}], not {found}")
        processors = self._row.processors.for_draft
        ids = None if processors.pointwise else self._row.input_ids(list(drafted))
        q = processors(ids, logits[None])[0].softmax(-1)
        return None if bool(q[0].isnan()) else q


class RegisteredDrafter:
    """Runs the drafter that a registered factory makes, and checks every draft.

    Args:
        info: the registered method.
        context: what the factory is given.
        top_logprobs: drafts with `probs` report this many of the best tokens.
        probabilities: drafts report the probability of each token, where it is known.

    Raises:
        DrafterError: the factory fails, or makes no drafter.
    """

    drafts_first = False  # what a draft costs is not known, so it must not delay the first token
    reads_target = False

    def __init__(
        self, info: MethodInfo, context: DrafterContext, top_logprobs: int = 0, probabilities: bool = False
    ) -> None:
        assert info.factory is not None
        self.name, self.context = info.name, context
        self.top_logprobs, self.probabilities = top_logprobs, probabilities
        self.threshold: float = context.options["assistant_confidence_threshold"]
        self.mixes = context.options["assistant_ensemble_weight"] is not None
        self._draws = DrawCheck()
        self._generators: dict[int, torch.Generator] = {}
        try:
            self.drafter = info.factory(context)
        except Exception as error:
            self._raised("the factory", error)
        if not callable(getattr(self.drafter, "propose", None)):
            self._fail(f"the factory returned {_kind(self.drafter)}, which has no propose(rows, max_draft_tokens)")

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`. The drafter is only asked about rows that want a token."""
        lengths = [min(most, row.schedule.length()) for row, most in zip(rows, max_draft_tokens, strict=True)]
        asked = [(row, length) for row, length in zip(rows, lengths, strict=True) if length > 0]
        if not asked:
            return [Draft([]) for _ in rows]
        seen = [
            DraftRow(row.index, tuple(row.ids), row.prompt_length, self._generator(row), row, self.context.vocab_size)
            for row, _ in asked
        ]
        try:
            given = self.drafter.propose(seen, [length for _, length in asked])
        except Exception as error:
            self._raised("propose", error)
        if not isinstance(given, (list, tuple)) or isinstance(given, Draft):
            self._fail(f"propose returned {_kind(given)}, not a list with a specnb.Draft for each row")
        if len(given) != len(asked):
            self._fail(f"propose returned {len(given)} drafts for {len(asked)} rows")
        checked = (self._checked(draft, length) for draft, (_, length) in zip(given, asked, strict=True))
        return [next(checked) if length > 0 else Draft([]) for length in lengths]

    def _generator(self, row: Row) -> torch.Generator:
        """A generator of the drafter's own: with the verifier's it could make an acceptance depend on a drawn token."""
        if row.index not in self._generators:
            seed = hashlib.sha256(f"drafter {row.generator.initial_seed()}".encode()).digest()
            generator = torch.Generator(self.context.device).manual_seed(int.from_bytes(seed[:8], "big") >> 1)
            self._generators[row.index] = generator
        return self._generators[row.index]

    # ---- checks
    def _checked(self, draft: Any, length: int) -> Draft:
        """A draft as the verifier may have it: checked, copied, and cut where it is below the confidence threshold."""
        if not isinstance(draft, Draft):
            self._fail(f"a draft is {_kind(draft)}, not a specnb.Draft")
        tokens = self._tokens(draft.tokens, length)
        if not tokens:
            return Draft([])
        if draft.probs is None:
            if self.mixes:
                self._fail("a draft has no probs, which assistant_ensemble_weight mixes with the target's")
            known, probs, tops = self._probabilities(draft.probabilities, len(tokens)), None, None
        else:
            probs = self._probs(draft.probs, len(tokens))
            known = self._drawn(probs, tokens)
            best = probs.log().topk(min(self.top_logprobs, self.context.vocab_size)) if self.top_logprobs else None
            tops = None if best is None else (best.values, best.indices)
        shown = known if self.probabilities else None
        whole = Draft(tokens, probs, probabilities=shown, tops=tops)
        unsure = next((i for i, p in enumerate(known or ()) if p < self.threshold), len(tokens))
        return whole.cut(unsure + 1)

    def _tokens(self, given: Any, length: int) -> list[int]:
        if getattr(given, "ndim", 0) == 1 and hasattr(given, "tolist"):  # a tensor, an array
            given = given.tolist()
        if not isinstance(given, (list, tuple)):
            self._fail(f"the tokens of a draft are {_kind(given)}, not a list of ids")
        if len(given) > length:
            self._fail(f"a draft has {len(given)} tokens, but at most {length} were asked for")
        tokens = []
        for token in given:
            try:
                if isinstance(token, bool):
                    raise TypeError
                tokens.append(operator.index(token))
            except TypeError:
                self._fail(f"a drafted token is {token!r}, a {type(token).__name__}, not a whole number")
            if not 0 <= tokens[-1] < self.context.vocab_size:
                self._fail(f"it drafted id {tokens[-1]}, but the target's ids are 0 to {self.context.vocab_size - 1}")
        return tokens

    def _probs(self, probs: Any, k: int) -> Tensor:
        wanted, device = [k, self.context.vocab_size], self.context.device
        if not isinstance(probs, Tensor):
            self._fail(f"probs is {_kind(probs)}, not a tensor")
        if list(probs.shape) != wanted:
            self._fail(f"probs has the shape {list(probs.shape)}, not [drafted tokens, vocab_size] = {wanted}")
        if probs.dtype not in (torch.float32, torch.float64):
            self._fail(
                f"probs is {probs.dtype}, where float32 or float64 is needed: half precision is not exact enough"
            )
        if probs.device != device:
            self._fail(f"probs is on {probs.device}, and the target on {device}: make it on context.device")
        return probs.detach().float()

    def _drawn(self, probs: Tensor, tokens: list[int]) -> list[float]:
        """The probability of each token under its own distribution, which is checked. Read from the device at once."""
        at = torch.tensor(tokens, device=probs.device)[:, None]
        parts = [probs.sum(-1), probs.amin(-1), probs.square().sum(-1), probs.gather(1, at)[:, 0]]
        totals, lowest, squares, drawn = torch.stack(parts).tolist()
        for i, (total, low, p) in enumerate(zip(totals, lowest, drawn, strict=True)):
            if not math.isfinite(total) or math.isnan(low):
                self._fail(f"probs[{i}] has values that are not finite")
            if low < 0:
                self._fail(f"probs[{i}] has the negative value {low:g}")
            if abs(total - 1) > _SUM_TOLERANCE:
                self._fail(f"probs[{i}] sums to {total:g}, not to 1")
            if p == 0:
                self._fail(f"probs[{i}] gives token {tokens[i]} the probability 0, so it was not drawn from it")
        if self.context.sample and not self._draws.add(drawn, squares):
            n, given, expected = self._draws.tokens, self._draws.given, self._draws.expected
            self._fail(
                f"its tokens are not drawn from its probs: {n} of them have a mean probability of {given / n:.3g}, and "
                f"draws have {expected / n:.3g}. Give no probs where tokens are chosen, or some of them held back"
            )
        return list(drawn)

    def _probabilities(self, given: Any, k: int) -> list[float] | None:
        """How sure a drafter without distributions is of each token."""
        if given is None:
            return None
        try:
            values = [float(p) for p in given]
        except (TypeError, ValueError):
            self._fail(f"probabilities is {_kind(given)}, not a list of numbers")
        if len(values) != k or not all(0 <= p <= 1 for p in values):
            self._fail(f"probabilities are not {k} numbers from 0 to 1, one for each token")
        return values

    # ---- errors
    def _fail(self, why: str) -> NoReturn:
        raise DrafterError(f"drafter {self.name!r}: {why}.")

    def _raised(self, what: str, error: Exception) -> NoReturn:
        """Name an exception of the drafter's code, and its line: the deepest one in the file that specnb called."""
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        where = f" (line {own[-1].lineno})" if own else ""
        said = " ".join(str(error).split())
        said = f": {said[:_MESSAGE_LENGTH]}" if said else ""
        raise DrafterError(f"drafter {self.name!r}: {what} raised {type(error).__name__}{said}{where}.") from error


def _kind(value: Any) -> str:
    """What a value is, in words."""
    return "None" if value is None else f"a {type(value).__name__}"
