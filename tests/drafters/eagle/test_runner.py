"""Forwards of an EAGLE head over a KV cache give what the head computes over whole texts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import drafted
import zoo
from draftahead import LLM, SamplingParams
from draftahead.core import tree
from draftahead.drafters.eagle.drafter import Eagle
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.prefill import HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.eagle.tree_forward import TreeForward
from eagle_heads import causal, eagle_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
with_and_without_kernels = pytest.mark.parametrize("kernels", [True, False])


def reference_logits(head: EagleHead, model: Any, text: list[int], path: list[int]) -> torch.Tensor:
    """Logits [D] after a path of drafted tokens behind a text, computed token by token as in the
    EAGLE papers."""
    ids = torch.tensor([text])
    captured = model(ids, output_hidden_states=True).hidden_states
    hidden_states = torch.stack([captured[depth] for depth in head.config.aux_layers], 2)
    embed = model.get_input_embeddings()
    hidden, tokens = head.feature(hidden_states[:, :-1]), ids[:, 1:]
    for token in [*path, 0]:
        positions = torch.arange(tokens.shape[1])[None]
        output = head(embed(tokens), hidden, positions, causal)
        hidden = torch.cat([hidden, output[:, -1:]], 1)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
    return head.logits(output[0, -1])


def started(drafter: Eagle, sequences: Any) -> TreeForward:
    """Trees of roots alone; the head has read all of the sequences' inputs."""
    return TreeForward(drafter.runner, drafter.prefill, sequences)


@with_and_without_kernels
@torch.inference_mode()
def test_nodes_of_growing_trees_match_the_head_along_their_paths(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths; one node is added at a time, or several."""
    model, llm, drafter = eagle_llm(monkeypatch, kernels=kernels)
    prompts = zoo.ragged_prompts(3)
    trees = started(drafter, drafted.next_batch(llm, prompts, GREEDY).sequences)
    tokens = torch.tensor([[0, 9, 4, 7, 2, 5, 8]]) + torch.arange(3)[:, None]
    for count in (2, 3, 6, 7):
        logits = trees.expand(tokens[:, :count], torch.tensor([PARENTS] * 3)[:, :count])
    for b, prompt in enumerate(prompts):
        for node, path in enumerate(tree.paths(tokens[b].tolist(), PARENTS)):
            expected = reference_logits(drafter.head, model, prompt, list(path))
            assert torch.allclose(logits[b, node], expected, atol=1e-4), (b, node)


@torch.inference_mode()
def test_a_slot_that_held_another_text_is_recomputed_from_where_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, llm, drafter = eagle_llm(monkeypatch, kernels=False, max_batch=2)
    cache = drafter.runner.cache
    for prompt in ([5, 6, 7, 8, 9], [5, 6, 7, 1, 2, 3, 4], [2, 2, 2], [2, 2, 2, 2, 2, 9, 9]):
        (sequence,) = drafted.next_batch(llm, [prompt], GREEDY).sequences
        started(drafter, [sequence])
        assert cache.tokens_in[0] == prompt[1:]
        found = cache.keys[0][0, :, : len(prompt) - 1].clone()
        cache.tokens_in[0].clear()
        started(drafter, [sequence])
        assert torch.allclose(cache.keys[0][0, :, : len(prompt) - 1], found, atol=1e-5)
        llm.engine.release(llm.engine.scheduler.running[0])


@with_and_without_kernels
def test_steps_that_were_missed_are_caught_up(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it read every step or only now, it predicts the same after the same text."""
    _, llm, drafter = eagle_llm(monkeypatch, kernels=kernels)
    fresh, params = copy.copy(drafter), SamplingParams(temperature=0, max_tokens=40)
    for prompt in (zoo.ragged_prompts(1)[0] * 3, zoo.ragged_prompts(2)[1]):
        drafted.add_request(llm, prompt, params)
    steps = 0
    while llm.engine.scheduler.waiting or llm.engine.scheduler.running:
        llm.engine.step()
        steps += 1
        if steps % 4 == 0 and (sequences := llm.engine.scheduler.running):
            fresh.runner = EagleRunner(drafter.head, llm.engine.verifier.runner, 3, 17)
            fresh.prefill = HeadPrefill(fresh.runner)
            with torch.inference_mode():
                found, expected = (started(one, sequences).root_logits for one in (drafter, fresh))
            assert torch.allclose(found, expected, atol=1e-4)
    assert steps > 8


def test_a_prompt_of_one_token_has_no_hidden_state_to_draft_from() -> None:
    model = zoo.tiny("llama")
    llm = LLM(model, {"method": "eagle", "model": drafted.random_head(model)}, max_batch=2)
    outs = llm.generate([[5], [1, 2, 3]], GREEDY)
    for out, prompt in zip(outs, ([5], [1, 2, 3]), strict=True):
        assert out.token_ids == zoo.reference(model, prompt, 12)
