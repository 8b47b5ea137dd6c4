"""Sampled siblings: tested in order, each against the residual that its elders left. And what all
rules share: residuals, tests, tokens of probability 0, which rule a draft is verified by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batched_worlds import BatchedWorlds, chain, random_trees, residual_by_hand
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


def test_a_rejected_sibling_is_taken_out_of_the_drafts_distribution() -> None:
    q = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert accept.without(q, 1).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert q.tolist() == [0.5, 0.25, 0.25, 0]  # the recorded one stays as it is
    certain = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert accept.without(certain, 1).tolist() == [0, 0, 0, 0]  # no NaN
    two = accept.without(torch.stack([q, certain]), 1)
    assert two[0].tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert two[1].tolist() == [0, 0, 0, 0]


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


def test_a_token_drafted_twice_below_a_node_is_not_accepted_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it was rejected, nothing is left of it in either distribution: 0/0."""
    monkeypatch.setattr(accept, "accepts", lambda probability, uniform: probability == 1)
    worlds = BatchedWorlds([[(1, 0), (1, 0)]], [PLAIN], sampled=True)
    worlds.logits[0, :] = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    worlds.draft_probs(0, 0)[:] = torch.tensor([0.25, 0.5, 0.25, 0.0])
    assert worlds.accept("token").paths == [[0]]


@pytest.mark.parametrize("seed", range(8))
def test_siblings_are_tested_in_order_each_with_a_random_number_of_its_own(seed: int) -> None:
    """By hand: the random numbers of a node are those of one key, in the order of its children."""
    trees = random_trees(seed, 3)
    worlds = BatchedWorlds(trees, list(PARAMS.values()), seed=20 + seed, sampled=True)
    verdict = worlds.accept("token")
    for b, tree in enumerate(trees):
        node, path, emitted = 0, [0], ()
        while True:
            p, q = worlds.target_probs(b, node).tolist(), worlds.draft_probs(b, node).tolist()
            children = [n for n, (_, parent) in enumerate(tree, start=1) if parent == node]
            for index, child in enumerate(children):
                token = tree[child - 1][0]
                probability = min(1.0, p[token] / q[token]) if q[token] else float(p[token] > 0)
                if worlds.uniform(b, emitted, index) < probability:
                    node, path, emitted = child, [*path, child], (*emitted, token)
                    break
                p = residual_by_hand(p, q)
                q = [0.0 if i == token else x for i, x in enumerate(q)]
                q = [x / sum(q) for x in q] if sum(q) else q
            else:
                break
        assert verdict.paths[b] == path
        own = worlds.own_token(torch.tensor(p, dtype=torch.float64), b, emitted)
        assert verdict.tokens[b] == [*emitted, own]


def test_each_draft_is_verified_by_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typical acceptance where the output need not be lossless; else block verification for sampled
    chains, unless token rejection was asked for."""
    called: list[str] = []

    def noted(name: str, draft: Draft) -> tuple[Verdict, Draft]:
        called.append(name)
        return Verdict([], []), draft

    for name in ("accept_matching", "accept_block", "accept_siblings", "accept_typical"):
        monkeypatch.setattr(accept, name, lambda draft, *_, name=name: noted(name, draft))
    chains = BatchedWorlds([chain(1, 2), chain(1)], [PLAIN] * 2, sampled=True)
    trees = BatchedWorlds([[(1, 0), (2, 0)]], [PLAIN], sampled=True)
    point_mass = BatchedWorlds([chain(1, 2)], [PLAIN])
    chains.accept("block")
    chains.accept("token")
    trees.accept("block")
    point_mass.accept("block")
    point_mass.accept("token")
    point_mass.accept("block", lossless=False)
    chains.accept("block", lossless=False)
    siblings, matching = "accept_siblings", "accept_matching"
    assert called == [
        *("accept_block", siblings, siblings, matching, matching),
        *("accept_typical", "accept_typical"),
    ]


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
