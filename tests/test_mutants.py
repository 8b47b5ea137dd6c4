"""The mutation gate: every known wrong rule must be caught by the enumeration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput
from draftahead.sampling import accept, processors
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext
from test_rules import PLAIN, SETTINGS, sibling_trees
from toy import VOCABULARY, World, add_step, distance, drafted_distribution

Patch = tuple[Any, str, Callable[..., Any]]
CAUGHT = 1e-3  # total variation; a right rule stays under 1e-12


def _unclipped(p: Any, q: Any, tokens: Any, lengths: Any) -> Any:
    """P_i = P_{i-1} p/q without the min(1, .)."""
    weight, keep = [p.new_ones(1)], [p.new_ones(1)]
    for i in range(1, tokens.shape[1] + 1):
        said = tokens[:, i - 1, None]
        ratio = p[:, i - 1].gather(-1, said) / q[:, i - 1].gather(-1, said)
        weight.append((weight[-1] * ratio[:, 0]).nan_to_num(0.0))
        chance = weight[i]
        if i < int(lengths):
            excess = (weight[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            chance = (excess / (excess + 1 - weight[i])).nan_to_num(1.0)
        keep.append(torch.where(lengths < i, 0.0, chance.clamp(0, 1)))
    return torch.stack(keep, 1), torch.stack(weight, 1)


def _interior_at_the_end(p: Any, q: Any, tokens: Any, lengths: Any) -> Any:
    padded = torch.cat([q, q[:, -1:]], 1)
    more = torch.cat([tokens, tokens[:, -1:]], 1)
    longer = torch.cat([p, p[:, -1:]], 1)
    keep, weight = REAL_ACCEPTANCE(longer, padded, more, lengths + 1)
    return keep[:, :-1], weight[:, :-1]


REAL_ACCEPTANCE = accept.block_keep_probabilities
REAL_PROBS = processors.probs_of

BLOCK_MUTANTS: dict[str, Patch] = {
    "token residual in block verification": (
        accept,
        "block_residual",
        lambda p, q, weight, end: torch.where(end[:, None], p, accept.residual(p, q)),
    ),
    "stops at the first failing coin": (
        accept,
        "longest_kept",
        lambda won: (won[:, 1:].long().cumprod(1)).sum(1),
    ),
    "weights are not clipped": (accept, "block_keep_probabilities", _unclipped),
    "interior formula at the end": (accept, "block_keep_probabilities", _interior_at_the_end),
    "residual drawn from p": (accept, "residual", lambda p, q: p),
    "residual at the end of the chain too": (
        accept,
        "block_residual",
        lambda p, q, weight, end: accept.residual(weight[:, None] * p, q + 0.1 * end[:, None]),
    ),
}
TOKEN_MUTANTS: dict[str, Patch] = {
    "residual drawn from p": (accept, "residual", lambda p, q: p),
    "accepts by the ratio turned round": (
        accept,
        "accept_probability",
        lambda p, q, token: (q[..., token] / p[..., token]).nan_to_num(0.0).clamp(max=1.0),
    ),
    "accepts always": (accept, "accept_probability", lambda p, q, token: torch.ones(())),
}
SIBLING_MUTANTS: dict[str, Patch] = {
    "siblings with replacement": (accept, "without", lambda q, token: q),
    "younger siblings against p": (accept, "residual", lambda p, q: p),
}


def error(rule: accept.AcceptanceRule, setting: str = "plain", **options: Any) -> float:
    """The worst of a few worlds: a mutant may be harmless in one of them."""
    found = []
    for seed in (1, 3, 4):
        world = World(seed, SETTINGS[setting])
        found.append(
            distance(drafted_distribution(world, 3, rule, **options), world.output_distribution(4))
        )
    return max(found)


@pytest.mark.parametrize("name", BLOCK_MUTANTS)
def test_block_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BLOCK_MUTANTS[name])
    assert error("block") > CAUGHT


@pytest.mark.parametrize("name", TOKEN_MUTANTS)
def test_token_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*TOKEN_MUTANTS[name])
    assert error("token") > CAUGHT


@pytest.mark.parametrize("name", SIBLING_MUTANTS)
def test_sibling_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SIBLING_MUTANTS[name])
    errors = []
    for seed in (1, 4, 7):
        world, found = World(seed, PLAIN), {}
        for probability, draft in sibling_trees(world):
            add_step(found, probability, draft, world, world.sequence(), "block", 4)
        errors.append(distance(found, world.output_distribution(4)))
    assert max(errors) > CAUGHT


@pytest.mark.parametrize("rule", ["block", "token"])
def test_top_one_treated_as_sampled_is_caught(rule: accept.AcceptanceRule) -> None:
    assert error(rule, chooser="argmax") > CAUGHT


def _drop_unlikely(draft: Draft) -> Draft:
    """Cuts the chain before the first token that its own probs found unlikely."""
    assert draft.probs is not None
    size = draft.num_nodes[0]
    for node in range(1, size):
        if draft.probs[0, node - 1, draft.tokens[0, node]] < 0.4:
            size = node
            break
    return Draft(draft.tokens, draft.parents, [size], draft.probs)


def _laws_one_row_off(draft: Draft) -> Draft:
    assert draft.probs is not None
    return Draft(draft.tokens, draft.parents, draft.num_nodes, draft.probs.roll(1, 1))


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("mangle", [_drop_unlikely, _laws_one_row_off])
def test_mangled_draft_is_caught(
    rule: accept.AcceptanceRule, mangle: Callable[[Draft], Draft]
) -> None:
    assert error(rule, mangle=mangle) > CAUGHT


@pytest.mark.parametrize("rule", ["block", "token"])
def test_penalties_from_the_prefix_alone_are_caught(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own path must count, not only the text before the draft."""

    def blind(logits: torch.Tensor, contexts: list[NodeContext]) -> torch.Tensor:
        return REAL_PROBS(logits, [NodeContext(context.sequence) for context in contexts])

    monkeypatch.setattr(accept, "probs_of", blind)
    assert error(rule, "penalties") > CAUGHT


@pytest.mark.parametrize("rule", ["block", "token"])
def test_bonus_token_without_processors_is_caught(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bare_after_drafts(logits: torch.Tensor, contexts: list[NodeContext]) -> torch.Tensor:
        probs = REAL_PROBS(logits, contexts)
        bare = logits.softmax(-1)
        deep = torch.tensor([[len(context.path) == 3] for context in contexts])
        return torch.where(deep, bare, probs)

    monkeypatch.setattr(accept, "probs_of", bare_after_drafts)
    assert error(rule, "penalties") > CAUGHT


def accepts_the_impossible() -> bool:
    """Whether a token of probability 0 is accepted at a random number of exactly 0."""
    world = World(1, PLAIN)
    target_probs = world.probs(())
    impossible = int((target_probs == 0).nonzero()[0])
    sequence = world.sequence()
    draft = Draft.chains([world.prompt[-1]], [[impossible]])
    probs = torch.full((1, 2, VOCABULARY), 1 / VOCABULARY)
    draft = Draft(draft.tokens, draft.parents, draft.num_nodes, probs)
    batch = Batch(
        (sequence,), (1,), RecordedDraftSampler([sequence], [0], VOCABULARY, "distribution")
    )
    paths = [world.prompt, (*world.prompt, impossible)]
    scores = ForwardOutput(torch.stack([world.logits("target", path) for path in paths])[None])
    found = [accept.accept(draft, scores, batch, rule)[0].tokens[0] for rule in ("block", "token")]
    return any(tokens[0] == impossible for tokens in found)


def test_coin_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "uniforms", lambda keys, n, device: torch.zeros(len(keys), n))
    assert not accepts_the_impossible()
    monkeypatch.setattr(accept, "accepts", lambda probability, uniform: uniform <= probability)
    assert accepts_the_impossible()
