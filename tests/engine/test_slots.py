"""Slots between requests: what a prompt reuses of an earlier one, and that nothing else is left."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, Completion, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def streamed(llm: LLM, prompt: list[int]) -> Completion:
    stream: Any = llm.stream(prompt, GREEDY, reuse=True)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            completion: Completion = end.value
            return completion


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3_longrope"])
def test_a_prompt_that_differs_from_an_earlier_one_midway(name: str) -> None:
    """Reused is what both begin with, and not a token more."""
    model = zoo.tiny(name)
    base = zoo.ragged_prompts(3)[1]
    llm = LLM(model, "lookup", max_batch=2)
    fresh = LLM(model, "none", max_batch=1)
    whole = base + streamed(llm, base).token_ids
    for at in (len(base) + 6, len(base) - 1, 5, 0):
        other = (whole[at] + 1) % zoo.VOCABULARY
        for rest in ([], [4, 9, 11]):
            prompt = [*whole[:at], other, *rest]
            if len(prompt) < 2:
                continue
            streamed(llm, base)  # so that there is one to differ from
            out = streamed(llm, prompt)
            assert out.token_ids == fresh.generate([prompt], GREEDY)[0].token_ids
            if name != "phi3_longrope":
                assert out.stats.reused_tokens == min(at, len(prompt) - 1)
