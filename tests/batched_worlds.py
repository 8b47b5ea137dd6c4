"""Several toy worlds in one batch: a sequence, a tree and logits for each, and what the acceptance
rules make of them."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from draftahead.core import tree as trees_of
from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Exact, ForwardOutput, RunningBatch, Verdict
from draftahead.sampling import accept
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    rng_key,
    sample_gumbel,
    step_rng_key,
    target_rng_key,
    uniforms,
)
from draftahead.sampling.processors import probs_of
from toy import PLAIN, VOCAB_SIZE, World

Tree = list[tuple[int, int]]  # (token, parent) of each node below the root


class BatchedWorlds:
    """World b with seed `seed + b`. With `sampled`, the draft has the drafter's distributions."""

    def __init__(
        self,
        trees: list[Tree],
        params: list[SamplingParams],
        *,
        seed: int = 0,
        exact: Exact = "distribution",
        sampled: bool = False,
    ) -> None:
        self.worlds = [World(seed + b, one) for b, one in enumerate(params)]
        self.trees = trees
        self.sequences = [world.sequence() for world in self.worlds]
        for b, sequence in enumerate(self.sequences):
            sequence.rng_key = rng_key(seed, b)
        self.draft = Draft.trees([world.prompt[-1] for world in self.worlds], trees)
        self.paths = [
            trees_of.paths(tokens, parents)[:size]
            for tokens, parents, size in zip(
                self.draft.tokens, self.draft.parents, self.draft.num_nodes, strict=True
            )
        ]
        shape = len(trees), self.draft.width, VOCAB_SIZE
        self.logits = torch.zeros(shape, dtype=torch.float64)
        probs = torch.zeros_like(self.logits)
        for b, world in enumerate(self.worlds):
            for node, path in enumerate(self.paths[b]):
                self.logits[b, node] = world.logits("target", world.prompt + path)
                context = NodeContext(self.sequences[b], path)
                drafter = world.logits("drafter", world.prompt + path)[None]
                probs[b, node] = probs_of(drafter, [context])[0]
        if sampled:
            self.draft = dataclasses.replace(self.draft, probs=probs)
        depths = (9,) * len(trees)
        self.batch = RunningBatch(tuple(self.sequences), depths, exact)

    def accept(
        self,
        rule: accept.AcceptanceRule = "block",
        *,
        lossless: bool = True,
        output: ForwardOutput | None = None,
    ) -> Verdict:
        output = output or ForwardOutput(self.logits)
        return accept.accept(self.draft, output, self.batch, rule, lossless=lossless)[0]

    def target_probs(self, b: int, node: int) -> Tensor:
        """The target's distribution at a node; NaN where its logits are."""
        context = NodeContext(self.sequences[b], self.paths[b][node])
        return probs_of(self.logits[b, node][None], [context])[0]

    def draft_probs(self, b: int, node: int) -> Tensor:
        assert self.draft.probs is not None
        return self.draft.probs[b, node]

    def own_token(self, probs: Tensor, b: int, path: tuple[int, ...]) -> int:
        """What the target's keyed noise samples from a distribution after a path."""
        key = target_rng_key(NodeContext(self.sequences[b], path))
        return int(sample_gumbel(probs[None], [key])[0])

    def uniform(self, b: int, path: tuple[int, ...], index: int = 0) -> float:
        """The random number of an acceptance test after a path."""
        key = step_rng_key(RngStream.ACCEPT, NodeContext(self.sequences[b], path))
        return float(uniforms([key], index + 1)[0, index])


def chain(*tokens: int) -> Tree:
    return [(token, node) for node, token in enumerate(tokens)]


def identical_drafts(trees: list[Tree], seed: int = 0) -> BatchedWorlds:
    """Drafted from the target's own distributions, which are uniform: whatever the random numbers,
    all is accepted."""
    worlds = BatchedWorlds(trees, [PLAIN] * len(trees), seed=seed, sampled=True)
    worlds.logits = torch.zeros_like(worlds.logits)
    probs = worlds.logits.softmax(-1)
    worlds.draft = dataclasses.replace(worlds.draft, probs=probs)
    return worlds


def likely_chains(seed: int, params: list[SamplingParams], longest: int = 4) -> list[Tree]:
    """Of tokens that are mostly possible for target and drafter: some are accepted, some are
    not."""
    random_numbers, found = random.Random(seed), []
    for b, one in enumerate(params):
        world, tokens = World(seed + b, one), []
        length = longest if b == seed % len(params) else random_numbers.randrange(longest + 1)
        for _ in range(length):
            path = tuple(tokens)
            logits = world.logits("drafter", world.prompt + path)[None]
            drafter = probs_of(logits, [NodeContext(world.sequence(), path)])[0]
            both = (world.probs(path) * drafter).tolist()
            if sum(both) == 0 or random_numbers.random() < 0.1:
                both = drafter.tolist()
            tokens += random_numbers.choices(range(VOCAB_SIZE), both)
        found.append(chain(*tokens))
    return found


def random_trees(seed: int, count: int, size: int = 7) -> list[Tree]:
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(0, end, (1,), generator=generator))

    return [
        [(below(VOCAB_SIZE), below(node)) for node in range(1, 1 + max(2, size - 2 * b))]
        for b in range(count)
    ]


def residual_by_hand(p: list[float], q: list[float], weight: float = 1.0) -> list[float]:
    """norm((weight p - q)+) in Python's numbers."""
    left = [max(0.0, weight * a - b) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return [x / total for x in left] if total else p
