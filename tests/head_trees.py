"""Trees that a head builds on a device, beside those that the tree builder builds with the host."""

from __future__ import annotations

from typing import Any

import torch

from cuda_models import randomised
from draftahead import LLM, SamplingParams
from draftahead.core import tree
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch
from draftahead.drafters.eagle.cuda_head import TreePlan
from draftahead.drafters.eagle.drafter import Eagle
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.eagle.tree_forward import TreeForward
from draftahead.drafters.tree_builder import TreeBuilder
from drafted import next_batch

HEADS = ("norm each", "one norm", "two layers")


def untrained_head(model: Any, kind: str) -> EagleHead:
    """Of one layer with a norm for each hidden state, with one norm for all, or of two layers."""
    tokens = torch.arange(0, model.config.vocab_size, 2)
    layers = int(model.config.num_hidden_layers)
    depths = (1, min(2, layers), layers)
    head = new_head(model, tokens, aux_layers=depths, num_layers=2 if kind == "two layers" else 1)
    if kind == "one norm":
        c = head.config
        c.fc_norm, c.norm_before_fc = False, True
        c.norm_before_residual, c.norm_output = False, True
        head = EagleHead(c).to(model.device)
        head.draft_to_target.copy_(tokens)
    randomised(head, seed=1)
    with torch.no_grad():
        head.lm_head.weight.mul_(3)  # so that few tokens are likely
    return head.to(model.dtype)


@torch.inference_mode()
def assert_same_trees(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, plan: TreePlan, missing: list[int]
) -> tuple[Batch, DeviceDraft]:
    """Up to nodes that are as likely as others. `missing`: inputs that the head's cache lacks, one
    launch for each number. The tree builder must have no smallest confidence."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, Eagle) and drafter.launcher is not None
    batch = next_batch(llm, prompts, params)
    trees = TreeForward(drafter.runner, drafter.prefill, batch.sequences)
    built = TreeBuilder(plan.max_depth, plan.nodes_per_level).build(
        batch, trees.root_logits, trees.expand, drafter.runner.draft_to_target
    )
    assert built is not None and built.confidence is not None
    expected = built.subset([tree.most_confident(c, plan.num_nodes - 1) for c in built.confidence])
    for count in missing:
        for held in drafter.runner.cache.tokens_in:
            del held[max(0, len(held) - count) :]
        launched = drafter.launcher.launch(batch, plan)
        assert launched is not None
        found, _ = launched.to_host()
        for b in range(len(prompts)):
            assert found.num_nodes[b] == plan.num_nodes
            assert len(_paths(found, b) & _paths(expected, b)) >= plan.num_nodes - 2, (b, count)
    return batch, launched


def _paths(draft: Draft, b: int) -> set[tuple[int, ...]]:
    size = draft.num_nodes[b]
    return set(tree.paths(draft.tokens[b][:size], draft.parents[b][:size]))
