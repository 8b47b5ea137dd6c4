"""exact="replay": the tokens are a function of seed and prompt alone, on real kernels too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.bench.prompts import load_prompts
from draftahead.models import verifier as target_module
from draftahead.models.runner import ModelRunner
from drafted import Garbage, GarbageTree

WARM = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20, seed=7)


def test_self_test_refuses_kernels_that_mind_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass whose results depend on a node's place, by one bit of one logit."""
    real = ModelRunner.run

    def uneven(self: ModelRunner, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits = real(self, tokens, **kwargs).clone()
        if logits.shape[1] > 3:
            logits[:, 3, 0] = torch.nextafter(logits[:, 3, 0], torch.tensor(torch.inf).to(logits))
        return logits

    monkeypatch.setattr(ModelRunner, "forward", uneven)
    with pytest.raises(errors.ReplayUnsupportedError, match="use exact='law'"):
        LLM(zoo.tiny("llama"), exact="replay")
    monkeypatch.undo()
    llm = LLM(zoo.tiny("llama"), exact="replay")
    assert len(llm.generate([1, 2, 3], WARM)[0].token_ids) == 20


def test_every_pass_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain or drafted, alone or with mates: rows, nodes and slots of a request's passes."""
    model = zoo.tiny("llama")
    real, shapes = ModelRunner.run, set()

    def noting(self: ModelRunner, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.add((tuple(tokens.shape), kwargs["live"]))
        return real(self, tokens, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    for drafter in ("none", Garbage(), GarbageTree()):
        LLM(model, drafter=drafter, exact="replay").generate(zoo.ragged_prompts(3), WARM)
    assert shapes == {
        ((1, target_module.REPLAY_ROWS), 256),
        ((1, target_module.REPLAY_CHUNK), 256),
    }


@pytest.mark.model
def test_replay_on_the_embedded_model(smollm2: tuple[Any, Any]) -> None:
    """Here one row of a matrix product is not row 0 of eight, so padding is what holds it."""
    model, tokenizer = smollm2
    prompts = [p for p in load_prompts() if p.task in ("summary", "code_edit")][::10]
    asked = [[{"role": "user", "content": p.turns[0][:300]}] for p in prompts]
    sampling = SamplingParams(temperature=0.8, max_tokens=12, seed=7, logprobs=0, raw_logprobs=True)

    def texts(drafter: Any, group: list[Any]) -> list[Any]:
        llm = LLM(model, drafter, tokenizer=tokenizer, exact="replay", max_batch=2, max_context=384)
        # Tokens and log-probabilities to the last bit.
        return [out.logprobs for out in llm.generate(group, sampling)]

    plain = [texts("none", [one])[0] for one in asked]
    assert texts(Garbage(49152), asked[::-1]) == plain[::-1]
    by_itself = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    assert texts(by_itself, asked) == plain
