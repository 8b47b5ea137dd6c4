"""Trees that one C++ call builds are those that the tree builder builds level by level."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import drafted
import zoo
from draftahead import LLM, Batch, SamplingParams
from draftahead.core import tree
from draftahead.drafters.eagle.cpu_trees import CpuTreeBuilder
from draftahead.drafters.eagle.drafter import Eagle
from draftahead.drafters.eagle.tree_forward import TreeForward
from eagle_heads import eagle_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = zoo.ragged_prompts(1)[0]


class OneSecond:
    """The cost of every forward."""

    def of(self, num_nodes: int) -> float:
        return 1.0


def builder_and_batch(
    llm: LLM, drafter: Eagle, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> tuple[CpuTreeBuilder, Batch]:
    assert drafter.cpu_builder is not None
    return drafter.cpu_builder, drafted.next_batch(llm, prompts, params)


@pytest.mark.parametrize("max_depths", [[9, 9, 9], [9, 1, 0], [2, 9, 3]])
@pytest.mark.parametrize(
    ("logit_scale", "flags"),
    [
        (1.0, {"fc_norm": False}),
        (3.0, {"norm_output": True}),
        (6.0, {"norm_before_residual": False, "fc_norm": False, "norm_before_fc": True}),
    ],
    ids=["wide", "deep", "deeper"],
)
@torch.inference_mode()
def test_trees_of_one_call_match_the_tree_builders(
    logit_scale: float,
    flags: dict[str, bool],
    max_depths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node by node, after missing inputs of a different number per sequence, which it reads too."""
    _, llm, drafter = eagle_llm(monkeypatch, kernels=True, logit_scale=logit_scale, **flags)
    builder, batch = builder_and_batch(llm, drafter, zoo.ragged_prompts(3))
    batch = dataclasses.replace(batch, max_depths=tuple(max_depths))
    assert builder.supports(batch, drafter.builder)
    cache = drafter.runner.cache
    TreeForward(drafter.runner, drafter.prefill, batch.sequences)
    lengths = [len(tokens) for tokens in cache.tokens_in]
    before = [cache.keys[0][b, :, :length].clone() for b, length in enumerate(lengths)]
    for b, num_missing in enumerate((3, 1, 2)):
        del cache.tokens_in[b][-num_missing:]
        cache.keys[0][b, :, len(cache.tokens_in[b]) :] = 0
    kernels, levels_built = drafter.runner.cpu, list[int]()
    build = kernels.build_trees  # type: ignore[union-attr]
    monkeypatch.setattr(
        kernels, "build_trees", lambda args: levels_built.append(build(args)) or levels_built[0]
    )
    ours = builder.build(batch, drafter.builder)
    assert [len(tokens) for tokens in cache.tokens_in] == lengths
    for b, length in enumerate(lengths):
        assert torch.allclose(cache.keys[0][b, :, :length], before[b], atol=1e-5)

    trees = TreeForward(drafter.runner, drafter.prefill, batch.sequences)
    levels = list[int]()

    def expand(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        levels.append(tokens.shape[1])
        return trees.expand(tokens, parents)

    theirs = drafter.builder.build(batch, trees.root_logits, expand, drafter.runner.draft_to_target)
    assert levels_built == [len(levels)]
    assert ours is not None and theirs is not None and sum(ours.num_nodes) > 12
    if max_depths == [9, 9, 9]:  # the most that trees may have, or less
        assert (max(max(tree.depths(parents)) for parents in ours.parents) == 8) == (
            logit_scale > 1
        )
    assert ours.num_nodes == theirs.num_nodes
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
    for one, other in zip(ours.confidence or [], theirs.confidence or [], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@torch.inference_mode()
def test_logits_that_are_not_finite_make_no_draft(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, llm, drafter = eagle_llm(monkeypatch, kernels=True, max_batch=1)
    builder, batch = builder_and_batch(llm, drafter, [PROMPT])
    drafter.head.lm_head.weight[5] = value  # one token's logit
    assert builder.build(batch, drafter.builder) is None
    drafter.head.norm.weight[5] = value  # all of them
    assert builder.build(batch, drafter.builder) is None


@torch.inference_mode()
def test_a_tree_ends_where_another_level_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm, drafter = eagle_llm(monkeypatch, kernels=True, max_batch=1)
    builder, batch = builder_and_batch(llm, drafter, [PROMPT])
    batch = dataclasses.replace(batch, step_cost=OneSecond())
    sizes = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(drafter.builder, "level_seconds", seconds)
        draft = builder.build(batch, drafter.builder)
        assert draft is not None
        sizes.append(draft.num_nodes[0])
    assert sizes[0] > sizes[1] == 1 + 4  # the root's children cost nothing more


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, max_tokens=8, seed=1),
        SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.5),
    ],
    ids=["sampled", "penalty"],
)
def test_trees_that_depend_on_more_than_logits_are_built_level_by_level(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, llm, drafter = eagle_llm(monkeypatch, kernels=True, max_batch=1)
    builder, batch = builder_and_batch(llm, drafter, [[1, 2, 3, 4]], params)
    assert not builder.supports(batch, drafter.builder)
    llm.engine.release(llm.engine.scheduler.running[0])
    expected = LLM(model, "none").generate([1, 2, 3, 4], params)[0].token_ids
    assert llm.generate([1, 2, 3, 4], params)[0].token_ids == expected
