"""Nodes whose distribution is not finite: the output ends there with an error, and nothing before
them is changed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from batched_worlds import BatchedWorlds, chain, identical_drafts
from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, ForwardOutput, Verdict
from draftahead.errors import NonFiniteLogitsError, ProcessorError
from draftahead.sampling import accept
from toy import PLAIN, VOCAB_SIZE, World, scripted

GREEDY = dataclasses.replace(PLAIN, temperature=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_nothing_is_kept_behind_a_node_without_a_distribution(
    bad: int, rule: accept.AcceptanceRule, value: float
) -> None:
    """The node itself can be reached. The other sequences, one longer and one shorter, go on."""
    worlds = identical_drafts([chain(1, 2, 0), chain(0, 1, 2), chain(2)])
    worlds.logits[0, bad] = value
    verdict = worlds.accept(rule)
    assert verdict.paths == [list(range(bad + 1)), [0, 1, 2, 3], [0, 1]]
    assert verdict.tokens[0] == [1, 2, 0][:bad]
    assert list(verdict.errors) == [0]
    assert isinstance(verdict.errors[0], NonFiniteLogitsError)
    assert verdict.tokens[1][:3] == [0, 1, 2]
    assert len(verdict.tokens[1]) == 4
    assert len(verdict.tokens[2]) == 2


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_bad_node_that_is_not_reached_has_no_effect(rule: accept.AcceptanceRule) -> None:
    """The first guess is impossible for the target; behind it everything is NaN."""
    worlds = identical_drafts([chain(1, 2, 0), chain(0, 1, 2)])
    worlds.logits[0, 0, 1] = -math.inf
    worlds.logits[0, 1:] = math.nan
    verdict = worlds.accept(rule)
    assert verdict.paths == [[0], [0, 1, 2, 3]]
    assert verdict.tokens[0][0] in (0, 2, 3)
    assert not verdict.errors


def outcomes(
    draft: Draft, logits: Tensor, batch: Batch, rule: accept.AcceptanceRule
) -> Iterator[tuple[float, Verdict, Tensor | None]]:
    """Every outcome of the acceptance tests: probability, verdict, distribution of the own token,
    None where there is none."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        record: list[tuple[str, Tensor]] = []
        try:
            with scripted(script, record):
                verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, rule)
        except (StopIteration, RuntimeError):
            pending += [[*script, False], [*script, True]]
            continue
        probability = 1.0
        tests = [p for kind, t in record if kind == "test" for p in t.flatten().tolist()]
        for passed, one in zip(script, tests, strict=True):
            probability *= one if passed else 1 - one
        own = [probs[0] for kind, probs in record if kind == "sample"]
        if probability:
            yield probability, verdict, own[-1] / own[-1].sum() if own else None


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("seed", [1, 3, 4, 6])
def test_tokens_before_a_node_without_a_distribution_keep_theirs(
    seed: int, bad: int, rule: accept.AcceptanceRule
) -> None:
    """Enumerated, over every draft and every outcome of the tests."""
    world = World(seed, PLAIN)
    found = [0.0] * VOCAB_SIZE
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=2):
        prefixes = [world.prompt + tokens[:depth] for depth in range(3)]
        probs = torch.stack([world.logits("drafter", one).softmax(-1) for one in prefixes])[None]
        drawn = float(probs[0, 0, tokens[0]] * probs[0, 1, tokens[1]])
        if not drawn:
            continue
        logits = torch.stack([world.logits("target", prefix) for prefix in prefixes])[None]
        logits[0, bad] = math.nan
        draft = dataclasses.replace(Draft.chains([world.prompt[-1]], [tokens]), probs=probs)
        batch = world.batch(world.sequence(), max_depth=2)
        for probability, verdict, own in outcomes(draft, logits, batch, rule):
            if verdict.paths[0] != [0]:
                found[verdict.tokens[0][0]] += drawn * probability
                continue
            assert own is not None
            for token, share in enumerate(own.tolist()):
                found[token] += drawn * probability * share
    assert found == pytest.approx(world.probs(()).tolist(), abs=1e-12)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_point_mass_drafts_end_at_a_node_without_a_distribution(
    params: SamplingParams, lossless: bool, bad: int
) -> None:
    worlds = BatchedWorlds([chain(1, 2), chain(1, 2)], [params] * 2)
    worlds.logits[:] = -math.inf
    for node, token in enumerate((1, 2, 0)):
        worlds.logits[:, node, token] = 0.0  # certain, and what was drafted
    worlds.logits[0, bad] = math.nan
    verdict = worlds.accept(lossless=lossless)
    assert verdict.tokens == [[1, 2][:bad], [1, 2, 0]]
    assert verdict.paths == [list(range(bad + 1)), [0, 1, 2]]
    assert list(verdict.errors) == [0]


@pytest.mark.parametrize("lossless", [True, False])
def test_a_processor_that_failed_elsewhere_is_not_reported_for_a_node(lossless: bool) -> None:
    """Neither at a rejected node of this step nor in the step before."""

    def fails_after_3(ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0, -1] == 3:
            raise RuntimeError("boom")
        return scores

    params = dataclasses.replace(GREEDY, processors=(fails_after_3,))
    worlds = BatchedWorlds([[(3, 0), (1, 0)]], [params])
    worlds.logits[:] = torch.tensor([0.0, 9, 0, 0])  # token 1 is certain
    assert not worlds.accept(lossless=lossless).errors
    worlds.logits[0, 2] = math.nan
    verdict = worlds.accept(lossless=lossless)
    assert verdict.tokens == [[1]]
    assert isinstance(verdict.errors[0], NonFiniteLogitsError)
    worlds.logits[:] = math.nan
    worlds.sequences[0].processor_errors[()] = ProcessorError("of the step before")
    assert isinstance(worlds.accept(lossless=lossless).errors[0], NonFiniteLogitsError)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("sampled", [True, False])
def test_the_error_of_a_failed_processor_is_the_one_reported(
    sampled: bool, rule: accept.AcceptanceRule
) -> None:
    failing = False

    def processor(ids: Tensor, scores: Tensor) -> Any:
        return None if failing else scores

    params = dataclasses.replace(PLAIN, processors=(processor,))
    worlds = BatchedWorlds([chain(1)], [params], sampled=sampled)
    failing = True
    verdict = worlds.accept(rule)
    assert isinstance(verdict.errors[0], ProcessorError)
    assert verdict.tokens == [[]]
