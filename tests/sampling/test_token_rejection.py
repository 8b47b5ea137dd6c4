"""Token rejection of sampled chains, and what all rules share: residuals, tests, tokens of
probability 0, which rule a draft is verified by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batched_worlds import BatchedWorlds, chain, likely_chains, residual_by_hand
from draftahead.core.draft import Draft
from draftahead.core.types import Verdict
from draftahead.sampling import accept
from draftahead.sampling.noise import NodeContext
from toy import PARAMS, PLAIN


def test_the_residual_is_what_the_draft_left() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    assert accept.residual(p, q).tolist() == [[1, 0, 0, 0]]
    assert accept.residual(p, p).tolist() == p.tolist()  # by rounding only: never rejected
    two = accept.residual(p.repeat(2, 1), torch.cat([q, p]))  # the second has nothing left
    assert two.tolist() == [[1, 0, 0, 0], *p.tolist()]


def test_a_test_passes_strictly_below_its_probability() -> None:
    probability = torch.tensor([0.0, 0.5, 0.5, 1.0])
    uniform = torch.tensor([0.0, 0.5, 0.4999, 0.999])
    assert accept.accepts(probability, uniform).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("token", "expected"), [(2, 0.0), (3, 0.0), (0, 1.0), (1, 1.0)])
def test_a_token_that_is_impossible_for_both_is_not_accepted(token: int, expected: float) -> None:
    """p = q = 0 at the drafted token: 0/0 is a probability of 0 and not of 1, under each rule."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    assert float(accept.accept_probability(p, q, token)[0]) == expected
    both = torch.stack([p, p], 1)
    keep, weight = accept.block_keep_probabilities(
        both, q[:, None], torch.tensor([[token]]), torch.tensor([1])
    )
    assert keep.tolist() == [[1, expected]]
    assert weight.tolist() == [[1, expected]]


def test_acceptance_probability_is_the_ratio_and_at_most_one() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.75, 0.0, 0.0]], dtype=torch.float64)
    assert float(accept.accept_probability(p, q, 1)[0]) == pytest.approx(2 / 3)
    assert float(accept.accept_probability(p, q, 0)[0]) == 1


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_tested_in_order_each_with_the_random_number_of_its_node(seed: int) -> None:
    params = list(PARAMS.values())
    chains = likely_chains(seed, params)
    worlds = BatchedWorlds(chains, params, seed=20 + seed, sampled=True)
    verdict = worlds.accept("token")
    for b, tokens in enumerate(chains):
        emitted: tuple[int, ...] = ()
        for node, (token, _) in enumerate([*tokens, (None, None)]):
            p = worlds.target_probs(b, node).tolist()
            if token is None:
                break
            q = worlds.draft_probs(b, node).tolist()
            probability = min(1.0, p[token] / q[token]) if q[token] else float(p[token] > 0)
            if worlds.uniform(b, emitted) >= probability:
                p = residual_by_hand(p, q)
                break
            emitted = (*emitted, token)
        assert verdict.paths[b] == list(range(len(emitted) + 1))
        own = worlds.own_token(torch.tensor(p, dtype=torch.float64), b, emitted)
        assert verdict.tokens[b] == [*emitted, own]


def test_each_draft_is_verified_by_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typical acceptance where the output need not be lossless; else block verification for sampled
    chains, unless token rejection was asked for."""
    called: list[str] = []

    def noted(name: str, draft: Draft) -> tuple[Verdict, Draft]:
        called.append(name)
        return Verdict([], []), draft

    names = ("accept_deterministic", "accept_block", "accept_token_rejection", "accept_typical")
    for name in names:
        monkeypatch.setattr(accept, name, lambda draft, *_, name=name: noted(name, draft))
    chains = BatchedWorlds([chain(1, 2), chain(1)], [PLAIN] * 2, sampled=True)
    point_mass = BatchedWorlds([chain(1, 2)], [PLAIN])
    chains.accept("block")
    chains.accept("token")
    point_mass.accept("block")
    point_mass.accept("token")
    point_mass.accept("block", lossless=False)
    chains.accept("block", lossless=False)
    deterministic, block, token, typical = names
    assert called == [block, token, deterministic, deterministic, typical, typical]


def test_processors_do_not_see_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes behind a sequence's last repeat its root."""
    seen = []
    real = accept.probs_of

    def noted(logits: Tensor, contexts: list[NodeContext]) -> Tensor:
        seen.append(contexts)
        return real(logits, contexts)

    monkeypatch.setattr(accept, "probs_of", noted)
    trees = [chain(1), chain(0, 2, 1)]
    worlds = BatchedWorlds(trees, [PARAMS["penalties"]] * 2, sampled=True)
    worlds.accept("block")
    one, other = worlds.sequences
    paths = [(), (1,), (), ()], [(), (0,), (0, 2), (0, 2, 1)]
    expected = [NodeContext(one, path) for path in paths[0]]
    assert seen == [expected + [NodeContext(other, path) for path in paths[1]]]
