"""Draft trees on a CPU in one C++ call: the missing inputs and all levels.

A level takes the kernels less than a millisecond, and returning to Python between levels would take
as long again. The trees are those that TreeBuilder builds with TreeForward.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftahead.backends.base import kernels_can_read
from draftahead.backends.cpu import abi
from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.backends.cpu.linear import is_supported, weights_of
from draftahead.core.device import padded
from draftahead.core.draft import Draft
from draftahead.core.tree import MAX_NODES
from draftahead.core.types import Batch
from draftahead.drafters.base import MIN_CONFIDENCE
from draftahead.drafters.eagle.cpu_head import CpuEagleHead
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.eagle.spec import InputProjection, input_projection
from draftahead.drafters.tree_builder import CHILDREN, TreeBuilder


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
        projection = input_projection(runner.head, runner.embed, runner.draft_to_target)
        if projection is None or not _is_supported(projection):
            return None
        return CpuTreeBuilder(runner, prefill, runner.cpu, projection)

    def supports(self, batch: Batch, builder: TreeBuilder) -> bool:
        """Only greedy sequences without processors: their trees depend on the logits alone."""
        plain = batch.all_greedy and not batch.modifies_logits
        hidden = self._runner.target.cache.hidden
        readable = hidden is not None and hidden.dtype == torch.float32
        num_nodes = len(batch.sequences) * builder.expanded_per_level
        return plain and readable and num_nodes <= MAX_NODES

    def build(self, batch: Batch, builder: TreeBuilder) -> Draft | None:
        """The draft that `builder` would build, which measures the time of its levels."""
        runner, projection, num_sequences = self._runner, self._projection, len(batch.sequences)
        max_missing = min(MAX_MISSING, NODES_PER_CALL // num_sequences)
        missing = self._prefill.prepare(batch.sequences, max_missing)
        runner.target.cache.compact()
        lengths = zip(map(len, runner.cache.tokens_in), map(len, missing), strict=False)
        root_entries = [num_cached + count - 1 for num_cached, count in lengths]
        max_nodes = 1 + CHILDREN * (1 + builder.expanded_per_level * builder.max_depth)
        num_nodes = torch.zeros(num_sequences, dtype=torch.int64)
        tokens, parents = torch.zeros(2, num_sequences, max_nodes, dtype=torch.int64)
        confidence = torch.zeros(num_sequences, max_nodes)
        arrays: dict[str, Tensor | None] = {
            "draft_to_target": projection.draft_to_target,
            "embeddings": projection.embed.weight,
            "embed_norm": projection.embed_norm,
            "hidden_norm": projection.hidden_norm,
            "cos": runner.cos_sin[0],
            "sin": runner.cos_sin[1],
            "root_entries": torch.tensor(root_entries),
            "max_depths": torch.tensor(batch.max_depths),
            "num_nodes": num_nodes,
            "tokens": tokens,
            "parents": parents,
            "confidence": confidence,
        }
        inputs, tensors = self._head_inputs(missing)
        args = abi.TreeArgs(
            num_sequences=num_sequences,
            max_levels=builder.max_depth,
            nodes_per_level=builder.expanded_per_level,
            num_children=CHILDREN,
            min_confidence=MIN_CONFIDENCE,
            min_level_confidence=builder.needed_confidence(batch),
            inputs=ctypes.addressof(inputs),
            max_nodes=max_nodes,
            norm_before_residual=projection.norm_before_residual,
            norm_output=projection.norm_output,
            **{name: None if x is None else x.data_ptr() for name, x in arrays.items()},
        )
        self._run(args, builder)
        del tensors  # `inputs` holds their addresses
        self._prefill.commit(missing)
        pairs = [
            list(zip(tokens[b, 1:size].tolist(), parents[b, 1:size].tolist(), strict=True))
            for b, size in enumerate(num_nodes.tolist())
        ]
        if not any(pairs):
            return None
        by_node = [confidence[b, 1 : 1 + len(nodes)].tolist() for b, nodes in enumerate(pairs)]
        return Draft.trees(batch.roots, pairs, by_node)

    def _run(self, args: abi.TreeArgs, builder: TreeBuilder) -> None:
        start = time.perf_counter()
        levels = self._kernels.build_trees(args)
        if levels:
            builder.note_level((time.perf_counter() - start - args.inputs_seconds) / levels)
        if levels < builder.max_depth - 1:
            builder.decay_level_time()

    def _head_inputs(self, tokens: Sequence[list[int]]) -> tuple[abi.HeadInputs, list[Tensor]]:
        """The (hidden, token) inputs that are missing, and the tensors that hold them."""
        target, projection = self._runner.target, self._projection
        hidden = target.cache.hidden
        assert hidden is not None
        indices = torch.tensor(target.aux_indices(self._runner.head.config.aux_layers))
        num_inputs, inputs = torch.tensor(list(map(len, tokens))), padded(tokens)
        head_inputs = abi.HeadInputs(
            hidden=hidden.data_ptr(),
            num_entries=hidden.shape[2],
            entry_stride=hidden.shape[3],
            num_hidden=len(indices),
            target_hidden_size=projection.norm_weights.shape[1],
            hidden_indices=indices.data_ptr(),
            norm=abi.INPUT_NORMS.index(projection.norm),
            norm_weights=projection.norm_weights.data_ptr(),
            fc=weights_of(projection.fc),
            max_inputs=inputs.shape[1],
            num_inputs=num_inputs.data_ptr(),
            tokens=inputs.data_ptr(),
        )
        return head_inputs, [indices, num_inputs, inputs]


def _is_supported(projection: InputProjection) -> bool:
    """Whether the kernels can read inputs through this projection by themselves."""
    embed, is_table = projection.embed, type(projection.embed) is nn.Embedding
    return (
        is_table
        and kernels_can_read(embed.weight, torch.float32, "cpu")
        and is_supported(projection.fc)
    )
