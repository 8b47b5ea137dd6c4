"""The distribution after all processors is that of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import ModelProcessors
from draftahead.errors import ProcessorError
from draftahead.sampling.noise import NodeContext
from draftahead.sampling.processors import probs_of, process_logits
from draftahead.sampling.sample import sample_target
from toy import END, PLAIN, World, context_of


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([5, 60, 3000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_probs_equal_transformers(
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, vocab_size, generator=generator, dtype=torch.float64)
    context = context_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    theirs.append(TemperatureLogitsWarper(temperature))
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(MinPLogitsWarper(min_p))
    expected = theirs(torch.tensor([context.sequence.tokens]), logits.clone()).softmax(-1)
    torch.testing.assert_close(probs_of(logits, [context]), expected, rtol=1e-9, atol=1e-12)


def test_each_sequence_of_a_batch_follows_its_own_parameters() -> None:
    """Greedy ones among sampled ones."""
    logits = 2 * torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    contexts = [
        context_of(),
        context_of(temperature=0.0),
        context_of(top_k=3),
        context_of(top_p=0.4, temperature=0.5),
        context_of(min_p=0.2),
    ]
    together = probs_of(logits, contexts)
    for i, context in enumerate(contexts):
        torch.testing.assert_close(together[i], probs_of(logits[i : i + 1], [context])[0])
    assert together[1].max() == 1


def test_penalties_by_hand() -> None:
    """Repetition over prompt and output, the other two over the output alone, counted."""
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.0},
    )
    sequence = World(0, params, prompt=(0, 1)).sequence()
    sequence.tokens += [2, 2]
    found = process_logits(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), [NodeContext(sequence, (1,))])
    # 0: in the prompt. 1: in the prompt, and drafted once. 2: twice in the output. 3: biased.
    assert found.tolist() == [[2.0, -8.0 - 0.75, 2.0 - 1.0, 5.0]]


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 5e-324])
def test_a_temperature_near_zero_leaves_the_largest_logits(temperature: float) -> None:
    """In single precision 90 / 1e-37 is infinite, and 1e-300 is 0."""
    logits = torch.tensor([[90.0, 89.0, 90.0, -90.0]])
    context = context_of(temperature=temperature)
    assert probs_of(logits, [context]).tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    context = context_of(temperature=0.0)
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    assert sample_target(logits, [context])[0].tolist() == [1]
    assert probs_of(logits, [context]).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}]
)
def test_logits_that_allow_no_token_are_reported_and_leave_others_alone(
    params: dict[str, Any], one_by_one: bool
) -> None:
    inf = torch.inf
    logits = torch.tensor(
        [[0.0, torch.nan, 0.0], [inf, 0.0, 0.0], [-inf, -inf, -inf], [0.0, -inf, 0.0]]
    )
    contexts = [context_of(**params) for _ in range(4)]
    probs = probs_of(logits, contexts)
    assert probs[:3].isnan().all()
    assert probs[3].tolist() == ([1, 0, 0] if "temperature" in params else [0.5, 0, 0.5])
    tokens, finite = sample_target(logits, contexts, one_by_one=one_by_one)
    assert finite.tolist() == [False, False, False, True]
    assert tokens.shape == (4,)
    assert int(tokens[3]) in (0, 2)


def test_half_precision_is_computed_in_single_and_double_stays_double() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for dtype, expected in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        probs = probs_of(logits.to(dtype), [context_of()])
        assert probs.dtype == expected
        assert torch.equal(probs, logits.to(dtype).to(expected).softmax(-1))
        biased = process_logits(logits.to(dtype), [context_of(logit_bias={1: 1.0})])
        assert biased.dtype == expected


# ----------------------------------------------------------------------- processors along a path


def logits_after(
    *path: int, output: tuple[int, ...] = (), bad_words: Any = (), **params: Any
) -> list[float]:
    """Logits 0, 1, 2, -3 after the processors, behind the prompt (0, 1), an output and a path."""
    sequence = World(0, dataclasses.replace(PLAIN, **params)).sequence()
    if bad_words:
        request = dataclasses.replace(sequence.request, bad_word_ids=bad_words)
        sequence = dataclasses.replace(sequence, request=request)
    sequence.tokens += output
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    before = logits.clone()
    found: list[float] = process_logits(logits, [NodeContext(sequence, path)])[0].tolist()
    assert torch.equal(logits, before)  # what was given is not written to
    return found


def test_processors_in_the_order_of_transformers() -> None:
    """Bias, repetition, presence and frequency."""
    assert logits_after(logit_bias={0: 5.0, 2: -1.0}) == [5, 1, 1, -3]
    assert logits_after(logit_bias={0: 5.0}, repetition_penalty=2.0) == [2.5, 0.5, 2, -3]
    assert logits_after(3, repetition_penalty=2.0) == [0, 0.5, 2, -6]
    assert logits_after(2, repetition_penalty=0.5) == [0, 2, 4, -3]
    assert logits_after(presence_penalty=0.5) == [0, 1, 2, -3]  # the prompt does not count
    assert logits_after(2, 2, presence_penalty=0.5) == [0, 1, 1.5, -3]
    assert logits_after(2, 2, frequency_penalty=0.5) == [0, 1, 1, -3]
    assert logits_after(2, output=(0, 2), frequency_penalty=0.5) == [-0.5, 1, 1, -3]
    both = {"frequency_penalty": 0.5, "presence_penalty": 1.0}
    assert logits_after(0, 2, **both) == [-1.5, 1, 0.5, -3]
    assert logits_after(2, repetition_penalty=2.0, presence_penalty=1.0) == [0, 0.5, 0, -3]
    assert logits_after(2, presence_penalty=-1.0) == [0, 1, 3, -3]


def test_bad_words_look_back_along_the_path() -> None:
    def banned(words: list[tuple[int, ...]], *path: int, output: tuple[int, ...] = ()) -> list[int]:
        found = logits_after(*path, output=output, bad_words=tuple(words))
        return [token for token, value in enumerate(found) if value == -torch.inf]

    assert banned([(2,)]) == [2]
    assert banned([(2, 3)]) == []
    assert banned([(2, 3)], 2) == [3]
    assert banned([(2, 3)], 2, 0) == []
    assert banned([(2, 3)], output=(2,)) == [3]
    assert banned([(1, 2, 0)], 2) == [0]  # begins in the prompt
    assert banned([(0, 2, 0)], 2) == []
    assert banned([(2, 2, 1)], 2, output=(2,)) == [1]
    assert banned([(0, 0, 0, 0, 0, 1)]) == []  # longer than prompt and output
    assert banned([(0, 1, 3), (2,)]) == [2, 3]


@pytest.mark.parametrize("least", [1, 2, 3])
def test_the_end_is_banned_below_min_tokens(least: int) -> None:
    for path in ((), (0,), (0, 1), (0, 1, 2)):
        found = logits_after(*path, min_tokens=least)
        assert found[END] == (-torch.inf if len(path) < least else -3)
        assert found[:END] == [0, 1, 2]
    found = logits_after(2, output=(0,), min_tokens=least)
    assert found[END] == (-torch.inf if least > 2 else -3)


def test_a_users_processor_gets_tokens_and_path_and_its_dtype_is_converted() -> None:
    seen: list[Any] = []

    def first(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids.tolist(), scores.shape))
        return scores.double() + 1

    def second(ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        return scores * 2

    processors = [first, second]
    assert logits_after(2, 3, output=(1,), processors=processors) == [2, 4, 6, -4]
    assert seen == [([[0, 1, 1, 2, 3]], (1, 4))]


def test_a_processor_that_fails_leaves_its_own_node_without_a_distribution() -> None:
    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("boom")

    def too_narrow(ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, 1:]

    for processor, message in ((fails, "RuntimeError: boom"), (too_narrow, "made [3] out of [4]")):
        contexts = [context_of(), context_of(processors=[processor])]
        found = process_logits(torch.zeros(2, 4), contexts)
        assert found[0].tolist() == [0] * 4
        assert found[1].isnan().all()
        error = contexts[1].sequence.processor_errors[()]
        assert isinstance(error, ProcessorError)
        assert message in str(error)
        assert not contexts[0].sequence.processor_errors


# ------------------------------------------------------ processors of a model's generation_config


def with_processors(params: dict[str, Any], *stages: Any) -> NodeContext:
    """A node behind the prompt (0, 1), with processors of the model at each stage."""
    asked = dataclasses.replace(PLAIN, **params)
    world = World(0, asked, model_processors=ModelProcessors(*stages))
    return NodeContext(world.sequence(), (2,))


def test_processors_of_the_model_stand_between_the_sampling_parameters() -> None:
    """The first after the bias and before the penalties, the others around truncation, on
    log-probabilities."""
    seen: list[list[float]] = []

    def noting(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.tolist() == [[0, 1, 2]]
        seen.append([round(x, 4) for x in scores[0].tolist()])
        return scores.index_add(1, torch.tensor([3]), torch.ones(1, 1, dtype=scores.dtype))

    params = {"logit_bias": {2: 1.0}, "repetition_penalty": 2.0, "temperature": 0.5, "top_k": 2}
    context = with_processors(params, (noting,), (noting,), (noting, noting))
    found = probs_of(torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64), [context])
    # After all logits: [0, 0.5, 1.5, 4], which temperature doubles.
    first = torch.tensor([0.0, 1.0, 3.0, 8.0]).log_softmax(-1)
    second = torch.tensor([-torch.inf, -torch.inf, 3.0, 9.0]).log_softmax(-1)
    third = second + torch.tensor([0.0, 0.0, 0.0, 1.0])
    expected = [[0.0, 1.0, 3.0, 3.0], first.tolist(), second.tolist(), third.tolist()]
    assert seen == [[round(x, 4) for x in row] for row in expected]
    last = torch.tensor([[-torch.inf, -torch.inf, 3.0, 11.0]], dtype=torch.float64)
    torch.testing.assert_close(found, last.softmax(-1))


def test_processors_of_one_sequence_leave_the_others_their_bits() -> None:
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    warped = with_processors({}, (), (TopHLogitsWarper(0.3),), (TypicalLogitsWarper(0.5),))
    found = probs_of(logits, [context_of(), warped])
    assert torch.equal(found[0], probs_of(logits[:1], [context_of()])[0])
    assert (found[1] == 0).any()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_processor_of_the_model_that_fails_ends_its_own_request(stage: int) -> None:
    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("boom")

    stages: list[Any] = [(), (), ()]
    stages[stage] = (fails,)
    failing, other = with_processors({}, *stages), context_of()
    found = probs_of(torch.zeros(2, 4), [failing, other])
    assert found[0].isnan().all()
    assert found[1].tolist() == [0.25] * 4
    assert "RuntimeError: boom" in str(failing.sequence.processor_errors[(2,)])


@pytest.mark.parametrize("logits", [[torch.nan] * 4, [torch.inf] + [0.0] * 3, [-torch.inf] * 4])
def test_logits_that_allow_no_token_are_no_fault_of_a_processor(logits: list[float]) -> None:
    """Some classes raise on NaN."""
    context = with_processors({}, (), (TopHLogitsWarper(0.3),), (EtaLogitsWarper(0.5),))
    assert probs_of(torch.tensor([logits]), [context]).isnan().all()
    assert not context.sequence.processor_errors
