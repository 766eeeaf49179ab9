"""Suffix decoding: copies what followed the same tokens earlier in the text, in a memory or in a predicted output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from specnb.decoding.contracts import Draft, Row
from specnb.drafters.votes import Ballot, is_near, weight
from specnb.memory import Memory
from specnb.memory.memory import CONTEXT_TOKENS
from specnb.memory.suffix_index import Match, SuffixIndex

_MOST_MATCHES = 8
_SHORTEST = {"text": 1, "prediction": 1, "memory": 2}  # a single token says too little in other texts
_FIRST_LENGTH = 3
_MIN_COPY = 2  # shorter copies are not resumed
_RATE_WEIGHT, _RATE_DECAY, _MAX_RATE = 8.0, 0.97, 0.995

_CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7)
"""The class of a match length; lengths in one class share their record."""
_NUM_CLASSES, _LONGEST = _CLASSES[-1] + 1, len(_CLASSES) - 1
SOURCES = ("text", "prediction", "memory")
_PRIOR = {
    "text": (0.15, 0.25, 0.6, 0.75, 0.85, 0.9, 0.96, 0.985),
    "prediction": (0.15, 0.25, 0.6, 0.75, 0.85, 0.9, 0.96, 0.985),
    "memory": (0.15, 0.1, 0.4, 0.55, 0.75, 0.85, 0.95, 0.985),
}
"""How often a copied token is accepted, by the class of its match length, before anything is known."""


class Source(Protocol):
    """Where a text is looked up: a `SuffixIndex` or a `Memory`."""

    def matches(self, ids: Sequence[int], shortest: int, longest: int, most: int) -> list[Match]:
        """Earlier occurrences of the suffixes of `ids`."""
        ...

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """What follows a position."""
        ...


class AcceptanceRecord:
    """How often copied tokens were accepted, or would have been, in this row. Older tokens count less.

    There is one count per source, whether the copy was resumed, and class of match length.
    """

    def __init__(self) -> None:
        self.rates = [rate for source in SOURCES for rate in 2 * _PRIOR[source]]
        self._accepted = [_RATE_WEIGHT * rate for rate in self.rates]
        self._tried = [_RATE_WEIGHT] * len(self.rates)
        self._priors = list(self._accepted)

    @staticmethod
    def keys(source: str, resumed: bool, length: int, count: int) -> list[int]:
        """The counts of `count` tokens after a match of `length` tokens, each of which lengthens it by one."""
        first = (2 * SOURCES.index(source) + resumed) * _NUM_CLASSES
        return [first + _CLASSES[min(n, _LONGEST)] for n in range(length, length + count)]

    def count(self, key: int, share: float, accepted: bool) -> None:
        """Count a token that had this share of the votes."""
        kept = (1 - _RATE_DECAY) * _RATE_WEIGHT  # the prior does not fade
        self._tried[key] = _RATE_DECAY * self._tried[key] + kept + share
        self._accepted[key] = _RATE_DECAY * self._accepted[key] + (1 - _RATE_DECAY) * self._priors[key] + accepted
        self.rates[key] = min(_MAX_RATE, self._accepted[key] / self._tried[key])


@dataclass
class Path:
    """The tokens that a source proposes.

    Attributes:
        position: of the first token, in the occurrence with most weight.
        length: number of matched tokens there.
        most: how many tokens may be drafted; there is one more, to look ahead.
        tokens: the proposed tokens.
        keys: per token, where it counts in the `AcceptanceRecord`.
        shares: per token, its share of the votes: the count ratio of suffix decoding, with weights.
    """

    source: str
    position: int
    length: int
    most: int
    tokens: list[int]
    keys: list[int]
    shares: list[float]


class Copy(NamedTuple):
    """Where the last copy stands, or broke off: the position of the token that should have followed.

    Args:
        length: number of tokens that it was right for, the match included.
        broke_off: the target wrote another token there.
    """

    source: str
    position: int
    length: int
    broke_off: bool


class SuffixRow:
    """One row: its text, what was proposed last, and what came of it."""

    def __init__(self) -> None:
        self.text, self.prediction = SuffixIndex(), SuffixIndex()
        self.record = AcceptanceRecord()
        self.paths: list[Path] = []  # proposed by each source in the last step, the drafted one first
        self.proposed_at = 0
        self.copy: Copy | None = None
        self.tokens_since_copy = 0

    def learn(self, ids: Sequence[int]) -> None:
        """Compare what was proposed in the last step, drafted or not, with what was written."""
        written = ids[self.proposed_at :]
        for path in reversed(self.paths):
            right = 0
            for token, proposed, key, share in zip(written, path.tokens, path.keys, path.shares, strict=False):
                self.record.count(key, share, token == proposed)
                if token != proposed:
                    break
                right += 1
        if not self.paths:
            self.tokens_since_copy += len(written)
            return
        copied = path.length + right
        if self.copy is None or copied >= _MIN_COPY:
            broke_off = right < min(len(written), len(path.tokens))
            self.copy = Copy(path.source, path.position + right, copied, broke_off)
            self.tokens_since_copy = len(written) - right
        else:
            self.tokens_since_copy += len(written)

    def propose(self, ids: Sequence[int], source: str, where: Source, limits: Limits, room: int) -> Path | None:
        """What one source proposes: the tokens with most votes, token by token; None if nothing matches."""
        found = where.matches(ids, _SHORTEST[source], limits.depth, _MOST_MATCHES)
        copy = self.copy if self.copy is not None and self.copy.source == source else None
        place = copy.position if copy else None
        if copy and copy.broke_off and copy.length >= _MIN_COPY and self.tokens_since_copy == 1:
            # nothing may match yet after the token that the copy had not: go on behind it
            found += [(copy.position + 1, 0)] * all(position != copy.position + 1 for position, _ in found)
        if not found:
            return None
        longest = max([length for _, length in found])
        most = min(room, limits.depth, max(1, int(limits.factor * longest)))
        first = None
        if source == "text":
            first = min([position for position, length in found if length >= min(longest, _FIRST_LENGTH)])
        ballot, continuation = Ballot(), where.continuation
        for position, length in found:
            resumed = place is not None and is_near(position, place)
            votes = weight(length, resumed, position == first)
            ballot.add((votes, position, length, resumed), continuation(position, most + 1))
        tokens, shares, best = ballot.elect(most + 1, limits.min_token_prob)
        if not tokens:
            return None
        keys: list[int] = []
        while len(keys) < len(tokens):  # tokens with the same best occurrence stand together
            i = len(keys)
            _, _, length, resumed = best[i]
            same = len(tokens) - i if best[-1] is best[i] else sum([other is best[i] for other in best[i:]])
            keys += self.record.keys(source, resumed, length + i, same)
        _, position, length, _ = best[-1]
        return Path(source, position, length, most, tokens, keys, shares)

    def acceptance(self, path: Path, min_token_prob: float) -> list[float]:
        """Per token of a path that may be drafted, the probability that it is accepted if those before it are.

        Ends before the probability of all tokens together falls under `min_token_prob`.
        """
        found: list[float] = []
        reached = 1.0
        rates = self.record.rates
        for key, share in zip(path.keys[: path.most], path.shares, strict=False):
            rate = rates[key] * share
            reached *= rate
            if reached < min_token_prob:
                break
            found.append(rate)
        return found


class Limits(NamedTuple):
    """The options of suffix decoding, without their prefix."""

    depth: int = 32
    factor: float = 3.0
    min_token_prob: float = 0.1


class Suffix:
    """Suffix decoding (Oliaro et al. 2411.04975) over the row's own text, a memory, and a predicted output.

    All earlier occurrences of the last 1 to `depth` tokens vote for the next token, the longer ones with more weight,
    and those that agree vote for the one after it. Occurrences near the place where the last copy broke off have more
    weight, so that a copy that went astray finds its way back. Each source, the text, the prediction and the
    memory, proposes a path. The probability of its tokens is the product of vote shares and of the acceptance rates
    that tokens with such a match had in this row. The path with the highest sum of probabilities, that is of expected
    accepted tokens, is drafted. Proposals count in the record whether they are drafted or not, so that a memory of
    other topics is soon ignored.

    Args:
        memory: past requests; None to use the text alone.
        prediction: token ids of an output that is expected to be similar.
        limits: the options.
        eos: the ids of end-of-sequence tokens, at which a draft ends.
        vocab_size: number of ids that the target knows.
    """

    drafts_first = True
    reads_target = False

    def __init__(
        self,
        memory: Memory | None = None,
        prediction: Sequence[int] = (),
        limits: Limits = Limits(),
        eos: Collection[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.memory, self.prediction, self.limits, self.eos = memory, prediction, limits, eos
        self.vocab_size = vocab_size
        self._rows: dict[int, SuffixRow] = {}

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        return [self._propose(row, n) for row, n in zip(rows, max_draft_tokens, strict=True)]

    def _row(self, row: Row) -> SuffixRow:
        state = self._rows.get(row.index)
        if state is None:
            state = self._rows[row.index] = SuffixRow()
            if self.prediction:
                state.prediction.extend([*row.ids[-CONTEXT_TOKENS:], *self.prediction])
                state.prediction.begin()
        return state

    def _propose(self, row: Row, max_draft_tokens: int) -> Draft:
        state = self._row(row)
        state.learn(row.ids)
        state.text.extend(row.ids[state.text.length :])
        state.paths, state.proposed_at = [], len(row.ids)
        if max_draft_tokens <= 0:
            return Draft([])
        best, highest, acceptance = None, 0.0, []
        sources: list[tuple[str, Source]] = [("text", state.text)]
        if self.prediction:
            sources.append(("prediction", state.prediction))
        if self.memory is not None:
            sources.append(("memory", self.memory))
        for source, where in sources:
            path = state.propose(row.ids, source, where, self.limits, max_draft_tokens)
            if path is None:
                continue
            self._cut(path)
            rates = state.acceptance(path, self.limits.min_token_prob)
            expected = sum(accumulate(rates, mul))
            if best is None or expected > highest:
                best, highest, acceptance = path, expected, rates
                state.paths.insert(0, path)
            else:
                state.paths.append(path)
        if best is None:
            return Draft([])
        k = min(row.schedule.length(best.length, acceptance), len(acceptance))
        lookahead = best.tokens[k] if k < len(best.tokens) else None
        return Draft(best.tokens[:k], match_length=best.length, lookahead_token=lookahead)

    def _cut(self, path: Path) -> None:
        """End a path at an end-of-sequence token, and before an id that the target does not know."""
        for i, token in enumerate(path.tokens):
            if token in self.eos:
                path.most = min(path.most, i + 1)
                break
            if self.vocab_size is not None and token >= self.vocab_size:
                del path.tokens[i:], path.keys[i:], path.shares[i:]
                break
