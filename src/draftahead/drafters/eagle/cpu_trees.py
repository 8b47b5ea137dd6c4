"""Draft trees on a CPU in one C++ call: the missing inputs and all levels.

A level takes the kernels less than a millisecond, and returning to Python between levels would take
as long again. The trees are those that TreeBuilder builds with HeadTrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.eagle.cpu import CpuEagleHead, InputProjection, Pairs, cpu_entrance
from draftahead.drafters.eagle.prefill import CPU_CHUNK, MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
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
        cos_sin, is_whole = [*runner.cos_sin], runner.draft_tokens is None
        projection = cpu_entrance(runner.head, runner.embed, cos_sin, is_whole)
        if projection is None:
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
        found = self._kernels.grow(
            self._projection,
            Pairs(hidden, target.captured_index(runner.head.config.depths), missing),
            bases=[len(held[slot]) + len(tokens) - 1 for slot, tokens in enumerate(missing)],
            max_depths=max_depths,
            deepest=builder.max_depth,
            a_level=builder.expanded_per_level,
            children=CHILDREN,
            least=MIN_CONFIDENCE,
            enough=builder.needed_confidence(batch),
        )
        self._prefill.commit(missing)
        if found.levels:
            builder.note_level(found.seconds / found.levels)
        if found.levels < builder.max_depth - 1:
            builder.note_stop()
        if not any(found.trees):
            return None
        return Draft.trees(batch.roots, found.trees, found.confidence)
