"""Draft trees on a CPU in one C++ call: the missing inputs and all levels.

A level takes the kernels less than a millisecond, and returning to Python between levels would take
as long again. The trees are those that TreeBuilder builds with HeadTrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.eagle.cpu import (
    CpuEagleHead,
    MissingInputs,
    TreeOptions,
    can_build_trees,
)
from draftahead.drafters.eagle.prefill import CPU_CHUNK, MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.eagle.spec import InputProjection, input_projection
from draftahead.drafters.tree_builder import CHILDREN, MIN_CONFIDENCE, TreeBuilder


class CpuTreeBuilder:
    """Builds trees with a head that the CPU kernels support."""

    def __init__(
        self,
        runner: EagleRunner,
        prefill: HeadPrefill,
        kernels: CpuEagleHead,
        projection: InputProjection,
    ) -> None:
        self._runner, self._prefill = runner, prefill
        self._kernels, self._projection = kernels, projection

    @staticmethod
    def of(runner: EagleRunner, prefill: HeadPrefill) -> CpuTreeBuilder | None:
        """None where the kernels do not support the head or its input projection."""
        if runner.cpu is None:
            return None
        projection = input_projection(runner.head, runner.embed, runner.draft_tokens is None)
        if projection is None or not can_build_trees(projection):
            return None
        return CpuTreeBuilder(runner, prefill, runner.cpu, projection)

    def supports(self, batch: Batch, builder: TreeBuilder) -> bool:
        """Only greedy sequences without processors: their trees depend on the logits alone."""
        plain = all(s.params.is_greedy and not s.has_processors for s in batch.sequences)
        hidden = self._runner.target.cache.hidden
        readable = hidden is not None and hidden.dtype == torch.float32
        num_nodes = len(batch.sequences) * builder.expanded_per_level
        return plain and readable and num_nodes <= CPU_CHUNK

    def build(
        self,
        batch: Batch,
        has_inputs: Sequence[bool],
        max_depths: Sequence[int],
        builder: TreeBuilder,
    ) -> Draft | None:
        """The draft that `builder` would build, which is told of the time."""
        runner, target = self._runner, self._runner.target
        most = min(MAX_MISSING, CPU_CHUNK // len(batch.sequences))
        missing = self._prefill.missing(batch.sequences, has_inputs, most)
        target.cache.flush()
        hidden, held = target.cache.hidden, runner.cache.tokens_in
        assert hidden is not None
        found = self._kernels.build_trees(
            self._projection,
            runner.cos_sin,
            MissingInputs(hidden, target.captured_index(runner.head.config.depths), missing),
            root_entries=[len(held[slot]) + len(one) - 1 for slot, one in enumerate(missing)],
            max_depths=max_depths,
            options=TreeOptions(
                max_levels=builder.max_depth,
                nodes_per_level=builder.expanded_per_level,
                num_children=CHILDREN,
                min_confidence=MIN_CONFIDENCE,
                min_level_confidence=builder.needed_confidence(batch),
            ),
        )
        self._prefill.commit(missing)
        if found.levels:
            builder.note_level(found.seconds / found.levels)
        if found.levels < builder.max_depth - 1:
            builder.note_stop()
        if not any(found.trees):
            return None
        return Draft.trees(batch.roots, found.trees, found.confidence)
