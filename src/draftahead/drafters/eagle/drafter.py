"""An EAGLE-3 head drafts from the target's hidden states (Li et al., arXiv 2503.01840).

With `num_speculative_tokens` it samples a chain. With `tree` it drafts that number of the most
confident nodes. Otherwise it is adaptive: a tree ends when another level is not worth its time.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead.backends.cpu.threads import torch_single_threaded
from draftahead.core import tree as trees
from draftahead.core.checks import shown
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, Verdict
from draftahead.drafters.base import (
    DeviceDrafter,
    DrafterContext,
    as_built,
    positive_int,
    with_drafts_for,
)
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.cpu_trees import CpuTreeBuilder
from draftahead.drafters.eagle.cuda_head import TreePlan
from draftahead.drafters.eagle.cuda_trees import CudaTreeLauncher
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill, has_inputs
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.eagle.tree_forward import TreeForward
from draftahead.drafters.eagle.tree_size import TreeSize
from draftahead.drafters.registry import register
from draftahead.drafters.tree_builder import (
    CHILDREN,
    EXPANDED_PER_LEVEL,
    MAX_DEPTH,
    TreeBuilder,
    sampled_chain,
)
from draftahead.errors import ConfigError
from draftahead.sampling.draft_sampler import scatter_to_vocab

# Nodes that a tree of a fixed size expands at each level. More find better nodes for the same size,
# for a wider forward of the head per level.
EXPANDED_OF_FIXED_TREE = 4
# Levels of a tree that a GPU builds: all of them are always computed.
DEVICE_MAX_DEPTH = 6
# Nodes that a GPU expands at each level, of all sequences together. More find better nodes, for a
# wider forward of the head per level.
DEVICE_EXPANDED_PER_LEVEL = 16


@register("eagle", synonyms=("eagle3",))
class Eagle(DeviceDrafter):
    """Drafts with a trained EAGLE-3 head."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        model: Any = None,
        num_speculative_tokens: int | None = None,
        tree: int | None = None,
    ) -> None:
        if tree is not None and num_speculative_tokens is not None:
            raise ConfigError("give eagle 'tree' or 'num_speculative_tokens', not both")
        self.adaptive = num_speculative_tokens is None and tree is None
        self.count = positive_int(
            "num_speculative_tokens", num_speculative_tokens, default=MAX_DEPTH
        )
        self.tree = None if tree is None else positive_int("tree", tree)  # nodes without the root
        expanded = EXPANDED_PER_LEVEL if tree is None else EXPANDED_OF_FIXED_TREE
        self.builder = TreeBuilder(self.count, expanded)
        self.target = context.target_runner("eagle")
        self.head = _head(model if model is not None else context.head, self.target.model)
        self.target.add_aux_layers(self.head.config.aux_layers)
        scratch = max(self.builder.max_expanded, 1 + self.count, 2 * MAX_MISSING)
        self.runner = EagleRunner(self.head, self.target, context.max_batch, scratch)
        self.prefill = HeadPrefill(self.runner)
        self.cpu_builder = CpuTreeBuilder.of(self.runner, self.prefill)
        self.launcher = CudaTreeLauncher.of(self.runner, self.prefill)
        self.tree_size = TreeSize()
        self._launched: DeviceDraft | None = None  # by `propose`, until `learn`

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        batch = with_drafts_for(batch, map(has_inputs, batch.sequences))
        if not any(batch.max_depths):
            return None
        self._launched = self.launch(batch)
        return self._launched or self._build(batch)

    # ------------------------------------------------------------------ drafts level by level

    @torch_single_threaded()
    def _build(self, batch: Batch) -> Draft | None:
        by_kernels = self.cpu_builder
        if self.adaptive and by_kernels is not None and by_kernels.supports(batch, self.builder):
            return by_kernels.build(batch, self.builder)
        forward = TreeForward(self.runner, self.prefill, batch.sequences)
        logits, draft_to_target = forward.root_logits, self.runner.draft_to_target
        if not self.adaptive and self.tree is None:
            vocab_size = self.target.vocab_size

            def feed(tokens: Tensor) -> tuple[Tensor, None]:
                logits = forward.append(tokens)
                return scatter_to_vocab(logits, draft_to_target, vocab_size), None

            logits = scatter_to_vocab(logits, draft_to_target, vocab_size)
            sampled_chain(batch, self.count, logits, None, feed)
            return None  # the draft sampler holds the draft
        if not self.adaptive:
            batch = dataclasses.replace(batch, step_cost=None)  # builds all levels
        draft = self.builder.build(batch, logits, forward.expand, draft_to_target)
        if self.tree is None or draft is None or draft.confidence is None:
            return draft
        part = draft.subset([trees.most_confident(c, self.tree) for c in draft.confidence])
        return dataclasses.replace(part, confidence=None)  # all are verified

    # ------------------------------------------------------------------- drafts on the device

    @property
    def drafts_on_device(self) -> bool:
        return self.launcher is not None and self.launcher.works

    def launch(self, batch: Batch) -> DeviceDraft | None:
        if self.launcher is None or not any(map(has_inputs, batch.sequences)):
            return None
        plan = self._plan(batch)
        if plan is None or not self.launcher.supports(batch, plan):
            return None
        return self.launcher.launch(batch, plan)

    def _plan(self, batch: Batch) -> TreePlan | None:
        """The trees that a GPU should build; None where it cannot."""
        if self.adaptive or self.tree is not None:
            size = self.tree_size.choose(batch) if self.tree is None else 1 + self.tree
            expanded = max(1, min(CHILDREN, DEVICE_EXPANDED_PER_LEVEL // len(batch.sequences)))
            depth = min(self.count, DEVICE_MAX_DEPTH)
            plan = TreePlan(depth, expanded, CHILDREN, size, not batch.all_greedy)
            return plan if plan.pool_size >= size - 1 else None
        # The draft sampler must draw sampled chains: the acceptance rule needs their distribution.
        return TreePlan(self.count, 1, 1, 1 + self.count, False) if batch.all_greedy else None

    def observe(self, launched: DeviceDraft, draft: Draft) -> None:
        self.tree_size.note(launched, as_built(launched, draft))

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            self.observe(launched, draft)


def _head(model: Any, target: Any) -> EagleHead:
    if model is None:
        raise ConfigError("drafter 'eagle' needs 'model': the folder, file or hub id of its head")
    if isinstance(model, str | Path):
        return io.load(model, target)
    if not isinstance(model, EagleHead):
        raise ConfigError(f"drafter 'eagle': {shown(model)} is no EAGLE head and no path of one")
    io.check_target(model.config, target, "this head")
    return copy.deepcopy(model)  # the runner may quantize it in place
