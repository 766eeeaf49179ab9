"""The verifiers decide which drafted tokens are kept. Each is a few pure functions of tensors and a thin sampler.

p is the target's distribution at a drafted position, q the one that the drafted token x was drawn from; both `[vocab]`.
q is None if x was chosen and not drawn (an argmax, a token from a lookup): a point mass at x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, VerifiedToken, Verifier
from specnb.decoding.distributions import BlockDistributions


def acceptance(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """Probability that drafted token x is accepted: min(1, p(x) / q(x)); p(x) for a point mass. Scalar.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318.
    """
    return p[x] if q is None else _ratio(p[x], q[x])


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 0 where p = 0, so that 0 / 0 accepts nothing the target never writes."""
    return torch.where(p > 0, (p / q).clamp(max=1), torch.zeros_like(p))


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """The distribution `[vocab]` of the correction after x was rejected: max(p - q, 0), normalised.

    For a point mass this is p without x. If p = q, nothing is ever rejected; then p itself is returned, so that
    rounding cannot leave an empty distribution.
    """
    if q is None:
        rest = p.clone()
        rest[x] = 0
    else:
        rest = (p - q).clamp(min=0)
    total = rest.sum()
    return torch.where(total > 0, rest / total.where(total > 0, 1), p)


def block_acceptance(p: Sequence[Tensor], q: Sequence[Tensor | None], drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Block verification: weights w and acceptance probabilities h of the prefixes of a drafted block.

    The longest prefix whose own uniform draw is below h is accepted. Sun et al., "Block Verification Accelerates
    Speculative Decoding", ICLR 2025 (2403.10444), algorithm 2.

    Args:
        p: k + 1 distributions `[vocab]`.
        q: k distributions `[vocab]`; None for a point mass.
        drafted: k token ids.

    Returns:
        w and h, both `[k + 1]`.
    """
    k = len(drafted)
    w, h = [p[0].new_ones(())], [p[0].new_ones(())]
    for i, x in enumerate(drafted):
        q_i = q[i]
        w.append(w[-1] * p[i][x] if q_i is None else _ratio(w[-1] * p[i][x], q_i[x]))
    for i in range(1, k):
        surplus = _surplus(w[i], p[i], q[i], drafted[i]).sum()
        rest = surplus + 1 - w[i]
        h.append(torch.where(rest > 0, surplus / rest.where(rest > 0, 1), 1))  # 0/0 only where nothing can be rejected
    if k:
        h.append(w[k])
    return torch.stack(w), torch.stack(h)


def block_residual(w: Tensor, p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """The distribution `[vocab]` of the token after an accepted prefix of weight w: max(w p - q, 0), normalised."""
    rest = _surplus(w, p, q, x)
    total = rest.sum()
    return torch.where(total > 0, rest / total.where(total > 0, 1), p)


def _surplus(w: Tensor, p: Tensor, q: Tensor | None, x: int) -> Tensor:
    rest = w * p
    if q is None:
        rest = rest.clone()
        rest[x] -= 1
        return rest.clamp(min=0)
    return (rest - q).clamp(min=0)


# ---- the verifiers: they yield the tokens to append; the last one is the correction or the bonus token


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """One token drawn from `probs` `[vocab]`."""
    return int(torch.multinomial(probs, 1, generator=generator))


def greedy(block: BlockDistributions, draft: Draft, generator: torch.Generator) -> Iterator[VerifiedToken]:
    """Drafted tokens are accepted as long as they are the target's most probable ones."""
    for i, x in enumerate(draft.tokens):
        best = block.argmax(i)
        yield VerifiedToken(best, best == x)
        if best != x:
            return
    yield VerifiedToken(block.argmax(len(draft.tokens)), False)


def rejection_sampling(block: BlockDistributions, draft: Draft, generator: torch.Generator) -> Iterator[VerifiedToken]:
    """Token by token: x is accepted with probability min(1, p(x) / q(x)), else a correction is drawn from the residual.

    Leviathan et al. 2211.17192, algorithm 1. For a point mass this is the same as drawing from p and comparing with x.
    Then every token takes one random draw, whatever was drafted, and the text is the same as in plain sampling with the
    same seed.
    """
    for i, x in enumerate(draft.tokens):
        p, q = block.target_probs(i), block.draft_probs(i)
        if q is None:
            token = draw(p, generator)
            yield VerifiedToken(token, token == x)
            if token != x:
                return
            continue
        if _uniform(generator, p) >= acceptance(p, q, x):
            yield VerifiedToken(draw(residual(p, q, x), generator), False)
            return
        yield VerifiedToken(x, True)
    yield VerifiedToken(draw(block.target_probs(len(draft.tokens)), generator), False)


def block_verification(block: BlockDistributions, draft: Draft, generator: torch.Generator) -> Iterator[VerifiedToken]:
    """The whole block at once: the distribution is the same, and on average no fewer tokens are accepted.

    Sun et al., ICLR 2025 (2403.10444), algorithm 2.
    """
    k = len(draft.tokens)
    p, q = [block.target_probs(i) for i in range(k + 1)], [block.draft_probs(i) for i in range(k)]
    w, h = block_acceptance(p, q, draft.tokens)
    accepted = max(i for i in range(k + 1) if i == 0 or _uniform(generator, p[0]) < h[i])
    for x in draft.tokens[:accepted]:
        yield VerifiedToken(x, True)
    i = accepted
    rest = p[k] if i == k else block_residual(w[i], p[i], q[i], draft.tokens[i])
    yield VerifiedToken(draw(rest, generator), False)


def _uniform(generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand((), generator=generator, device=like.device, dtype=like.dtype)


VERIFIERS: dict[str, Verifier] = {"greedy": greedy, "token": rejection_sampling, "block": block_verification}
"""By name: greedy decoding, and the values of the option `verification`."""
