"""The kernels name the most likely tokens: as torch does, of equals the first, of NaN none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftahead.backends.cpu.abi import TOPK
from draftahead.models.runner import ModelRunner
from llama_shaped import needs_kernels, plain_llama, runner_of

pytestmark = needs_kernels
TOKENS = torch.tensor([[5, 6, 7]])
# Vocabularies that fill the blocks of the kernels, and that leave a rest of every kind.
SIZES = [97, 256, 531, 700]


class Head:
    """A model whose LM head the tests change."""

    def __init__(self, vocab_size: int) -> None:
        model = plain_llama(vocab_size)
        self.runner: ModelRunner = runner_of(model)
        assert self.runner.batch_invariant
        self.weight: Tensor = model.lm_head.weight
        self.original = self.weight.clone()

    def forward(self) -> tuple[Tensor, list[list[int]]]:
        """Logits [N, V] and the most likely tokens of each node."""
        output = self.runner.forward(TOKENS)
        assert output.topk is not None
        assert output.argmax is not None
        assert torch.equal(output.argmax, output.topk[..., 0])
        return output.logits[0].clone(), output.topk[0].tolist()

    def restore(self) -> None:
        self.weight.copy_(self.original)


@pytest.fixture(params=SIZES)
def head(request: pytest.FixtureRequest) -> Head:
    return Head(request.param)


def places(head: Head) -> list[int]:
    """Tokens at the ends, and in blocks between."""
    last = len(head.weight) - 1
    return [*range(0, last + 1, 29), last, last - 1, last - 2]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_most_likely_tokens_of_a_batch_are_those_of_torch(vocab_size: int) -> None:
    runner = runner_of(plain_llama(vocab_size), max_batch=2)
    tokens = torch.randint(0, vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    output = runner.forward(tokens)
    assert output.topk is not None
    assert output.argmax is not None
    assert torch.equal(output.topk, output.logits.topk(TOPK).indices)
    assert torch.equal(output.argmax, output.logits.argmax(-1))


@pytest.mark.parametrize("count", [2, 4, 5, 7])
def test_of_equal_logits_the_first_tokens_are_named_in_order(head: Head, count: int) -> None:
    last = len(head.weight) - 1
    equal = [1, 17, 55, last, last // 2, 40, last - 1][:count]
    head.weight.copy_(head.original * 0.01)
    head.weight[equal] = head.original[0] * 100  # far from the others, above or below
    logits, named = head.forward()
    checked = 0
    for row, tokens in zip(logits, named, strict=True):
        if row[equal[0]] > 0:
            assert tokens[: min(count, TOPK)] == sorted(equal)[:TOPK]
            checked += 1
    assert checked


def test_each_most_likely_token_alone_in_its_block(head: Head) -> None:
    last, checked = len(head.weight) - 1, 0
    head.weight.zero_()
    for rank, token in enumerate((last, 3, last // 2, 30)):
        head.weight[token] = head.original[0] * (8 - rank)
    logits, named = head.forward()
    for row, tokens in zip(logits, named, strict=True):
        if row.max() > 0:
            assert tokens == row.topk(TOPK).indices.tolist()
            checked += 1
    assert checked


def test_the_argmax_of_nan_logits_is_undefined(head: Head) -> None:
    for token in places(head):
        head.weight[token] = torch.nan
        assert [tokens[0] for tokens in head.forward()[1]] == [-1] * 3
        head.restore()


def test_the_argmax_of_infinite_logits_is_undefined(head: Head) -> None:
    """Of positive ones; a token whose logit is -inf is just never named."""
    for token in places(head):
        head.weight[token] = 0.0
        head.weight[token, 0] = torch.inf  # the logit's sign is that of one number
        logits, named = head.forward()
        assert logits[:, token].isinf().all()
        for row, tokens in zip(logits, named, strict=True):
            assert (tokens[0] == -1) == (row[token] > 0)
            assert tokens[0] != token
        head.restore()
    head.weight.zero_()
    head.weight[:, 0] = torch.inf  # all of them, positive or negative
    assert [tokens[0] for tokens in head.forward()[1]] == [-1] * 3
