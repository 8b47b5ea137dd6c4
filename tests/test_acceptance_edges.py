"""Acceptance rules at their edges, against a plain implementation: ragged batches, impossible
tokens, distributions that are not finite, keys of the noise, and draws made all at once."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, Draft, ForwardOutput, SequenceState
from draftahead.errors import NonFiniteLogitsError, ProcessorError
from draftahead.sampling import accept, processors
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    sample_gumbel,
    step_rng_key,
    target_rng_key,
)
from draftahead.sampling.processors import probs_of
from test_rules import PLAIN, SETTINGS
from toy import VOCABULARY, World, scripted

NAN = float("nan")
GREEDY = SamplingParams(temperature=0, repetition_penalty=1.0)
Tree = list[tuple[int, int]]  # (token, parent) of each node below the root


# ------------------------------------------------------------------------ worlds to verify in


class Batched:
    """Several worlds side by side: one sequence, one tree and one set of logits a row."""

    def __init__(
        self,
        trees: list[Tree],
        params: list[SamplingParams],
        *,
        seed: int = 0,
        exact: Any = "law",
        sampled: bool = False,
    ) -> None:
        self.worlds = [World(seed + row, setting) for row, setting in enumerate(params)]
        self.trees = trees
        self.sequences: list[SequenceState] = []
        for row, world in enumerate(self.worlds):
            self.sequences.append(world.sequence())
            self.sequences[-1].key = noise.rng_key(seed, row)
        self.draft = Draft.trees([world.prompt[-1] for world in self.worlds], trees)
        self.paths = [paths_of(tree) for tree in trees]
        nodes = self.draft.tokens.shape[1]
        self.logits = torch.zeros(len(trees), nodes, VOCABULARY, dtype=torch.float64)
        probs = torch.zeros_like(self.logits)
        for row, world in enumerate(self.worlds):
            for node, path in enumerate(self.paths[row]):
                self.logits[row, node] = world.logits("target", world.prompt + path)
                context = NodeContext(self.sequences[row], path)
                own = world.logits("drafter", world.prompt + path)[None]
                probs[row, node] = probs_of(own, [context])[0]
        if sampled:
            tokens, parents = self.draft.tokens, self.draft.parents
            self.draft = Draft(tokens, parents, self.draft.num_nodes, probs)
        depths = [9] * len(trees)
        sampler = RecordedDraftSampler(self.sequences, depths, VOCABULARY, exact)
        self.batch = Batch(tuple(self.sequences), tuple(depths), sampler, exact)

    def accept(self, rule: accept.AcceptanceRule = "block", *, lossless: bool = True) -> Any:
        return accept.verify(
            self.draft, ForwardOutput(self.logits), self.batch, rule, lossless=lossless
        )

    def probs(self, row: int, node: int) -> Tensor:
        """The target's distribution at a node; NaN where its logits are."""
        context = NodeContext(self.sequences[row], self.paths[row][node])
        return probs_of(self.logits[row, node][None], [context])[0]

    def own(self, probs: Tensor, row: int, path: tuple[int, ...]) -> int:
        """What the target's keyed noise draws from a distribution after a path."""
        return int(
            sample_gumbel(probs[None], [target_rng_key(NodeContext(self.sequences[row], path))])[0]
        )

    def uniform(self, row: int, path: tuple[int, ...], index: int = 0) -> float:
        key = step_rng_key(RngStream.COIN, NodeContext(self.sequences[row], path))
        return float(noise.uniforms([key], index + 1)[0, index])


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in tree:
        paths.append((*paths[parent], token))
    return paths


def chain(*tokens: int) -> Tree:
    return [(token, node) for node, token in enumerate(tokens)]


def likely_chains(seed: int, settings: list[SamplingParams], longest: int = 4) -> list[Tree]:
    """Of tokens that target and drafter both may say, mostly: some are kept, some are not."""
    dice, found = random.Random(seed), []
    for row, setting in enumerate(settings):
        world, tokens = World(seed + row, setting), []
        for _ in range(longest if row == seed % len(settings) else dice.randrange(longest + 1)):
            path = tuple(tokens)
            logits = world.logits("drafter", world.prompt + path)[None]
            own = probs_of(logits, [NodeContext(world.sequence(), path)])[0]
            both = (world.law(path) * own).tolist()
            if sum(both) == 0 or dice.random() < 0.1:
                both = own.tolist()
            tokens += dice.choices(range(VOCABULARY), both)
        found.append(chain(*tokens))
    return found


def random_trees(seed: int, rows: int, size: int = 7) -> list[Tree]:
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(0, end, (1,), generator=generator))

    return [
        [(below(VOCABULARY), below(node)) for node in range(1, 1 + max(2, size - 2 * row))]
        for row in range(rows)
    ]


# ----------------------------------------------------- the formulas, number by number, in Python


def block_by_hand(
    p: list[list[float]], q: list[list[float]], tokens: list[int]
) -> tuple[list[float], list[float]]:
    """h_0..h_n and P_0..P_n of block verification (arXiv 2403.10444), for one chain."""
    weights, keep = [1.0], [1.0]
    for i, token in enumerate(tokens, start=1):
        p_token, q_token = p[i - 1][token], q[i - 1][token]
        ratio = p_token / q_token if q_token else (math.inf if p_token else 0.0)
        weights.append(min(1.0, weights[-1] * ratio) if weights[-1] else 0.0)
        if i == len(tokens):
            keep.append(weights[i])
            continue
        excess = sum(max(0.0, weights[i] * a - b) for a, b in zip(p[i], q[i], strict=True))
        below = excess + 1 - weights[i]
        keep.append(excess / below if below else 1.0)
    return keep, weights


def residual_by_hand(p: list[float], q: list[float], weight: float = 1.0) -> list[float]:
    left = [max(0.0, weight * a - b) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return [x / total for x in left] if total else p


@pytest.mark.parametrize("seed", range(0, 240, 10))
def test_block_verification_of_a_ragged_batch_is_that_of_each_row(seed: int) -> None:
    """Chances, weights, kept prefixes, the own token: row by row, as the paper has it."""
    settings = [*SETTINGS.values(), PLAIN]
    world = Batched(likely_chains(seed, settings), settings, seed=seed, sampled=True)
    assert world.draft.probs is not None
    verdict = world.accept()
    for row, tree in enumerate(world.trees):
        tokens = [token for token, _ in tree]
        p = [world.probs(row, node).tolist() for node in range(len(tokens) + 1)]
        q = [world.draft.probs[row, node].tolist() for node in range(len(tokens))]
        keep, weights = block_by_hand(p, q, tokens)
        path = world.paths[row]
        won = [i for i in range(len(keep)) if i == 0 or world.uniform(row, path[i]) < keep[i]]
        kept = max(won)
        own = p[kept]
        if kept < len(tokens):
            own = residual_by_hand(p[kept], q[kept], weights[kept])
        assert verdict.paths[row] == list(range(kept + 1))
        last = world.own(torch.tensor(own, dtype=torch.float64), row, path[kept])
        assert verdict.tokens[row] == [*tokens[:kept], last]
    assert not verdict.errors


@pytest.mark.parametrize("seed", range(6))
def test_block_chances_and_weights_of_a_ragged_batch(seed: int) -> None:
    """With zeros in both distributions, ratios above one, and chains that end early."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 2, 0]

    def probs(count: int) -> Tensor:
        values = torch.rand(4, count, VOCABULARY, generator=generator, dtype=torch.float64)
        values[torch.rand(values.shape, generator=generator) < 0.3] = 0
        values[..., 1] += 0.05
        return values / values.sum(-1, keepdim=True)

    p, q = probs(4), probs(3)
    p[0, 1], p[0, 0] = q[0, 1], q[0, 0]  # equal ones: nothing is in excess, and all is kept
    tokens = torch.stack([torch.multinomial(row, 1, generator=generator)[:, 0] for row in q])
    keep, weight = accept.block_keep_probabilities(p, q, tokens, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        expected = block_by_hand(p[row].tolist(), q[row].tolist(), tokens[row, :length].tolist())
        assert keep[row, : length + 1].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert weight[row, : length + 1].tolist() == pytest.approx(expected[1], abs=1e-12)
        assert not keep[row, length + 1 :].any()  # beyond its end nothing can be kept
        assert (keep[row] <= 1).all()  # not by a rounding either


def test_a_full_block_chance_is_one_even_after_rounding() -> None:
    """excess / (excess + 1 - weight) is 1 where the weight is, but 0.2 / (0.2 + 1 - 1) is not."""
    assert 0.2 / (0.2 + 1 - 1) > 1
    p = torch.tensor([[[1.0, 0.0], [0.2, 0.8], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]], dtype=torch.float64)
    keep, weight = accept.block_keep_probabilities(p, q, torch.tensor([[0, 1]]), torch.tensor([2]))
    assert weight[0].tolist() == [1, 1, 0.8]
    assert keep[0].tolist() == [1, 1, 0.8]


def test_the_residual_is_what_the_draft_left() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    assert accept.residual(p, q).tolist() == [[1, 0, 0, 0]]
    assert accept.residual(p, p).tolist() == p.tolist()  # by rounding only: never rejected
    at_the_end, inside = torch.tensor([True]), torch.tensor([False])
    weight = torch.tensor([0.5], dtype=torch.float64)
    assert accept.block_residual(p, q, weight, at_the_end).tolist() == p.tolist()
    assert accept.block_residual(p, q, weight, inside).tolist() == [[1, 0, 0, 0]]
    # What the weight leaves is nowhere above the draft's: only rounding leads here.
    low = torch.tensor([0.1], dtype=torch.float64)
    assert accept.block_residual(p, q + 0.1, low, inside).tolist() == p.tolist()
    # Two rows, of which one has nothing left.
    two = accept.residual(p.repeat(2, 1), torch.cat([q, p]))
    assert two.tolist() == [[1, 0, 0, 0], *p.tolist()]


def test_a_tried_sibling_is_taken_out_of_the_drafts_distribution() -> None:
    q = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert accept.without(q, 1).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert q.tolist() == [0.5, 0.25, 0.25, 0]  # the recorded one stays as it is
    certain = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert accept.without(certain, 1).tolist() == [0, 0, 0, 0]  # no NaN
    two = accept.without(torch.stack([q, certain]), 1)
    assert two[0].tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert two[1].tolist() == [0, 0, 0, 0]


def test_the_last_prefix_whose_coin_wins_is_kept() -> None:
    won = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]).bool()
    assert accept.longest_kept(won).tolist() == [2, 0, 3, 1]


def test_a_coin_wins_strictly_below_the_chance() -> None:
    chance = torch.tensor([0.0, 0.5, 0.5, 1.0])
    uniform = torch.tensor([0.0, 0.5, 0.4999, 0.999])
    assert accept.coin(chance, uniform).tolist() == [False, False, True, True]


# --------------------------------------------------------------------- tokens of probability 0


def test_a_token_that_neither_would_say_is_not_accepted() -> None:
    """p = q = 0 at the drafted token: 0/0 is a chance of 0 and not of 1, under each rule."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    for token, chance in ((2, 0.0), (3, 0.0), (0, 1.0), (1, 1.0)):
        q = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
        assert float(accept.accept_probability(p, q, token)[0]) == chance
        both = torch.stack([p, p], 1)
        tokens, lengths = torch.tensor([[token]]), torch.tensor([1])
        keep, weight = accept.block_keep_probabilities(both, q[:, None], tokens, lengths)
        assert keep.tolist() == [[1, chance]]
        assert weight.tolist() == [[1, chance]]
    q = torch.tensor([[0.25, 0.75, 0.0, 0.0]], dtype=torch.float64)
    assert float(accept.accept_probability(p, q, 1)[0]) == pytest.approx(2 / 3)
    assert float(accept.accept_probability(p, q, 0)[0]) == 1


def test_a_token_tried_twice_below_a_node_is_not_accepted_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it was rejected, nothing is left of it in either distribution: 0/0."""
    monkeypatch.setattr(accept, "coin", lambda chance, uniform: chance == 1)
    world = Batched([[(1, 0), (1, 0)]], [PLAIN], sampled=True)
    assert world.draft.probs is not None
    world.logits[0, :] = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    world.draft.probs[0, 0] = torch.tensor([0.25, 0.5, 0.25, 0.0])
    assert world.accept("token").paths == [[0]]


# ------------------------------------------------------- distributions that are not finite


def equal_chains(tokens: list[Tree], seed: int = 0) -> Batched:
    """Drafted from the target's own distributions: whatever the coins, everything is accepted."""
    world = Batched(tokens, [PLAIN] * len(tokens), seed=seed, sampled=True)
    assert world.draft.probs is not None
    likely = torch.zeros_like(world.logits)  # uniform: every token is possible
    world.logits = likely
    world.draft.probs[:] = likely.softmax(-1)
    return world


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_nothing_is_kept_behind_a_node_without_a_distribution(
    bad: int, rule: accept.AcceptanceRule, value: float
) -> None:
    """The node itself can be reached; there the text ends, with an error and no token. Its mates
    go on: one that is longer, one that is shorter."""
    world = equal_chains([chain(1, 2, 0), chain(0, 1, 2), chain(2)])
    world.logits[0, bad] = value
    assert world.draft.probs is not None
    verdict = world.accept(rule)
    assert verdict.paths == [list(range(bad + 1)), [0, 1, 2, 3], [0, 1]]
    assert verdict.tokens[0] == [1, 2, 0][:bad]
    assert list(verdict.errors) == [0]
    assert isinstance(verdict.errors[0], NonFiniteLogitsError)
    assert verdict.tokens[1][:3] == [0, 1, 2]
    assert len(verdict.tokens[1]) == 4
    assert len(verdict.tokens[2]) == 2


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_bad_node_that_is_not_reached_harms_nobody(rule: accept.AcceptanceRule) -> None:
    """The first guess is impossible for the target; behind it everything is NaN."""
    world = equal_chains([chain(1, 2, 0), chain(0, 1, 2)])
    world.logits[0, 0, 1] = -math.inf
    world.logits[0, 1:] = NAN
    verdict = world.accept(rule)
    assert verdict.paths == [[0], [0, 1, 2, 3]]
    assert verdict.tokens[0][0] in (0, 2, 3)
    assert not verdict.errors


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("seed", [1, 3, 4, 6])
def test_tokens_before_a_node_without_a_distribution_keep_theirs(
    seed: int, bad: int, rule: accept.AcceptanceRule
) -> None:
    """Enumerated: every draft, every coin. That a text must end there bends nothing before it."""
    world = World(seed, PLAIN)
    found = [0.0] * VOCABULARY
    for tokens in itertools.product(range(VOCABULARY), repeat=2):
        paths = [world.prompt + tokens[:at] for at in range(3)]
        probs = torch.stack([world.logits("drafter", path).softmax(-1) for path in paths])[None]
        drawn = float(probs[0, 0, tokens[0]] * probs[0, 1, tokens[1]])
        if not drawn:
            continue
        logits = torch.stack([world.logits("target", path) for path in paths])[None]
        logits[0, bad] = NAN
        tree = Draft.trees([world.prompt[-1]], [chain(*tokens)])
        draft = Draft(tree.tokens, tree.parents, tree.num_nodes, probs)
        sequence = world.sequence()
        batch = Batch((sequence,), (2,), RecordedDraftSampler([sequence], [2], VOCABULARY, "law"))
        for chance, verdict, own in outcomes(draft, logits, batch, rule):
            if verdict.paths[0] != [0]:
                found[verdict.tokens[0][0]] += drawn * chance
            else:
                for token, probability in enumerate(own.tolist()):
                    found[token] += drawn * chance * probability
    assert found == pytest.approx(world.law(()).tolist(), abs=1e-12)


def outcomes(
    draft: Draft, logits: Tensor, batch: Batch, rule: accept.AcceptanceRule
) -> Iterator[Any]:
    """Every way the coins can fall: probability, verdict, distribution of the own token."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        record: list[tuple[str, Tensor]] = []
        try:
            with scripted(script, record):
                verdict = accept.verify(draft, ForwardOutput(logits), batch, rule)
        except (StopIteration, RuntimeError):
            pending += [[*script, False], [*script, True]]
            continue
        chance = 1.0
        coins = [c for kind, t in record if kind == "coin" for c in t.flatten().tolist()]
        for won, one in zip(script, coins, strict=True):
            chance *= one if won else 1 - one
        probs = [law[0] for kind, law in record if kind == "draw"]
        if chance:
            yield chance, verdict, probs[-1] / probs[-1].sum() if probs else None


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_certain_guesses_end_at_a_node_without_a_distribution(
    params: SamplingParams, lossless: bool, bad: int
) -> None:
    world = Batched([chain(1, 2), chain(1, 2)], [params] * 2)
    world.logits[:] = -math.inf
    for node, token in enumerate((1, 2, 0)):
        world.logits[:, node, token] = 0.0  # certain, and what was guessed
    world.logits[0, bad] = NAN
    verdict = world.accept(lossless=lossless)
    assert verdict.tokens == [[1, 2][:bad], [1, 2, 0]]
    assert verdict.paths == [list(range(bad + 1)), [0, 1, 2]]
    assert list(verdict.errors) == [0]


def test_the_error_of_a_failed_processor_is_the_one_told() -> None:
    def explodes(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("boom")

    params = SamplingParams(temperature=1.0, repetition_penalty=1.0, processors=[explodes])
    for sampled in (True, False):
        world = Batched([chain(1)], [PLAIN], sampled=sampled)
        world.sequences[0].request.__dict__["sampling"] = params
        world.sequences[0].__dict__.pop("has_processors", None)
        for rule in ("block", "token"):
            verdict = world.accept(rule)  # type: ignore[arg-type]
            assert isinstance(verdict.errors[0], ProcessorError)
            assert verdict.tokens == [[]]


# ----------------------------------------------------------------------------- typical guesses


def test_an_impossible_guess_is_no_typical_one_and_equals_are_decided_by_likelihood() -> None:
    world = Batched([[(1, 0), (2, 0), (0, 2)], [(3, 0)]], [PLAIN] * 2)
    world.logits[:] = -math.inf
    world.logits[0, 0, :3] = torch.tensor([0.2, 0.35, 0.45], dtype=torch.float64).log()
    world.logits[0, 1, 1] = world.logits[0, 3, 1] = 0.0
    world.logits[0, 2, 1] = 0.0  # so token 0 is impossible below node 2
    world.logits[1, 0, 0], world.logits[1, 1, 1] = 0.0, 0.0
    verdict = world.accept(lossless=False)
    assert verdict.paths == [[0, 2], [0]]
    assert verdict.tokens == [[2, 1], [0]]


def test_a_guess_as_likely_as_the_floor_is_not_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "DELTA", 1.0)
    world = Batched([[(1, 0)]], [PLAIN])
    world.logits[:] = -math.inf
    world.logits[0, 0, :2] = 0.0  # two tokens alike: a floor of a half, which is what both have
    world.logits[0, 1, 0] = 0.0
    for most, kept in ((0.5, [0]), (0.49, [0, 1])):
        monkeypatch.setattr(accept, "EPSILON", most)
        assert world.accept(lossless=False).paths == [kept]


# ------------------------------------------------------------------- the keys of all the noise


@pytest.mark.parametrize("rule", ["block", "token"])
def test_no_two_uses_of_noise_share_a_key(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws of the drafter, coins, and the target's own draws of two steps, the second of which
    drafts some positions again. One key used twice would correlate what must be independent; only
    the target's own noise at a position is the same in every step, and used once: when its token
    is emitted."""
    used: list[tuple[str, int]] = []
    stage = ""
    real = processors.uniforms_at

    def noted(keys: Any, ids: Tensor) -> Tensor:
        found = keys.tolist() if isinstance(keys, Tensor) else list(keys)
        used.extend((stage, key) for key in found)
        return real(keys, ids)

    monkeypatch.setattr(processors, "uniforms_at", noted)
    sequences = [World(0, PLAIN).sequence() for _ in range(2)]
    for number, sequence in enumerate(sequences):
        sequence.rng_key = noise.rng_key(number)
    for step in range(2):
        sampler = RecordedDraftSampler(sequences, [2, 2], VOCABULARY, "law")
        stage = f"draft {step}"
        for _ in range(2):
            sampler.draw(torch.zeros(2, VOCABULARY))
        draft = sampler.draft()
        assert draft is not None
        batch = Batch(tuple(sequences), (2, 2), sampler)
        stage = f"accept {step}"
        verdict = accept.verify(draft, ForwardOutput(torch.zeros(2, 3, VOCABULARY)), batch, rule)
        assert all(len(tokens) == 3 for tokens in verdict.tokens)  # equal: all are accepted
        for sequence in sequences:
            sequence.tokens.append(2)  # one token on: the next step drafts a position anew
    here = [NodeContext(sequence, (0,) * at) for sequence in sequences for at in range(4)]
    own = {target_rng_key(context) for context in here}
    keys = [key for _, key in used]
    assert len(set(keys)) == len(keys)
    assert not own & {key for name, key in used if name.startswith("draft")}
    # A block has a coin a node; siblings one a node with children, and one drawn at the leaf.
    assert len(keys) == 2 * 2 * (2 + 3 + 1)


def test_the_own_token_is_drawn_with_the_noise_of_its_position() -> None:
    """Not with that of the root, and not with a coin's: what plain decoding would draw there."""
    for rule in ("block", "token"):
        for seed in range(8):
            world = equal_chains([chain(1, 2), chain(0)], seed=seed)
            verdict = world.accept(rule)  # type: ignore[arg-type]
            for row, path in enumerate([(1, 2), (0,)]):
                own = world.own(torch.full((VOCABULARY,), 0.25), row, path)
                assert verdict.tokens[row] == [*path, own]


@pytest.mark.parametrize("seed", range(8))
def test_siblings_are_tried_in_order_each_with_a_coin_of_its_own(seed: int) -> None:
    """By hand: the coins of a node are the numbers of one key, in the order of its children."""
    trees = random_trees(seed, 3)
    settings = [PLAIN, SETTINGS["penalties"], SETTINGS["truncated"]]
    world = Batched(trees, settings, seed=20 + seed, sampled=True)
    assert world.draft.probs is not None
    verdict = world.accept("token")
    for row, tree in enumerate(trees):
        node, path, said = 0, [0], ()
        while True:
            p, q = world.probs(row, node).tolist(), world.draft.probs[row, node].tolist()
            below = [n for n, (_, parent) in enumerate(tree, start=1) if parent == node]
            for index, child in enumerate(below):
                token = tree[child - 1][0]
                chance = min(1.0, p[token] / q[token]) if q[token] else float(p[token] > 0)
                if world.uniform(row, said, index) < chance:
                    node, path, said = child, [*path, child], (*said, token)
                    break
                p = residual_by_hand(p, q)
                q = [0.0 if i == token else x for i, x in enumerate(q)]
                q = [x / sum(q) for x in q] if sum(q) else q
            else:
                break
        assert verdict.paths[row] == path
        probs = torch.tensor(p, dtype=torch.float64)
        assert verdict.tokens[row] == [*said, world.own(probs, row, said)]


def test_a_chain_is_verified_as_a_block_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("match", "accept_block", "accept_siblings", "accept_typical"):
        monkeypatch.setattr(verify, name, lambda *_, name=name: called.append(name))
    chains = Batched([chain(1, 2), chain(1)], [PLAIN] * 2, sampled=True)
    trees = Batched([[(1, 0), (2, 0)]], [PLAIN], sampled=True)
    certain = Batched([chain(1, 2)], [PLAIN])
    chains.accept("block")
    chains.accept("token")
    trees.accept("block")
    certain.accept("block")
    certain.accept("token")
    certain.accept("block", lossless=False)
    chains.accept("block", lossless=False)  # what was sampled is verified in any case
    siblings = "verify_siblings"
    assert called == [
        *("verify_block", siblings, siblings, "match", "match", "accept_typical", "accept_block")
    ]


# ------------------------------------------------------------- all nodes at once, on a device


class Elsewhere:
    """Logits that say they are on a device: then draws are made for all nodes at once."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.device = SimpleNamespace(type="cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logits, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._logits[index]


TRUNCATED = SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.0)
SETS = {
    "sampled": [PLAIN, TRUNCATED],
    "mixed": [PLAIN, GREEDY],
    "greedy": [GREEDY, GREEDY],
    "penalties": [PLAIN, SETTINGS["penalties"]],
}


@pytest.mark.parametrize("argmax_known", [True, False])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("exact", ["law", "replay"])
def test_draws_of_all_nodes_at_once_are_those_along_the_path(
    exact: str, name: str, argmax_known: bool
) -> None:
    longest = 0
    for seed in range(12):
        world = Batched(random_trees(seed, 2), SETS[name], seed=seed, exact=exact)
        if seed % 3 == 0:
            world.logits[0, seed // 3] = NAN
        best = world.logits.argmax(-1).where(world.logits.isfinite().any(-1), -1)
        scores = ForwardOutput(world.logits, best if argmax_known else None)
        here = accept.verify(world.draft, scores, world.batch)
        there = ForwardOutput(Elsewhere(world.logits), scores.best)  # type: ignore[arg-type]
        at_once = accept.verify(world.draft, there, world.batch)
        one_by_one = world.accept()
        assert here.tokens == at_once.tokens == one_by_one.tokens
        assert here.paths == at_once.paths == one_by_one.paths
        assert here.errors.keys() == at_once.errors.keys() == one_by_one.errors.keys()
        longest = max(longest, *map(len, here.paths))
    assert longest >= 3


def everywhere(world: Batched, *, device: bool, argmax_known: bool) -> bool:
    """Whether the rule draws for all nodes at once."""
    logits: Any = Elsewhere(world.logits) if device else world.logits
    scores = ForwardOutput(logits, world.logits.argmax(-1) if argmax_known else None)
    return accept._drawn_everywhere(world.draft, scores, world.batch) is not None


def test_all_nodes_are_drawn_at_once_only_where_that_saves_waiting() -> None:
    """On a device, or where the argmax is known; never where a draw must stand alone (replay) or
    depends on the path (processors)."""
    trees = random_trees(1, 2)
    for exact in ("law", "replay"):
        for name, params in SETS.items():
            world = Batched(trees, params, exact=exact)
            expected = name == "greedy"
            assert everywhere(world, device=False, argmax_known=True) == expected
            assert not everywhere(world, device=False, argmax_known=False)
            on_device = expected or (exact == "law" and name != "penalties")
            assert everywhere(world, device=True, argmax_known=True) == on_device
            assert everywhere(world, device=True, argmax_known=False) == on_device


@pytest.mark.parametrize("device", [True, False])
def test_replay_draws_every_row_by_itself(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax over several rows need not round as over one: in replay each distribution is
    computed alone, so that mates and guesses cannot change a bit of it."""
    real, rows = processors.probs_of, []

    def noted(logits: Tensor, contexts: Any) -> Tensor:
        rows.append(len(contexts))
        return real(logits, contexts)

    monkeypatch.setattr(processors, "probs_of", noted)
    for exact, largest in (("replay", 1), ("law", 24 if device else 3)):
        rows.clear()
        world = Batched(random_trees(2, 3), [PLAIN, TRUNCATED, PLAIN], exact=exact)
        logits: Any = Elsewhere(world.logits) if device else world.logits
        accept.verify(world.draft, ForwardOutput(logits), world.batch)
        assert max(rows) == largest


def test_tokens_of_padding_are_no_part_of_any_path() -> None:
    """Nodes behind a row's size repeat its root; processors must not count them."""
    world = Batched([chain(1), chain(0, 2, 1)], [SETTINGS["penalties"]] * 2, sampled=True)
    contexts = accept._contexts(world.draft, world.batch)
    assert [context.path for context in contexts] == [
        *((), (1,), (1,), (1,)),
        *((), (0,), (0, 2), (0, 2, 1)),
    ]
    assert [context.sequence for context in contexts] == [
        *[world.sequences[0]] * 4,
        *[world.sequences[1]] * 4,
    ]
    plain = Batched([chain(1), chain(0, 2, 1)], [PLAIN] * 2, sampled=True)
    lengths = [len(context.path) for context in accept._contexts(plain.draft, plain.batch)]
    assert lengths == [0, 1, 1, 1, 0, 1, 2, 3]


def test_the_first_of_equal_guesses_is_the_one_kept() -> None:
    """Two nodes of one parent that hold the same token: the elder has the children."""
    world = Batched([[(1, 0), (1, 0), (2, 1)]], [GREEDY])
    world.logits[:] = -math.inf
    for node, token in enumerate((1, 2, 3, 0)):
        world.logits[0, node, token] = 0.0
    verdict = world.accept()
    assert verdict.paths == [[0, 1, 3]]
    assert verdict.tokens == [[1, 2, 0]]
