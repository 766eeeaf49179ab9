"""The acceptance rules, each as pure functions of tensors and a thin sampler.

p is the target's law at a drafted position, q the law the drafted token x was drawn from; both `[vocab]`. q is None when x
was chosen rather than drawn (argmax, a copied token): a point mass at x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Rule, Verdict
from specnb.decoding.probabilities import Law


def acceptance(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """Probability that drafted token x stands: min(1, p(x) / q(x)); p(x) for a point mass. Scalar.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318.
    """
    return p[x] if q is None else _ratio(p[x], q[x])


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 0 where p = 0, so that 0 / 0 accepts nothing the target never writes."""
    return torch.where(p > 0, (p / q).clamp(max=1), torch.zeros_like(p))


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """The law `[vocab]` of the correction after x was rejected: max(p - q, 0), normalised; p without x for a point mass.

    Where p = q nothing is ever rejected; p itself is returned then, so that rounding cannot make an empty law.
    """
    if q is None:
        rest = p.clone()
        rest[x] = 0
    else:
        rest = (p - q).clamp(min=0)
    total = rest.sum()
    return torch.where(total > 0, rest / total.where(total > 0, 1), p)


def block_lengths(p: Sequence[Tensor], q: Sequence[Tensor | None], drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Block verification: weights w and acceptance probabilities h, both `[k + 1]`, of the prefixes of a drafted block.

    The longest prefix whose own uniform draw is at most h stands. Sun et al., "Block Verification Accelerates Speculative
    Decoding", ICLR 2025 (2403.10444), algorithm 2. `p` has k + 1 laws, `q` k.
    """
    k = len(drafted)
    w, h = [p[0].new_ones(())], [p[0].new_ones(())]
    for i, x in enumerate(drafted):
        law = q[i]
        w.append(w[-1] * p[i][x] if law is None else _ratio(w[-1] * p[i][x], law[x]))
    for i in range(1, k):
        surplus = _surplus(w[i], p[i], q[i], drafted[i]).sum()
        rest = surplus + 1 - w[i]
        h.append(torch.where(rest > 0, surplus / rest.where(rest > 0, 1), 1))  # 0/0 only where nothing can be rejected
    if k:
        h.append(w[k])
    return torch.stack(w), torch.stack(h)


def block_residual(w: Tensor, p: Tensor, q: Tensor | None, x: int) -> Tensor:
    """The law `[vocab]` of the token after an accepted prefix of weight w: max(w p - q, 0), normalised."""
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


# ---- samplers: tokens that stand, in order; the last one is the correction or the bonus


def draw(law: Tensor, generator: torch.Generator) -> int:
    """One token of `law` `[vocab]`."""
    return int(torch.multinomial(law, 1, generator=generator))


def greedy(law: Law, draft: Draft, generator: torch.Generator) -> Iterator[Verdict]:
    """Drafted tokens stand as long as they are the target's own choice."""
    for i, x in enumerate(draft.tokens):
        choice = law.choice(i)
        yield Verdict(choice, choice == x)
        if choice != x:
            return
    yield Verdict(law.choice(len(draft.tokens)), False)


def speculative_sampling(law: Law, draft: Draft, generator: torch.Generator) -> Iterator[Verdict]:
    """Token by token: x stands with probability `acceptance`, else the correction is drawn from `residual`.

    For a point mass that is the same as drawing from p and comparing with x. So each token takes one random draw, whatever was
    drafted, and the text is the one that plain sampling writes with the same seed.
    """
    for i, x in enumerate(draft.tokens):
        p, q = law.probs(i), law.draft_probs(i)
        if q is None:
            token = draw(p, generator)
            yield Verdict(token, token == x)
            if token != x:
                return
            continue
        if _uniform(generator, p) >= acceptance(p, q, x):
            yield Verdict(draw(residual(p, q, x), generator), False)
            return
        yield Verdict(x, True)
    yield Verdict(draw(law.probs(len(draft.tokens)), generator), False)


def block_verification(law: Law, draft: Draft, generator: torch.Generator) -> Iterator[Verdict]:
    """The whole block at once; never accepts fewer tokens on average than token by token, the law is the same."""
    k = len(draft.tokens)
    p, q = [law.probs(i) for i in range(k + 1)], [law.draft_probs(i) for i in range(k)]
    w, h = block_lengths(p, q, draft.tokens)
    stands = max(i for i in range(k + 1) if i == 0 or _uniform(generator, p[0]) < h[i])
    for x in draft.tokens[:stands]:
        yield Verdict(x, True)
    rest = p[k] if stands == k else block_residual(w[stands], p[stands], q[stands], draft.tokens[stands])
    yield Verdict(draw(rest, generator), False)


def _uniform(generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand((), generator=generator, device=like.device, dtype=like.dtype)


RULES: dict[str, Rule] = {"greedy": greedy, "token": speculative_sampling, "block": block_verification}
