"""Suffix decoding: copies what followed the same tokens earlier in the text, in a memory or in a predicted output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from specnb.decoding.contracts import Draft, Row
from specnb.memory import Memory
from specnb.memory.memory import CONTEXT_TOKENS
from specnb.memory.suffix_index import Match, SuffixIndex

# Chosen on the texts of `bench.prompts`, by counting target passes
_VOTE_BASE = 4.0  # a match of n tokens counts 4**n
_MOST_MATCHES = 16
_RESUME_FROM, _RESUME_TO = -2, 64  # tokens from where the last copy broke off to where it may go on
_RESUME_GAIN = 8.0
_MIN_COPY = 4  # shorter copies are not resumed
_RATE_WEIGHT, _RATE_DECAY, _MAX_RATE = 8.0, 0.97, 0.995

_CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7)
"""The class of a match length; lengths in one class share their record."""
_PRIOR = {
    "text": (0.15, 0.25, 0.6, 0.75, 0.85, 0.9, 0.96, 0.985),
    "memory": (0.15, 0.1, 0.4, 0.55, 0.75, 0.85, 0.95, 0.985),
}
"""How often a copied token is accepted, by the class of its match length, before anything is known."""


class Source(Protocol):
    """Where a text is looked up: a `SuffixIndex` or a `Memory`."""

    def matches(self, ids: Sequence[int], longest: int, most: int, count: int) -> list[Match]:
        """Earlier occurrences of the suffixes of `ids`."""
        ...

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """What follows a position."""
        ...


class Key(NamedTuple):
    """Tokens that share a record of acceptance: by source, whether a copy is resumed, and class of match length."""

    source: str
    resumed: bool
    length_class: int


class AcceptanceRecord:
    """How often copied tokens were accepted, or would have been, in this row. Older tokens count less."""

    def __init__(self) -> None:
        self._tried: dict[Key, float] = {}
        self._accepted: dict[Key, float] = {}

    def rate(self, key: Key) -> float:
        """The acceptance rate of a token with all votes, smoothed towards `_PRIOR`."""
        prior = _PRIOR[key.source][key.length_class]
        accepted, tried = self._accepted.get(key, 0.0), self._tried.get(key, 0.0)
        return min(_MAX_RATE, (accepted + _RATE_WEIGHT * prior) / (tried + _RATE_WEIGHT))

    def count(self, key: Key, share: float, accepted: bool) -> None:
        """Count a token that had this share of the votes."""
        self._tried[key] = _RATE_DECAY * self._tried.get(key, 0.0) + share
        self._accepted[key] = _RATE_DECAY * self._accepted.get(key, 0.0) + accepted


class Candidate(NamedTuple):
    """An occurrence with its weight in the vote."""

    weight: float
    position: int
    length: int
    resumed: bool


@dataclass
class Path:
    """The tokens that a source proposes.

    Attributes:
        position: of the first token, in the occurrence with most weight.
        length: number of matched tokens there.
        most: how many tokens may be drafted; there is one more, to look ahead.
        tokens: the proposed tokens.
        keys: per token, the record that it belongs to.
        shares: per token, its share of the votes: the count ratio of suffix decoding, with weights.
    """

    source: str
    position: int = 0
    length: int = 0
    most: int = 0
    tokens: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


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
        self.text = SuffixIndex()
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
        found = where.matches(ids, limits.depth, _MOST_MATCHES, limits.depth + 1)
        copy = self.copy if self.copy is not None and self.copy.source == source else None
        resumes = range(copy.position + _RESUME_FROM, copy.position + _RESUME_TO + 1) if copy else range(0)
        if copy and copy.broke_off and copy.length >= _MIN_COPY and self.tokens_since_copy == 1:
            # nothing may match yet after the token that the copy had not: go on behind it
            at = copy.position + 1
            if all(match.position != at for match in found):
                found.append(Match(at, 0, where.continuation(at, limits.depth + 1)))
        groups: dict[tuple[int, ...], tuple[float, Candidate]] = {}
        longest = 0
        for match in found:
            resumed = match.position in resumes
            weight = _VOTE_BASE**match.length * (_RESUME_GAIN if resumed else 1.0)
            candidate = Candidate(weight, match.position, match.length, resumed)
            total, best = groups.get(match.continuation, (0.0, candidate))
            groups[match.continuation] = total + weight, max(best, candidate)
            longest = max(longest, match.length)
        most = min(room, limits.depth, max(1, int(limits.factor * longest)))
        path = _vote(source, groups, most)
        return path if path.tokens else None

    def acceptance(self, path: Path, min_token_prob: float) -> list[float]:
        """Per token of a path that may be drafted, the probability that it is accepted if those before it are.

        Ends before the probability of all tokens together falls under `min_token_prob`.
        """
        found: list[float] = []
        reached = 1.0
        for key, share in zip(path.keys[: path.most], path.shares, strict=False):
            rate = self.record.rate(key) * share
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
    weight, so that a copy that went astray finds its way back. Each source, the text with the prediction and the
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
                state.text.extend([*row.ids[-CONTEXT_TOKENS:], *self.prediction])
                state.text.begin()
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


def _vote(source: str, groups: dict[tuple[int, ...], tuple[float, Candidate]], most: int) -> Path:
    """Follow the token with most votes, `most` times and once more to look ahead.

    Args:
        groups: by continuation, the weights of its occurrences together and the occurrence with most weight.
    """
    path = Path(source, most=most)
    live = list(groups.items())
    for i in range(most + 1):
        votes: dict[int, float] = {}
        for tokens, (weight, _) in live:
            if i < len(tokens):
                votes[tokens[i]] = votes.get(tokens[i], 0.0) + weight
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        if len(votes) > 1 or not i:
            live = [group for group in live if i < len(group[0]) and group[0][i] == token]
            best = max(candidate for _, (_, candidate) in live)
        path.tokens.append(token)
        path.keys.append(Key(source, best.resumed, _CLASSES[min(best.length + i, len(_CLASSES) - 1)]))
        path.shares.append(votes[token] / sum(votes.values()))
        path.position, path.length = best.position, best.length
    return path
