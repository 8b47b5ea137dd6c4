"""Runners of tiny models, their forwards noted, and their caches compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead.backends.base import CacheSlice
from draftahead.core.types import ForwardOutput
from draftahead.models.runner import ModelRunner


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, zoo.VOCABULARY, (length,), generator=generator).tolist()


def made(name: str = "llama", **options: Any) -> ModelRunner:
    options = {"max_batch": 4, "max_context": None, "scratch_entries": 16} | options
    return ModelRunner(zoo.tiny(name), **options)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def assert_same_entries(one: ModelRunner, other: ModelRunner, slot: int) -> None:
    assert one.cache.tokens_in[slot] == other.cache.tokens_in[slot]
    length = len(one.cache.tokens_in[slot])
    for here, there in zip(one.cache.tensors(), other.cache.tensors(), strict=True):
        assert_close(here[:, slot, :, :length], there[:, slot, :, :length])


@dataclasses.dataclass
class Call:
    tokens: list[list[int]]
    options: dict[str, Any]


def noted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The forwards of a runner from now on."""
    forward, calls = runner.forward, list[Call]()

    def note(tokens: Tensor, **options: Any) -> ForwardOutput:
        calls.append(Call(tokens.tolist(), options))
        return forward(tokens, **options)

    monkeypatch.setattr(runner, "forward", note)
    return calls


class NotingBackend:
    """A backend that notes what it is asked, and answers what it is told."""

    batch_invariant, supports_device_drafts, tolerance = False, True, 0.1

    def __init__(self, most: tuple[int, int] = (99, 99)) -> None:
        self.most = most
        self.asked: list[tuple[int, int, bool]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.aux_layers: tuple[int, ...] = ()
        self.answers, self.more = True, True

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        self.aux_layers = aux_layers

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        self.asked.append((num_sequences, num_nodes, with_logits))
        return num_sequences <= self.most[0] and num_nodes <= self.most[1]

    def forward(
        self, tokens: Tensor, num_cached: Any, parents: Any, *, cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:  # fmt: skip
        self.calls.append((tokens.tolist(), num_cached, parents, cache_slice, with_logits))
        if not self.answers:
            return None
        batch, nodes = tokens.shape
        logits = torch.arange(batch * nodes * 5.0).view(batch, nodes, 5)
        if not self.more:
            return ForwardOutput(logits)
        return ForwardOutput(logits, logits[:, :, 0] + 1, logits[:, :, :4] + 2)
