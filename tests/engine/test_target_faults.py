"""Logits of the target that are not finite end their own request, not the others."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def test_nan_logits_end_their_own_request_only() -> None:
    target, prompts = zoo.tiny("llama"), zoo.ragged_prompts(3)
    expected = [c.token_ids for c in LLM(target, drafter="none").generate(prompts, GREEDY)]

    def nan_after_five_tokens(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        late = input_ids.shape[1] >= len(prompts[1]) + 5
        return torch.full_like(scores, torch.nan) if late else scores

    broken = SamplingParams(temperature=0, max_tokens=30, processors=[nan_after_five_tokens])
    for drafter in ("none", "lookup"):
        llm = LLM(target, drafter=drafter)
        with pytest.raises(errors.NonFiniteLogitsError) as caught:
            llm.generate(prompts, [GREEDY, broken, GREEDY])
        outs = caught.value.completions
        assert outs is not None
        assert [o.finish_reason for o in outs] == ["length", "error", "length"]
        assert [o.token_ids for o in outs] == [expected[0], expected[1][:5], expected[2]]


@pytest.mark.parametrize("by_backend", [True, False])
def test_nan_in_the_prompt_is_an_error(by_backend: bool) -> None:
    """Also from a token that is only read; and it leaves nothing behind for the next sequence in
    that slot."""
    model = zoo.tiny("llama", dtype=torch.float32)
    nan_token, clean = 50, [3, 5, 7]
    expected = LLM(model, drafter="none").generate(clean, GREEDY)[0].token_ids
    assert nan_token not in expected
    with torch.no_grad():
        model.get_input_embeddings().weight[nan_token] = torch.nan
    llm = LLM(model, drafter="lookup", max_batch=2)
    if not by_backend:
        llm.engine.verifier.runner._decoder = None
    outs = llm.generate([[3, nan_token, 5], clean], GREEDY, errors="return")
    assert isinstance(outs[0].error, errors.NonFiniteLogitsError)
    assert outs[1].token_ids == expected
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, nan_token, 5], GREEDY, reuse=True))
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, nan_token, 5, 9], GREEDY, reuse=True))
    assert llm.generate(clean, GREEDY)[0].token_ids == expected
