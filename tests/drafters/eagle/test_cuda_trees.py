"""Trees that a head builds on a GPU, verified before the host has read them. Without a GPU: see
tests/interpreted."""

from __future__ import annotations

import pytest
import torch

import zoo
from cuda_models import cuda_model
from draftahead import LLM, SamplingParams
from draftahead.drafters.eagle.cuda_head import TreePlan
from drafted import ALL, KnowsOutput, OnDevice, random_head
from graph_checks import assert_greedy, assert_waits_once_per_step
from head_trees import HEADS, assert_same_trees, untrained_head

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=32, seed=3, ignore_eos=True)
PROMPTS = zoo.ragged_prompts(3)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_are_those_of_the_tree_builder(
    params: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one input and after several."""
    monkeypatch.setattr("draftahead.drafters.tree_builder.MIN_CONFIDENCE", 0.0)
    model = cuda_model("llama", torch.float16, "cuda")
    llm = LLM(model, {"method": "eagle", "model": untrained_head(model, kind)}, max_batch=3)
    assert_same_trees(llm, PROMPTS, params, TreePlan(5, 3, 4, 16, params is SAMPLED), [1, 1, 5])


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", ["eagle", "eagle_adaptive", "eagle_tree", "auto_with_head"])
@pytest.mark.parametrize("batch", [1, 4, 12])
def test_greedy_output_with_device_drafts(drafter: str, batch: int) -> None:
    model = cuda_model("llama", torch.bfloat16, "cuda")
    prompts = [*PROMPTS, [7], [5, 6], *([3, 1 + i] * 4 for i in range(batch))]
    llm = LLM(model, ALL[drafter](model), max_batch=batch)
    outs = llm.generate(prompts, GREEDY)
    assert sum(out.stats.drafted for out in outs) > 50
    for prompt, out in zip(prompts, outs, strict=True):
        assert_greedy(model, prompt, out.token_ids)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("corrupts", [False, True])
def test_device_drafts_of_any_drafter(corrupts: bool) -> None:
    """Accepted nodes do not lie in order; a corrupt tree costs its own drafted tokens alone."""
    model = cuda_model("llama", torch.bfloat16, "cuda")
    plain = LLM(model, "none", max_batch=3).generate(PROMPTS, GREEDY)
    answers = {tuple(p): out.token_ids for p, out in zip(PROMPTS, plain, strict=True)}
    for other in (KnowsOutput(answers), ALL["garbage_tree"](model)):
        drafter = OnDevice(other, corrupts=corrupts, device="cuda")
        outs = LLM(model, drafter, max_batch=3).generate(PROMPTS, GREEDY)
        assert drafter.steps
        for prompt, out in zip(PROMPTS, outs, strict=True):
            assert_greedy(model, prompt, out.token_ids)
        if isinstance(other, KnowsOutput) and not corrupts:
            assert sum(out.stats.accepted for out in outs) > sum(out.stats.steps for out in outs)


@pytest.mark.usefixtures("generous_policy")
def test_sampled_output_is_nearly_that_of_plain_decoding() -> None:
    """For a seed, up to near-ties of half precision."""
    model = cuda_model("llama", torch.bfloat16, "cuda")
    prompts = [[*prompt, extra] for prompt in PROMPTS for extra in range(4)]
    plain = LLM(model, "none", max_batch=4).generate(prompts, SAMPLED)
    outs = LLM(model, ALL["eagle_adaptive"](model), max_batch=4).generate(prompts, SAMPLED)
    same = sum(a.token_ids[:6] == b.token_ids[:6] for a, b in zip(plain, outs, strict=True))
    assert same >= 9


@pytest.mark.usefixtures("generous_policy")
def test_a_step_with_a_device_draft_waits_for_the_device_once() -> None:
    model = cuda_model("llama", torch.bfloat16, "cuda")
    llm = LLM(model, {"method": "eagle", "model": random_head(model)}, max_batch=2)
    assert_waits_once_per_step(llm, PROMPTS[:2], GREEDY)
