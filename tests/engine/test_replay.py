"""exact="replay": tokens are a function of seed and prompt alone, on real kernels too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.bench.prompts import load_prompts
from draftahead.core.types import ForwardOutput
from draftahead.models.runner import ModelRunner
from draftahead.models.verifier import REPLAY_CHUNK, REPLAY_KV_LEN, REPLAY_NODES
from drafted import Garbage, GarbageTree

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20, seed=7)


def test_self_test_refuses_forwards_that_depend_on_a_nodes_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one bit of one logit."""
    real = ModelRunner.forward

    def uneven(self: ModelRunner, tokens: torch.Tensor, **options: Any) -> ForwardOutput:
        output = real(self, tokens, **options)
        logits = output.logits.clone()
        if logits.shape[1] > 3:
            logits[:, 3, 0] = torch.nextafter(logits[:, 3, 0], torch.tensor(torch.inf).to(logits))
        return dataclasses.replace(output, logits=logits)

    monkeypatch.setattr(ModelRunner, "forward", uneven)
    with pytest.raises(errors.ReplayUnsupportedError, match="use exact='distribution'"):
        LLM(zoo.tiny("llama"), exact="replay")
    monkeypatch.undo()
    llm = LLM(zoo.tiny("llama"), exact="replay")
    assert len(llm.generate([1, 2, 3], SAMPLED)[0].token_ids) == 20


def test_every_forward_has_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain or drafted, alone or in a batch: sequences, nodes and KV entries read."""
    model = zoo.tiny("llama")
    real, shapes = ModelRunner.forward, set()

    def noting(self: ModelRunner, tokens: torch.Tensor, **options: Any) -> ForwardOutput:
        shapes.add((tuple(tokens.shape), options["kv_len"]))
        return real(self, tokens, **options)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    for drafter in ("none", Garbage(), GarbageTree()):
        LLM(model, drafter=drafter, exact="replay").generate(zoo.ragged_prompts(3), SAMPLED)
    read = min(REPLAY_KV_LEN, 128 + REPLAY_CHUNK)  # a context of 128, and scratch entries
    assert shapes == {((1, REPLAY_NODES), read), ((1, REPLAY_CHUNK), read)}


@pytest.mark.model
def test_replay_on_the_embedded_model(smollm2: tuple[Any, Any]) -> None:
    """There one row of a matrix product differs from row 0 of eight: fixed shapes are needed."""
    model, tokenizer = smollm2
    prompts = [p for p in load_prompts() if p.task in ("summary", "code_edit")][::10]
    asked = [[{"role": "user", "content": p.turns[0][:300]}] for p in prompts]
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=7, logprobs=0, raw_logprobs=True)

    def logprobs(drafter: Any, group: list[Any]) -> list[Any]:
        """Tokens and log-probabilities to the last bit."""
        llm = LLM(model, drafter, tokenizer=tokenizer, exact="replay", max_batch=2, max_context=384)
        return [out.logprobs for out in llm.generate(group, params)]

    plain = [logprobs("none", [one])[0] for one in asked]
    assert logprobs(Garbage(49152), asked[::-1]) == plain[::-1]
    by_itself = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    assert logprobs(by_itself, asked) == plain
