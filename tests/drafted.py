"""Drafters for tests: every registered one, and some that are wrong, unlucky or always right."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, SamplingParams
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.core.types import Request, SequenceState
from draftahead.drafters import registry
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.medusa.heads import MedusaHeads


class Garbage(Drafter):
    """Random chains of random length."""

    def __init__(self, vocab_size: int = zoo.VOCABULARY) -> None:
        self.random = random.Random(0)
        self.vocab_size = vocab_size

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        chains = [
            [self.random.randrange(self.vocab_size) for _ in range(self.random.randrange(9))]
            for _ in batch.sequences
        ]
        return Draft.chains(batch.roots, chains)


class GarbageTree(Garbage):
    """Random trees, of another shape for every sequence."""

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        trees = [
            [
                (self.random.randrange(self.vocab_size), self.random.randrange(node + 1))
                for node in range(self.random.randrange(12))
            ]
            for _ in batch.sequences
        ]
        return Draft.trees(batch.roots, trees)


class KnowsOutput(Drafter):
    """Knows the output of each prompt, and proposes it among wrong siblings: paths are accepted
    deep down, at nodes whose KV entries must be moved."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.random = random.Random(1)

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        trees = []
        for sequence in batch.sequences:
            answer = self.answers[sequence.prompt][sequence.num_generated :][:4]
            tree: list[tuple[int, int]] = []
            parent = 0
            for token in answer:
                others = [token + 1 + self.random.randrange(5) for _ in range(parent % 3)]
                tree += [(other % zoo.VOCABULARY, parent) for other in others]
                tree.append((token, parent))
                parent = len(tree)
            trees.append(tree)
        return Draft.trees(batch.roots, trees)


class ZeroTimer:
    """A timer of a device on which nothing takes time."""

    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.0, 0.0]


class OnDevice(Drafter):
    """Another drafter's trees as a device draft: verified before the host has read it. With
    `corrupts`, one tree of each draft is no valid tree: a token, a parent or the root is wrong."""

    def __init__(self, other: Drafter, *, corrupts: bool, device: str = "cpu") -> None:
        self.other, self.corrupts, self.steps, self.device = other, corrupts, 0, device

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        draft = self.other.propose(batch)
        if not isinstance(draft, Draft) or max(draft.num_nodes) == 1:
            return None
        self.steps += 1
        certain = torch.full_like(draft.token_tensor, CONFIDENCE_SCALE)
        trees = torch.stack([draft.token_tensor, draft.parent_tensor, certain], 1)
        if self.corrupts:
            b, kind = self.steps % len(trees), self.steps % 5
            wrong = [(0, 1, 10**9), (0, 0, 77), (1, -1, 50), (1, 1, -1), (2, 1, -(10**12))]
            part, node, value = wrong[kind]
            trees[b, part, node] = value
        return DeviceDraft.of_trees(batch.roots, trees.to(self.device), ZeroTimer())


def other(target: Any) -> Any:
    """A draft model of the same family with other weights."""
    return zoo.tiny("llama", dtype=target.dtype, seed=1).to(target.device)


def random_heads(target: Any, count: int = 3, tokens: torch.Tensor | None = None) -> MedusaHeads:
    """Untrained Medusa heads that share the target's own output layer."""
    heads = MedusaHeads(target.config.get_text_config().hidden_size, count, draft_to_target=tokens)
    generator = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return heads


def random_head(target: Any) -> EagleHead:
    """An untrained EAGLE head with half of the vocabulary."""
    torch.manual_seed(5)
    return new_head(target, torch.arange(0, zoo.VOCABULARY, 2), aux_layers=(1, 2)).to(target.dtype)


# How each registered drafter is made for a tiny target. A new one must be added here.
REGISTERED: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: "none",
    "lookup": lambda target: {"method": "lookup", "prompt_lookup_min": 1},
    "suffix": lambda target: {"method": "suffix", "num_speculative_tokens": 7},
    "recycle": lambda target: {"method": "recycle", "num_speculative_tokens": 9},
    "auto": lambda target: {"method": "auto", "num_speculative_tokens": 9},
    "draft_model": lambda target: {
        "method": "draft_model",
        "model": other(target),
        "num_speculative_tokens": 4,
    },
    "medusa": lambda target: {
        "method": "medusa",
        "model": random_heads(target),
        "num_speculative_tokens": 3,
    },
    "eagle": lambda target: {
        "method": "eagle",
        "model": random_head(target),
        "num_speculative_tokens": 4,
    },
    "early_exit": lambda target: {
        "method": "early_exit",
        "layers": 2,
        "num_speculative_tokens": 4,
    },
    "layer_skip": lambda target: {
        "method": "layer_skip",
        "skip": [1],
        "num_speculative_tokens": 4,
    },
}
# Adaptive: the policy decides how many nodes are verified.
ADAPTIVE: dict[str, Callable[[Any], Any]] = {
    "suffix_adaptive": lambda target: "suffix",
    "recycle_adaptive": lambda target: "recycle",
    "auto_adaptive": lambda target: "auto",
    "auto_with_model": lambda target: {"method": "auto", "model": other(target)},
    "auto_with_head": lambda target: {"method": "auto", "head": random_head(target)},
    "draft_model_adaptive": lambda target: {"method": "draft_model", "model": other(target)},
    "draft_model_self_adaptive": lambda target: {"method": "draft_model", "model": target},
    "eagle_adaptive": lambda target: {"method": "eagle", "model": random_head(target)},
    "medusa_adaptive": lambda target: {"method": "medusa", "model": random_heads(target)},
    "early_exit_adaptive": lambda target: "early_exit",
    "early_exit_all_layers": lambda target: {"method": "early_exit", "layers": 3},
    "layer_skip_adaptive": lambda target: "layer_skip",
}
SPECIAL: dict[str, Callable[[Any], Any]] = {
    "eagle_tree": lambda target: {"method": "eagle", "model": random_head(target), "tree": 9},
    "medusa_most_confident": lambda target: {
        "method": "medusa",
        "model": random_heads(target),
        "tree": 7,
    },
    "medusa_tree": lambda target: {
        "method": "medusa",
        "model": random_heads(target, 2, torch.arange(0, zoo.VOCABULARY, 3)),
        "tree": [[0], [1], [0, 0], [5], [1, 2]],
    },
    "garbage": lambda target: Garbage(),
    "garbage_tree": lambda target: GarbageTree(),
    "draft_model_self": lambda target: {
        "method": "draft_model",
        "model": target,
        "num_speculative_tokens": 6,
    },
}
ALL = {**REGISTERED, **ADAPTIVE, **SPECIAL}
SAMPLES = ("draft_model", "draft_model_self", "early_exit", "medusa", "eagle")  # by the sampler


def registered_names() -> list[str]:
    return registry.names()


def add_request(llm: LLM, prompt: list[int], params: SamplingParams) -> SequenceState:
    """Queues a prompt in an LLM's engine, as its `stream` does. `params` with `max_tokens`."""
    (sequence,) = llm.engine.add(Request(tuple(prompt), params, seed=params.seed or 0))
    return sequence


def next_batch(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Batch:
    """The batch of the step that an idle LLM runs next for these prompts, KV entries computed;
    without costs, so that drafters do not weigh time."""
    for prompt in prompts:
        add_request(llm, prompt, params)
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    return dataclasses.replace(llm.engine._shown(batch), step_cost=None)


def proposed_tree(llm: LLM, prompt: list[int], params: SamplingParams) -> Draft:
    """The tree that the drafter proposes after a prompt."""
    draft = llm.engine.drafter.propose(next_batch(llm, [prompt], params))
    assert isinstance(draft, Draft)
    return draft


def first_children(draft: Draft, b: int = 0) -> list[int]:
    """Tokens of the path from the root that takes the first child of every node."""
    node, tokens = 0, []
    children = [n for n in range(1, draft.num_nodes[b]) if draft.parents[b][n] == node]
    while children:
        node = children[0]
        tokens.append(draft.tokens[b][node])
        children = [n for n in range(1, draft.num_nodes[b]) if draft.parents[b][n] == node]
    return tokens
