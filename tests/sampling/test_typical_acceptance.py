"""Typical acceptance is not lossless: it is used only where it is asked for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import zoo
from batched_worlds import BatchedWorlds, likely_chains
from draftahead import LLM, Draft, SamplingParams, errors
from draftahead.core.types import ForwardOutput
from draftahead.sampling import accept
from draftahead.sampling.noise import NodeContext, sample_gumbel, target_rng_key
from drafted import REGISTERED, GarbageTree, KnowsOutput
from toy import PARAMS, PLAIN, VOCAB_SIZE, World

SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def random_tree(seed: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(0, end, (1,), generator=generator))

    return [(below(VOCAB_SIZE), below(node)) for node in range(1, 10)]


def longest_typical_path(world: World, paths: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest path of which every token is likelier than min(0.09, 0.3 exp(-entropy)); of
    equals the most likely."""
    best, best_value = (), (0, 1.0)
    for path in paths:
        likelihoods = []
        for depth, token in enumerate(path):
            probs = world.probs(path[:depth]).tolist()
            entropy = -sum(p * math.log(p) for p in probs if p)
            if not probs[token] > min(0.09, 0.3 * math.exp(-entropy)):
                break
            likelihoods.append(probs[token])
        else:
            value = (len(path), math.prod(likelihoods))
            if value > best_value:
                best, best_value = path, value
    return best


@pytest.mark.parametrize("params", PARAMS)
def test_rule_is_that_of_medusa(params: str) -> None:
    """By hand, over many trees of two sequences; then the target's own token."""
    unlike_matching = 0
    for seed in range(12):
        world = World(seed, PARAMS[params])
        sequences = (world.sequence(), world.sequence())
        trees = [random_tree(seed), random_tree(seed + 100)[: seed % 10]]
        draft = Draft.trees([world.prompt[-1]] * 2, trees)
        paths: list[list[tuple[int, ...]]] = []
        logits = torch.zeros(2, draft.width, VOCAB_SIZE, dtype=torch.float64)
        for b, tree in enumerate(trees):
            paths.append([()])
            for token, parent in tree:
                paths[b].append((*paths[b][parent], token))
            for node, path in enumerate(paths[b]):
                logits[b, node] = world.logits("target", world.prompt + path)
        batch = world.batch(*sequences)
        verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, lossless=False)
        matching, _ = accept.accept(draft, ForwardOutput(logits), batch)
        for b, sequence in enumerate(sequences):
            best = longest_typical_path(world, paths[b])
            key = target_rng_key(NodeContext(sequence, best))
            own = int(sample_gumbel(world.probs(best)[None], [key])[0])
            assert verdict.tokens[b] == [*best, own]
            assert paths[b][verdict.paths[b][-1]] == best
            unlike_matching += matching.tokens[b] != verdict.tokens[b]
    assert unlike_matching  # it is another rule than matching


def test_threshold_falls_with_entropy_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4])
    expected = torch.tensor([0.09, 0.09, 0.3 / 4])
    torch.testing.assert_close(accept.typical_threshold(probs), expected)
    monkeypatch.setattr(accept, "POSTERIOR_THRESHOLD", 1.0)
    torch.testing.assert_close(accept.typical_threshold(probs), 0.3 / torch.tensor([1.0, 2, 4]))


def test_greedy_output_stays_exact(target: Any) -> None:
    """A one-hot distribution has one typical token."""
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(target, p, 30) for p in prompts}
    for drafter in (GarbageTree(), KnowsOutput(answers)):
        outs = LLM(target, drafter, lossless=False).generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3.5 for out in outs)


def test_sampled_output_follows_the_drafter(target: Any) -> None:
    """Drafted tokens that the target did not sample are accepted; completions say so."""
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(target, p, 30) for p in prompts}
    exact, typical = (
        LLM(target, KnowsOutput(answers), lossless=lossless).generate(prompts, SAMPLED)
        for lossless in (True, False)
    )
    assert [out.token_ids for out in exact] != [out.token_ids for out in typical]
    assert all(out.lossless for out in exact)
    assert not any(out.lossless for out in typical)
    accepted = [sum(out.stats.accepted for out in outs) for outs in (exact, typical)]
    assert accepted[1] > 2 * accepted[0]


@pytest.mark.parametrize("seed", range(6))
def test_sampled_chains_are_accepted_by_the_same_rule(seed: int) -> None:
    """The distribution that the draft was drawn from plays no part."""
    params = list(PARAMS.values())
    worlds = BatchedWorlds(likely_chains(seed, params), params, seed=seed, sampled=True)
    sampled = worlds.accept(lossless=False)
    worlds.draft = dataclasses.replace(worlds.draft, probs=None)
    assert worlds.accept(lossless=False) == sampled


def test_more_tokens_of_a_sampling_drafter_are_accepted(target: Any) -> None:
    config = REGISTERED["draft_model"](target)
    exact, typical = (
        LLM(target, config, lossless=lossless).generate(zoo.ragged_prompts(3), SAMPLED)
        for lossless in (True, False)
    )
    assert all(len(out.token_ids) == 30 for out in typical)
    rates = [sum(o.stats.accepted for o in outs) for outs in (exact, typical)]
    steps = [sum(o.stats.steps for o in outs) for outs in (exact, typical)]
    assert rates[1] / steps[1] > 1.2 * rates[0] / steps[0]


def test_it_is_used_only_with_lossless_false(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = accept.accept_typical
    monkeypatch.setattr(accept, "accept_typical", lambda *args: calls.append(args) or real(*args))
    for exact in ("distribution", "replay"):
        LLM(target, GarbageTree(), exact=exact).generate(zoo.ragged_prompts(2), SAMPLED)
    LLM(target, GarbageTree()).with_drafter(GarbageTree(), max_batch=1).generate([1, 2], SAMPLED)
    assert not calls
    LLM(target, GarbageTree(), lossless=False).generate(zoo.ragged_prompts(2), SAMPLED)
    assert calls
    with pytest.raises(errors.ConfigError, match="exclude each other"):
        LLM(target, lossless=False, exact="replay")
    with pytest.raises(errors.ConfigError, match="no option 'lossless'"):
        LLM(target, {"method": "suffix", "lossless": False})


def test_logits_that_are_not_finite_end_the_sequence() -> None:
    world = World(1, PARAMS["plain"])
    draft = Draft.chains([1], [[2, 3]])
    logits = torch.full((1, 3, VOCAB_SIZE), torch.nan)
    batch = world.batch(world.sequence())
    verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, lossless=False)
    assert verdict.tokens == [[]]
    assert isinstance(verdict.errors[0], errors.NonFiniteLogitsError)


def test_an_impossible_token_is_not_typical_and_of_equals_the_likeliest_path_is_taken() -> None:
    worlds = BatchedWorlds([[(1, 0), (2, 0), (0, 2)], [(3, 0)]], [PLAIN] * 2)
    worlds.logits[:] = -math.inf
    worlds.logits[0, 0, :3] = torch.tensor([0.2, 0.35, 0.45], dtype=torch.float64).log()
    worlds.logits[0, 1, 1] = worlds.logits[0, 3, 1] = 0.0
    worlds.logits[0, 2, 1] = 0.0  # so token 0 is impossible below node 2
    worlds.logits[1, 0, 0], worlds.logits[1, 1, 1] = 0.0, 0.0
    verdict = worlds.accept(lossless=False)
    assert verdict.paths == [[0, 2], [0]]
    assert verdict.tokens == [[2, 1], [0]]


def test_a_token_must_exceed_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "POSTERIOR_ALPHA", 1.0)
    worlds = BatchedWorlds([[(1, 0)]], [PLAIN])
    worlds.logits[:] = -math.inf
    worlds.logits[0, 0, :2] = 0.0  # two tokens alike: a threshold of a half, as likely as both
    worlds.logits[0, 1, 0] = 0.0
    for most, path in ((0.5, [0]), (0.49, [0, 1])):
        monkeypatch.setattr(accept, "POSTERIOR_THRESHOLD", most)
        assert worlds.accept(lossless=False).paths == [path]


def test_explain_begins_with_it(target: Any) -> None:
    llm = LLM(target, "suffix", lossless=False)
    llm.generate([1, 2, 3], SAMPLED)
    assert llm.explain()[0].startswith("not lossless")
    assert not any("lossless" in reason for reason in LLM(target, "suffix").explain())
