"""Draft trees on a CPU in one C++ call: the missing inputs and all levels.

A level takes the kernels less than a millisecond, and returning to Python between levels would take
as long again. The trees are those that TreeBuilder builds with TreeForward.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.backends.base import UnsupportedSpecError, require
from draftahead.backends.cpu import abi
from draftahead.backends.cpu.addresses import Addresses, address
from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.backends.cpu.linear import embeddings_of, weights_of
from draftahead.core.device import host_ints, padded
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
        """Raises UnsupportedSpecError where the kernels do not support the projection."""
        self._runner, self._prefill, self._kernels = runner, prefill, kernels
        self._projection, self._addresses = projection, Addresses()
        self._tree_args = self._bound_tree_args()  # what is the same in every call
        self._head_inputs = self._bound_head_inputs()

    def _bound_tree_args(self) -> abi.TreeArgs:
        projection, spec, addresses = self._projection, self._runner.spec, self._addresses
        embed, size, to_target = projection.embed, spec.hidden_size, projection.draft_to_target
        num_embeddings, vocab_size = embed.num_embeddings, spec.vocab_size
        tokens = torch.arange(vocab_size) if to_target is None else to_target
        known = len(tokens) and 0 <= int(tokens.min()) <= int(tokens.max()) < num_embeddings
        require(bool(known), "the draft vocabulary has tokens without an embedding")
        cos_sin = [
            addresses.of("rotary angles", angles, self._runner.cache.num_entries, spec.head_dim)
            for angles in self._runner.cos_sin
        ]
        args = abi.TreeArgs(
            num_children=CHILDREN,
            min_confidence=MIN_CONFIDENCE,
            embeddings=embeddings_of(embed, addresses, num_embeddings, size),
            embed_norm=addresses.of("embed_norm", projection.embed_norm, size),
            hidden_norm=addresses.of("hidden_norm", projection.hidden_norm, size),
            norm_before_residual=projection.norm_before_residual,
            norm_output=projection.norm_output,
            cos=cos_sin[0],
            sin=cos_sin[1],
        )
        if to_target is not None:
            args.draft_to_target = addresses.of(
                "draft_to_target", to_target, vocab_size, dtype=torch.int64
            )
        return args

    def _bound_head_inputs(self) -> abi.HeadInputs:
        projection, addresses = self._projection, self._addresses
        num_hidden, size = projection.norm_weights.shape
        fc_size = self._runner.spec.hidden_size, num_hidden * size
        return abi.HeadInputs(
            num_hidden=num_hidden,
            target_hidden_size=size,
            norm=abi.INPUT_NORMS.index(projection.norm),
            norm_weights=addresses.of("input norms", projection.norm_weights, num_hidden, size),
            fc=weights_of(projection.fc, addresses, "fc", *fc_size),
        )

    @staticmethod
    def of(runner: EagleRunner, prefill: HeadPrefill) -> CpuTreeBuilder | None:
        """None where the kernels do not support the head or its input projection."""
        if runner.cpu is None:
            return None
        projection = input_projection(runner.head, runner.embed, runner.draft_to_target)
        if projection is None:
            return None
        try:
            return CpuTreeBuilder(runner, prefill, runner.cpu, projection)
        except UnsupportedSpecError:
            return None

    def supports(self, batch: Batch, builder: TreeBuilder) -> bool:
        """Only greedy sequences without processors: their trees depend on the logits alone."""
        plain = batch.all_greedy and not batch.modifies_logits
        hidden = self._runner.target.cache.hidden
        readable = hidden is not None and hidden.dtype == torch.float32
        num_nodes = len(batch.sequences) * builder.expanded_per_level
        return plain and readable and num_nodes <= MAX_NODES

    def build(self, batch: Batch, builder: TreeBuilder) -> Draft | None:
        """The draft that `builder` would build, which measures the time of its levels."""
        runner, num_sequences = self._runner, len(batch.sequences)
        max_missing = min(MAX_MISSING, NODES_PER_CALL // num_sequences)
        missing = self._prefill.prepare(batch.sequences, max_missing)
        runner.target.cache.compact()
        lengths = zip(map(len, runner.cache.tokens_in), map(len, missing), strict=False)
        root_entries = host_ints([num_cached + count - 1 for num_cached, count in lengths])
        max_depths = host_ints(batch.max_depths)
        max_nodes = 1 + CHILDREN * (1 + builder.expanded_per_level * builder.max_depth)
        num_nodes = host_ints([0] * num_sequences)
        trees = torch.empty(2, num_sequences, max_nodes, dtype=torch.int64, device="cpu")
        tokens, parents = trees
        confidence = torch.empty(num_sequences, max_nodes, dtype=torch.float32, device="cpu")
        inputs, tensors = self._inputs(missing)
        args = abi.TreeArgs.from_buffer_copy(self._tree_args)
        args.num_sequences = num_sequences
        args.max_levels = builder.max_depth
        args.nodes_per_level = builder.expanded_per_level
        args.min_level_confidence = builder.needed_confidence(batch)
        args.root_entries = address("root_entries", root_entries, num_sequences, dtype=torch.int64)
        args.max_depths = address("max_depths", max_depths, num_sequences, dtype=torch.int64)
        args.inputs = ctypes.addressof(inputs)
        args.max_nodes = max_nodes
        args.num_nodes, args.confidence = num_nodes.data_ptr(), confidence.data_ptr()
        args.tokens, args.parents = tokens.data_ptr(), parents.data_ptr()
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

    def _inputs(self, missing: Sequence[list[int]]) -> tuple[abi.HeadInputs, list[Tensor]]:
        """The (hidden, token) inputs that are missing, and the tensors that hold them."""
        target, inputs = self._runner.target, abi.HeadInputs.from_buffer_copy(self._head_inputs)
        hidden, cache = target.cache.hidden, target.cache
        assert hidden is not None
        shape = (cache.num_slots, 1, cache.num_entries, hidden.shape[-1])
        indices = host_ints(target.aux_indices(self._runner.head.config.aux_layers))
        num_inputs, tokens = host_ints([len(one) for one in missing]), padded(missing)
        inputs.hidden = address("the target's hidden states", hidden, *shape)
        inputs.num_slots, _, inputs.num_entries, inputs.entry_stride = shape
        inputs.hidden_indices = address(
            "hidden indices", indices, inputs.num_hidden, dtype=torch.int64
        )
        inputs.max_inputs = tokens.shape[1]
        inputs.num_inputs = num_inputs.data_ptr()
        inputs.tokens = address("tokens", tokens, *tokens.shape, dtype=torch.int64)
        return inputs, [indices, num_inputs, tokens, hidden]
