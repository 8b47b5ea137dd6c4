"""Mutants of the acceptance rules: the enumeration must detect every known mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftahead.core.draft import Draft
from draftahead.core.types import ForwardOutput
from draftahead.sampling import accept, processors
from draftahead.sampling.noise import NodeContext
from toy import (
    PARAMS,
    PLAIN,
    VOCAB_SIZE,
    World,
    drafted_distribution,
    total_variation,
)

Patch = tuple[Any, str, Callable[..., Any]]
DETECTED = 1e-3  # total variation; a correct rule stays below 1e-12

REAL_KEEP_PROBABILITIES = accept.block_keep_probabilities
REAL_PROBS_OF = processors.probs_of


def _unclipped(p: Any, q: Any, tokens: Any, lengths: Any) -> Any:
    """P_i = P_{i-1} p/q without the min(1, .)."""
    weight, keep = [p.new_ones(1)], [p.new_ones(1)]
    for i in range(1, tokens.shape[1] + 1):
        drafted = tokens[:, i - 1, None]
        ratio = p[:, i - 1].gather(-1, drafted) / q[:, i - 1].gather(-1, drafted)
        weight.append((weight[-1] * ratio[:, 0]).nan_to_num(0.0))
        probability = weight[i]
        if i < int(lengths):
            excess = (weight[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            probability = (excess / (excess + 1 - weight[i])).nan_to_num(1.0)
        keep.append(torch.where(lengths < i, 0.0, probability.clamp(0, 1)))
    return torch.stack(keep, 1), torch.stack(weight, 1)


def _interior_formula_at_the_end(p: Any, q: Any, tokens: Any, lengths: Any) -> Any:
    padded = torch.cat([q, q[:, -1:]], 1)
    more = torch.cat([tokens, tokens[:, -1:]], 1)
    longer = torch.cat([p, p[:, -1:]], 1)
    keep, weight = REAL_KEEP_PROBABILITIES(longer, padded, more, lengths + 1)
    return keep[:, :-1], weight[:, :-1]


BLOCK_MUTANTS: dict[str, Patch] = {
    "token residual in block verification": (
        accept,
        "block_residual",
        lambda p, q, weight, is_end: torch.where(is_end[:, None], p, accept.residual(p, q)),
    ),
    "stops at the first failing test": (
        accept,
        "longest_kept",
        lambda accepted: (accepted[:, 1:].long().cumprod(1)).sum(1),
    ),
    "weights are not clipped": (accept, "block_keep_probabilities", _unclipped),
    "interior formula at the end": (
        accept,
        "block_keep_probabilities",
        _interior_formula_at_the_end,
    ),
    "samples from p in place of the residual": (accept, "residual", lambda p, q: p),
    "residual at the end of the chain too": (
        accept,
        "block_residual",
        lambda p, q, weight, is_end: accept.residual(
            weight[:, None] * p, q + 0.1 * is_end[:, None]
        ),
    ),
}
TOKEN_MUTANTS: dict[str, Patch] = {
    "samples from p in place of the residual": (accept, "residual", lambda p, q: p),
    "ratio inverted": (
        accept,
        "accept_probability",
        lambda p, q, token: (q[..., token] / p[..., token]).nan_to_num(0.0).clamp(max=1.0),
    ),
    "accepts always": (accept, "accept_probability", lambda p, q, token: torch.ones(())),
}


def error(rule: accept.AcceptanceRule, params: str = "plain", **options: Any) -> float:
    """The largest total variation in a few worlds: a mutant may be harmless in one of them."""
    worlds = [World(seed, PARAMS[params]) for seed in (1, 3, 4)]
    return max(
        total_variation(
            drafted_distribution(world, 3, rule, **options), world.output_distribution(4)
        )
        for world in worlds
    )


@pytest.mark.parametrize("name", BLOCK_MUTANTS)
def test_mutant_of_block_verification_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BLOCK_MUTANTS[name])
    assert error("block") > DETECTED


@pytest.mark.parametrize("name", TOKEN_MUTANTS)
def test_mutant_of_token_rejection_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*TOKEN_MUTANTS[name])
    assert error("token") > DETECTED


@pytest.mark.parametrize("rule", ["block", "token"])
def test_argmax_declared_as_sampled_is_detected(rule: accept.AcceptanceRule) -> None:
    assert error(rule, choose="argmax") > DETECTED


def _cut_before_an_unlikely_token(draft: Draft) -> Draft:
    assert draft.probs is not None
    size = draft.num_nodes[0]
    for node in range(1, size):
        if draft.probs[0, node - 1, draft.tokens[0][node]] < 0.4:
            size = node
            break
    return dataclasses.replace(draft, num_nodes=[size])


def _probs_shifted_by_one_node(draft: Draft) -> Draft:
    assert draft.probs is not None
    return dataclasses.replace(draft, probs=draft.probs.roll(1, 1))


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("corrupt", [_cut_before_an_unlikely_token, _probs_shifted_by_one_node])
def test_corrupt_draft_is_detected(
    rule: accept.AcceptanceRule, corrupt: Callable[[Draft], Draft]
) -> None:
    assert error(rule, corrupt=corrupt) > DETECTED


@pytest.mark.parametrize("rule", ["block", "token"])
def test_penalties_that_ignore_the_drafted_path_are_detected(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_path(logits: torch.Tensor, contexts: list[NodeContext]) -> torch.Tensor:
        return REAL_PROBS_OF(logits, [NodeContext(context.sequence) for context in contexts])

    monkeypatch.setattr(accept, "probs_of", without_path)
    assert error(rule, "penalties") > DETECTED


@pytest.mark.parametrize("rule", ["block", "token"])
def test_last_token_without_processors_is_detected(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unprocessed_at_depth_three(
        logits: torch.Tensor, contexts: list[NodeContext]
    ) -> torch.Tensor:
        probs = REAL_PROBS_OF(logits, contexts)
        deep = torch.tensor([[len(context.path) == 3] for context in contexts])
        return torch.where(deep, logits.softmax(-1), probs)

    monkeypatch.setattr(accept, "probs_of", unprocessed_at_depth_three)
    assert error(rule, "penalties") > DETECTED


def accepts_an_impossible_token() -> bool:
    """Whether a token of probability 0 is accepted when the random number is exactly 0."""
    world = World(1, PLAIN)
    impossible = int((world.probs(()) == 0).nonzero()[0])
    chain = Draft.chains([world.prompt[-1]], [[impossible]])
    probs = torch.full((1, 2, VOCAB_SIZE), 1 / VOCAB_SIZE)
    draft = dataclasses.replace(chain, probs=probs)
    batch = world.batch(world.sequence(), max_depth=1)
    prefixes = [world.prompt, (*world.prompt, impossible)]
    output = ForwardOutput(torch.stack([world.logits("target", p) for p in prefixes])[None])
    found = [accept.accept(draft, output, batch, rule)[0].tokens[0] for rule in ("block", "token")]
    return any(tokens[0] == impossible for tokens in found)


def test_probability_zero_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "uniforms", lambda keys, n, device: torch.zeros(len(keys), n))
    assert not accepts_an_impossible_token()
    monkeypatch.setattr(accept, "accepts", lambda probability, uniform: uniform <= probability)
    assert accepts_an_impossible_token()
