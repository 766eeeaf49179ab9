"""The output distribution of every verifier, enumerated exactly: no seeds, no tolerance for sampling noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specnb.decoding.verifiers import acceptance, block_acceptance, block_residual, residual

VOCAB = 4
Text = tuple[int, ...]
Model = Callable[[Text], Tensor]
Output = dict[Text, float]


def model(seed: int, sharpness: float, *, zeros: bool = False) -> Model:
    """A distribution for every text up to the longest needed, float64."""
    known: dict[Text, Tensor] = {}

    def probs(text: Text) -> Tensor:
        if text not in known:
            g = torch.Generator().manual_seed(seed * 1_000_003 + hash(text) % 999_983)
            logits = torch.randn(VOCAB, generator=g, dtype=torch.float64) * sharpness
            if zeros:  # as after top-k: some tokens have no probability at all
                logits[int(torch.randint(VOCAB, (), generator=g))] = -torch.inf
            known[text] = logits.softmax(-1)
        return known[text]

    return probs


def plain(p: Model, n: int) -> Output:
    """The distribution of n tokens when the target alone writes."""
    out: Output = {}
    for text in itertools.product(range(VOCAB), repeat=n):
        mass = 1.0
        for i, token in enumerate(text):
            mass *= float(p(text[:i])[token])
        out[text] = mass
    return out


def drafts(q: Model, k: int, kind: str, stop: Callable[[Text], bool]) -> Iterator[tuple[Text, float]]:
    """Every draft and its probability; `stop` ends a draft early, as a confidence threshold does."""
    frontier: list[tuple[Text, float]] = [((), 1.0)]
    while frontier:
        text, mass = frontier.pop()
        if len(text) == k or (text and stop(text)):
            yield text, mass
            continue
        probs = q(text)
        options = [int(probs.argmax())] if kind == "point" else range(VOCAB)
        for token in options:
            weight = 1.0 if kind == "point" else float(probs[token])
            if weight > 0:
                frontier.append(((*text, token), mass * weight))


def complete(out: Output, p: Model, text: Text, mass: float, n: int) -> None:
    """Spread the mass of a short output over its plain continuations of length n, or cut a longer one."""
    if mass == 0:
        return
    if len(text) >= n:
        out[text[:n]] = out.get(text[:n], 0.0) + mass
        return
    for token, weight in enumerate(p(text).tolist()):
        complete(out, p, (*text, token), mass * weight, n)


def token_verifier(p: Model, q: Model, draft: Text, kind: str) -> Iterator[tuple[Text, float]]:
    """What `rejection_sampling` may emit for one draft, with probabilities."""
    alive = 1.0
    for i, x in enumerate(draft):
        target_probs, draft_probs = p(draft[:i]), None if kind == "point" else q(draft[:i])
        a = float(acceptance(target_probs, draft_probs, x))
        for token, weight in enumerate(residual(target_probs, draft_probs, x).tolist()):
            yield (*draft[:i], token), alive * (1 - a) * weight
        alive *= a
    for token, weight in enumerate(p(draft).tolist()):
        yield (*draft, token), alive * weight


def block_verifier(p: Model, q: Model, draft: Text, kind: str) -> Iterator[tuple[Text, float]]:
    """What `block_verification` may emit for one draft, with probabilities."""
    k = len(draft)
    target_probs = [p(draft[:i]) for i in range(k + 1)]
    draft_probs = [None if kind == "point" else q(draft[:i]) for i in range(k)]
    w, h = block_acceptance(target_probs, draft_probs, draft)
    missed = 1.0
    for i in range(k, -1, -1):  # the longest prefix that passes is accepted; the empty one always passes
        accepted = missed * (float(h[i]) if i else 1.0)
        rest = target_probs[k] if i == k else block_residual(w[i], target_probs[i], draft_probs[i], draft[i])
        for token, weight in enumerate(rest.tolist()):
            yield (*draft[:i], token), accepted * weight
        missed *= 1 - (float(h[i]) if i else 1.0)


VERIFIERS = {"token": token_verifier, "block": block_verifier}
STOPS: dict[str, Callable[[Text], bool]] = {
    "full": lambda text: False,
    "confident": lambda text: (sum(text) + len(text)) % 3 == 0,
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", ["sampled", "point"])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verifier_keeps_the_targets_distribution(verifier: str, k: int, kind: str, stop: str) -> None:
    for seed, sharpness, zeros in [(1, 0.5, False), (2, 2.0, False), (3, 1.0, True), (4, 6.0, True)]:
        p, q = model(seed, sharpness, zeros=zeros), model(seed + 100, sharpness, zeros=zeros)
        for drafter in (q, p):  # p itself: nothing is ever rejected
            out: Output = {}
            for draft, mass in drafts(drafter, k, kind, STOPS[stop]):
                for text, weight in VERIFIERS[verifier](p, drafter, draft, kind):
                    complete(out, p, text, mass * weight, k + 1)
            expected = plain(p, k + 1)
            assert sum(out.values()) == pytest.approx(1, abs=1e-12)
            assert max(abs(out.get(text, 0.0) - mass) for text, mass in expected.items()) < 1e-12


@pytest.mark.parametrize("wrong", ["argmax judged as drawn", "residual of p"])
def test_the_enumeration_catches_wrong_verifiers(wrong: str) -> None:
    p, q = model(1, 1.0), model(101, 1.0)
    out: Output = {}
    for draft, mass in drafts(q, 1, "point" if "argmax" in wrong else "sampled", STOPS["full"]):
        x = draft[0]
        a = float(acceptance(p(()), q(()), x))
        rest = residual(p(()), q(()), x) if "argmax" in wrong else p(())
        for token in range(VOCAB):
            out[token,] = out.get((token,), 0.0) + mass * ((1 - a) * float(rest[token]) + a * (token == x))
    assert max(abs(out[text] - mass) for text, mass in plain(p, 1).items()) > 1e-2


def test_block_verification_accepts_at_least_as_many() -> None:
    for seed in range(5):
        p, q = model(seed, 1.5), model(seed + 50, 1.5)
        lengths = {
            name: sum(
                mass * weight * (len(text) - 1)
                for draft, mass in drafts(q, 3, "sampled", STOPS["full"])
                for text, weight in verifier(p, q, draft, "sampled")
            )
            for name, verifier in VERIFIERS.items()
        }
        assert lengths["block"] >= lengths["token"] - 1e-12
        assert lengths["block"] > lengths["token"] + 1e-4  # for these models strictly


@pytest.mark.parametrize(
    "p",
    [[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0.25] * 4, torch.tensor([5.0, 4, 3, -torch.inf]).div(1e-8).softmax(-1).tolist()],
)
def test_edge_distributions_stay_distributions(p: list[float]) -> None:
    """One-hot, uniform, temperature 1e-8 with -inf logits: never NaN, always a distribution."""
    probs = torch.tensor(p, dtype=torch.float64)
    for q in (None, probs, torch.tensor([0.5, 0, 0.5, 0], dtype=torch.float64)):
        for x in range(VOCAB):
            if q is not None and q[x] == 0:
                continue
            a, rest = acceptance(probs, q, x), residual(probs, q, x)
            assert 0 <= float(a) <= 1
            assert float(rest.sum()) == pytest.approx(1)
            assert not rest.isnan().any()
