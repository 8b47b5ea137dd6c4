"""longrope: a sequence is rotated alike from end to end, by its own length and no other's."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams
from draftahead.models import runner
from drafted import KnowsOutput

THRESHOLD = 24  # tokens beyond which this model takes its second set of frequencies
PROMPTS = zoo.ragged_prompts(4)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("phi3_longrope")


def test_sequences_are_rotated_anew_once_they_outgrow_the_threshold(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deep drafts across the threshold, sequences on both sides of it, and chunked prefill."""
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 5)
    answers = {tuple(prompt): zoo.greedy_by_prefixes(model, prompt, 24) for prompt in PROMPTS}
    llm = LLM(model, drafter=KnowsOutput(answers), max_batch=4)
    outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.acceptance_rate > 0.3 for out in outs)


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]])
def test_a_batch_on_both_sides_of_the_threshold_whose_slots_swap(
    order: list[int], drafter: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each sequence ends the last moves into its slot, with its KV entries and with the
    frequencies that rotated them: it is not rotated again."""
    prompts = [[3, 5, 7], PROMPTS[1] * 3, PROMPTS[1], [8, 9]]
    lengths = [4, 18, 30, 9]
    expected = [zoo.greedy_by_prefixes(model, p, n) for p, n in zip(prompts, lengths, strict=True)]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    llm = LLM(model, drafter, max_batch=3)
    prefilled: list[int] = []
    prefill = runner.ModelRunner.prefill

    def noted(self: Any, slot: int, tokens: Any, **options: Any) -> int:
        prefilled.append(len(tokens))
        return prefill(self, slot, tokens, **options)

    monkeypatch.setattr(runner.ModelRunner, "prefill", noted)
    outs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert [out.token_ids for out in outs] == [expected[i] for i in order]
    # Each prompt once, and once more the one that outgrows the threshold.
    assert sorted(prefilled) == sorted([*(len(prompt) - 1 for prompt in prompts), THRESHOLD])
