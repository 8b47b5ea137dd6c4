"""A runner fills prompts in chunks, and rotates the beginning of a long sequence like its end."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.models import runner as runners
from draftahead.models.runner import ModelRunner
from llama_shaped import llama_shaped, needs_kernels, runner_of
from runner_checks import assert_close, assert_same_entries, made, noted, text

THRESHOLD = 24  # of phi3_longrope


# ------------------------------------------------------------------------------------ prompts


def test_a_prompt_is_filled_in_chunks_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, whole = made(), made()
    tokens = text(10)
    whole.prefill(1, tokens)
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 4)
    calls = noted(runner, monkeypatch)
    assert runner.prefill(1, tuple(tokens)) == 0
    assert [call.tokens for call in calls] == [[tokens[:4]], [tokens[4:8]], [tokens[8:]]]
    for call, count in zip(calls, (4, 4, 2), strict=True):
        assert call.options == {
            "first_slot": 1, "kv_len": None, "with_logits": False, "num_context_tokens": count,
        }  # fmt: skip
    assert_same_entries(runner, whole, 1)
    calls.clear()
    assert runner.prefill(1, [*tokens[:7], 3, 4]) == 7
    assert [call.tokens for call in calls] == [[[3, 4]]]
    assert runner.cache.tokens_in[1] == [*tokens[:7], 3, 4]


def test_chunks_cut_by_position_reuse_nothing_and_are_padded_by_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, plain, tokens = made(), made(), text(10)
    plain.prefill(0, tokens)
    for _ in range(2):
        with monkeypatch.context() as patch:
            calls = noted(runner, patch)
            assert runner.prefill(0, tokens, chunk=4, kv_len=32) == 0
        last = [*tokens[8:], 0, 0]
        assert [call.tokens for call in calls] == [[tokens[:4]], [tokens[4:8]], [last]]
        assert [call.options["kv_len"] for call in calls] == [32] * 3
        assert [call.options["num_context_tokens"] for call in calls] == [4, 4, 2]
    assert_same_entries(runner, plain, 0)


@pytest.mark.parametrize(
    ("limit", "lengths", "widths"),
    [
        (8, (3, 9, 5), [2, 2, 2, 2, 1]),
        (2, (3, 2, 1), [1, 1, 1]),
        (99, (3, 9, 5), [4, 4, 1]),
        (8, (4, 4), [4]),
    ],
)
def test_several_prompts_are_filled_in_one_forward(
    limit: int, lengths: tuple[int, ...], widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk at most, and of so many tokens in all; padding is no context."""
    runner, alone = made(), made()
    prompts = [text(length, seed) for seed, length in enumerate(lengths)]
    for slot, prompt in enumerate(prompts, start=1):
        alone.prefill(slot, prompt)
        runner.cache.tokens_in[slot] = [5, 5, 5]
    runner.cache.tokens_in[0] = [7]
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(runners, "PREFILL_TOKENS", limit)
    calls = noted(runner, monkeypatch)
    runner.prefill_slots(1, [tuple(prompt) for prompt in prompts])
    assert runner.cache.tokens_in[0] == [7]
    start = 0
    for call, width in zip(calls, widths, strict=True):
        parts = [prompt[start : start + width] for prompt in prompts]
        assert call.tokens == [part + [0] * (width - len(part)) for part in parts]
        assert call.options["num_context_tokens"] == list(map(len, parts))
        assert call.options["first_slot"] == 1 and call.options["with_logits"] is False
        start += width
    for slot in range(1, 1 + len(prompts)):
        assert_same_entries(runner, alone, slot)


@pytest.mark.parametrize("name", ["llama", "phi3_longrope", "kernels"])
def test_prompts_that_are_filled_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single one, several with longrope, and where that costs nothing."""
    runner = runner_of(llama_shaped("llama"), 4) if name == "kernels" else made(name)
    prompts = [text(7, 1)] if name == "llama" else [text(7, 1), text(3, 2)]
    calls = noted(runner, monkeypatch)
    if name == "kernels" and not runner.batch_invariant:
        pytest.skip("no compiler")
    for _ in range(2):  # reusing nothing
        calls.clear()
        runner.prefill_slots(1, prompts)
        assert [call.tokens for call in calls] == [[prompt] for prompt in prompts]
        counts = [call.options["num_context_tokens"] for call in calls]
        assert counts == list(map(len, prompts))  # one number each, as backends take it
        assert runner.cache.tokens_in[1 : 1 + len(prompts)] == prompts


@needs_kernels
def test_the_kernels_fill_a_prompt_by_their_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(llama_shaped("llama"), max_batch=1, max_context=None, scratch_entries=16)
    calls = noted(runner, monkeypatch)
    runner.prefill(0, text(NODES_PER_CALL + 3))
    assert [len(call.tokens[0]) for call in calls] == [NODES_PER_CALL, 3]


# ------------------------------------------------------------------------------------ longrope


def test_a_slots_frequencies_follow_the_length_with_its_root() -> None:
    runner = made("phi3_longrope")
    assert runner.long_rope_threshold == THRESHOLD
    tokens = text(40)
    for length, is_long, reused in ((22, False, 0), (23, False, 22), (24, True, 0), (30, True, 24)):
        assert runner.prefill(1, tokens[:length]) == reused
        assert runner.cache.long_rope == [False, is_long, False, False]
        assert runner.is_long_rope(length + 1) == is_long
    assert not made().is_long_rope(10**6)


@torch.no_grad()
def test_the_beginning_of_a_long_sequence_is_rotated_like_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, whole, tokens = made("phi3_longrope"), made("phi3_longrope"), text(40)
    whole.prefill(0, tokens)
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 8)
    runner.prefill(0, tokens)
    assert_same_entries(runner, whole, 0)
    # Logits, of chains and trees, and that of the dummy token is not among them.
    expected = whole.model(torch.tensor([tokens])).logits
    for count in (1, 10, 23, 24, 25, 40):
        fresh = made("phi3_longrope", max_batch=1)
        fresh.cache.long_rope[0] = True
        nodes = torch.tensor([tokens[:count]])
        chain = torch.arange(count)[None] - 1
        for parents in (None, chain):
            for kv_len in (None, 60):
                found = fresh.forward(nodes, parents=parents, kv_len=kv_len).logits
                assert_close(found, expected[:, :count])
        found = fresh.forward(
            torch.tensor([[tokens[0], 9, tokens[1]]]), parents=torch.tensor([[-1, 0, 0]])
        ).logits
        assert_close(found[:, [0, 2]], expected[:, :2])


@torch.no_grad()
def test_padding_does_not_change_the_frequencies_of_a_short_sequence() -> None:
    runner, tokens = made("phi3_longrope", max_batch=1), text(THRESHOLD)
    expected = runner.model(torch.tensor([tokens])).logits
    runner.prefill(0, tokens[:20])
    found = runner.forward(torch.tensor([tokens[20:] + [0] * 5])).logits
    assert_close(found[:, :4], expected[:, 20:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "phi3_longrope"])
def test_the_last_position_of_a_model_is_used_and_none_behind(name: str) -> None:
    runner = made(name, max_batch=1)
    tokens = text(zoo.POSITIONS)
    expected = runner.model(torch.tensor([tokens])).logits
    runner.prefill(0, tokens[:-3])
    found = runner.forward(torch.tensor([tokens[-3:] + [0] * 5])).logits
    assert_close(found[:, :3], expected[:, -3:])
