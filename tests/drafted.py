"""Drafters for tests: every registered one, and some that no one should write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import zoo
from draftahead import Batch, Draft, Drafter
from draftahead.drafters import registry
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.medusa.heads import MedusaHeads


class Garbage(Drafter):
    """Random chains of random length."""

    def __init__(self, vocabulary: int = zoo.VOCABULARY) -> None:
        self.random = random.Random(0)
        self.vocabulary = vocabulary

    def propose(self, batch: Batch) -> Draft | None:
        rows = [
            [self.random.randrange(self.vocabulary) for _ in range(self.random.randrange(9))]
            for _ in batch.sequences
        ]
        return Draft.chains(batch.roots, rows)


class GarbageTree(Garbage):
    """Random trees, of another shape in every row."""

    def propose(self, batch: Batch) -> Draft | None:
        trees = [
            [
                (self.random.randrange(self.vocabulary), self.random.randrange(node + 1))
                for node in range(self.random.randrange(12))
            ]
            for _ in batch.sequences
        ]
        return Draft.trees(batch.roots, trees)


class Clairvoyant(Drafter):
    """Knows the answers, and hides each in a bushy tree of wrong guesses: paths that are
    accepted deep down, out of the order of slots."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.random = random.Random(1)

    def propose(self, batch: Batch) -> Draft | None:
        trees = []
        for sequence in batch.sequences:
            answer = self.answers[sequence.request.prompt][sequence.num_generated :][:4]
            tree: list[tuple[int, int]] = []
            at = 0
            for token in answer:
                others = [token + 1 + self.random.randrange(5) for _ in range(at % 3)]
                tree += [(other % zoo.VOCABULARY, at) for other in others]
                tree.append((token, at))
                at = len(tree)
            trees.append(tree)
        return Draft.trees(batch.roots, trees)


def other(target: Any) -> Any:
    """A draft model of the same family with other weights."""
    return zoo.tiny("llama", dtype=target.dtype, seed=1).to(target.device)


def random_heads(target: Any, count: int = 3, tokens: torch.Tensor | None = None) -> MedusaHeads:
    """Medusa heads that share the target's own and know nothing."""
    heads = MedusaHeads(target.config.get_text_config().hidden_size, count, tokens=tokens)
    generator = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return heads


def random_head(target: Any) -> EagleHead:
    """An EAGLE head that knows nothing, with half of the vocabulary."""
    torch.manual_seed(5)
    return new_head(target, torch.arange(0, zoo.VOCABULARY, 2), depths=(1, 2)).to(target.dtype)


# How each registered drafter is made for a tiny target. A new one must be added here.
REGISTERED: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: "none",
    "lookup": lambda target: {"method": "lookup", "prompt_lookup_min": 1},
    "suffix": lambda target: {"method": "suffix", "num_speculative_tokens": 7},
    "recycle": lambda target: {"method": "recycle", "num_speculative_tokens": 9},
    "auto": lambda target: {"method": "auto", "num_speculative_tokens": 9},
    # A draft of the same family but other weights, and one that is the target itself.
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
SPECIAL: dict[str, Callable[[Any], Any]] = {
    "suffix_guided": lambda target: "suffix",  # the policy decides how much is scored
    "recycle_guided": lambda target: "recycle",
    "auto_guided": lambda target: "auto",
    "auto_with_model": lambda target: {
        "method": "auto",
        "model": other(target),
    },
    "draft_model_guided": lambda target: {
        "method": "draft_model",
        "model": other(target),
    },
    "draft_model_self_guided": lambda target: {"method": "draft_model", "model": target},
    "eagle_guided": lambda target: {"method": "eagle", "model": random_head(target)},
    "eagle_tree": lambda target: {"method": "eagle", "model": random_head(target), "tree": 9},
    "auto_eagle": lambda target: {"method": "auto", "head": random_head(target)},
    "medusa_guided": lambda target: {"method": "medusa", "model": random_heads(target)},
    "medusa_likeliest": lambda target: {
        "method": "medusa",
        "model": random_heads(target),
        "tree": 7,
    },
    "medusa_tree": lambda target: {
        "method": "medusa",
        "model": random_heads(target, 2, torch.arange(0, zoo.VOCABULARY, 3)),
        "tree": [[0], [1], [0, 0], [5], [1, 2]],
    },
    "early_exit_guided": lambda target: "early_exit",
    "early_exit_all": lambda target: {"method": "early_exit", "layers": 3},
    "layer_skip_guided": lambda target: "layer_skip",
    "garbage": lambda target: Garbage(),
    "garbage_tree": lambda target: GarbageTree(),
    "draft_model_self": lambda target: {
        "method": "draft_model",
        "model": target,
        "num_speculative_tokens": 6,
    },
}
ALL = {**REGISTERED, **SPECIAL}
DRAWN = ("draft_model", "draft_model_self", "early_exit", "medusa", "eagle")  # sample their guesses


def registered_names() -> list[str]:
    return registry.names()
