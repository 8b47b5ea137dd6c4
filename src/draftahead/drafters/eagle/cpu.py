"""An EAGLE head on the CPU: its forward passes and its draft trees, by our kernels.

CpuEagleHead.forward      one forward over (hidden, token) inputs or nodes of a tree
CpuEagleHead.build_trees  the inputs that are missing and whole trees, in one C++ call
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, is_plain
from draftahead.backends.cpu import abi
from draftahead.backends.cpu.kernels import MAX_NODES, Nodes, Outputs, bind
from draftahead.backends.cpu.linear import Int8Linear, is_supported, unpack, weights_of
from draftahead.backends.cpu.threads import num_threads
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.screening import Screening
from draftahead.drafters.eagle.spec import InputProjection
from draftahead.kv.cache import KVCache

# Blocks of 32 tokens of which at least one becomes a candidate, and so the fewest candidates: more
# find the argmax more often and read more of the LM head's weights.
MIN_BLOCKS = 128

CosSin = tuple[Tensor, Tensor]  # rotary angles [..., head_dim]


class MissingInputs(NamedTuple):
    """(hidden, token) inputs that a head has not read yet, one sequence per slot."""

    hidden: Tensor  # [slots, 1, entries, captured * H'] the target's captured hidden states
    hidden_indices: tuple[int, ...]  # which of the captured states fc combines
    tokens: Sequence[Sequence[int]]  # the last of each sequence is the root


class TreeOptions(NamedTuple):
    """Size of draft trees: see TreeArgs in csrc/abi.h."""

    max_levels: int
    nodes_per_level: int
    num_children: int
    min_confidence: float
    min_level_confidence: float

    @property
    def max_nodes(self) -> int:
        return 1 + self.num_children * (1 + self.nodes_per_level * self.max_levels)


class BuiltTrees(NamedTuple):
    levels: int  # below the first, which is of the root's children
    seconds: float  # that these levels took
    trees: list[list[tuple[int, int]]]  # (token, parent), parents first; parent 0 is the root
    confidence: list[list[float]]


class CpuEagleHead:
    """A head bound to its KV cache."""

    def __init__(self, spec: LlamaSpec, cache: KVCache, screening: Screening | None = None) -> None:
        """With `screening`, logits are approximate but for the largest, and take less time."""
        self._kernels, self._layers, self._model = bind(spec, cache)
        self._kept: list[Any] = [spec, cache]  # objects whose addresses `_model` holds
        # Projected outputs are written to the kernels' buffer of queries.
        fits = screening is not None and len(screening.projection) <= spec.num_heads * spec.head_dim
        if screening is not None and fits and type(spec.lm_head) is Int8Linear:
            self._screen(spec.lm_head, screening)

    def _screen(self, lm_head: Int8Linear, screening: Screening) -> None:
        projection = _linear(screening.projection, None)
        screening_weight = lm_head.dequantized() @ screening.basis.T
        screening_head = Int8Linear(_linear(screening_weight, lm_head.bias))
        # Single rows of the vocabulary are read: they must not be packed in panels.
        rows, scales = (
            unpack(packed, lm_head.out_features).contiguous()
            for packed in (lm_head.weight, lm_head.scales)
        )
        vocab_rows = weights_of(lm_head)
        vocab_rows.data, vocab_rows.scales = rows.data_ptr(), scales.data_ptr()
        screened = abi.ScreenedHead(
            projection=weights_of(projection),
            screening_head=weights_of(screening_head),
            vocab_rows=vocab_rows,
            min_blocks=MIN_BLOCKS,
        )
        self._model.screened_head = ctypes.addressof(screened)
        self._kept += [projection, screening_head, rows, scales, screened]

    def supports(self, num_slots: int, num_nodes: int, tree_size: int) -> bool:
        return num_slots * num_nodes <= MAX_NODES and tree_size <= MAX_NODES

    def forward(
        self,
        hidden: Tensor,
        first_input: Tensor,
        cos_sin: CosSin,
        *,
        first_slot: int,
        kv_lens: Sequence[int],
        depths: Sequence[Sequence[int]],
        ancestors: Sequence[Sequence[int]],
        tree_nodes: Sequence[Sequence[int]] | None = None,
        kv_only: bool = False,
    ) -> Tensor:
        """Residuals `hidden` [B, N, H] and inputs of the first layer's attention [B, N, 2 * H] ->
        logits [B, N, D]; `hidden` becomes the last layer's output. `depths` and `ancestors` (bits)
        tell of whole trees; `tree_nodes` says which of their nodes these are, None: all.
        `kv_only`: only keys and values are computed."""
        num_slots, num_nodes = hidden.shape[:2]
        cos, sin = (angles.contiguous() for angles in cos_sin)
        nodes = Nodes(
            first_slot=first_slot,
            num_context_tokens=0,  # NaN must not reach the cache: all of it is drafting
            kv_lens=torch.tensor(kv_lens),
            depths=torch.tensor(depths, dtype=torch.int32),
            ancestors=torch.tensor(ancestors),
            cos=cos,
            sin=sin,
            tree_nodes=None if tree_nodes is None else torch.tensor(tree_nodes),
        )
        vocab_size = 0 if kv_only else self._model.lm_head.out_features
        outputs = Outputs.empty(num_slots, num_nodes, vocab_size)
        self._kernels.forward(
            self._model,
            hidden,
            nodes,
            None if kv_only else outputs,
            first_input=first_input,
            kv_only=kv_only,
        )
        return outputs.logits

    def build_trees(
        self,
        projection: InputProjection,
        cos_sin: CosSin,
        inputs: MissingInputs,
        *,
        root_entries: Sequence[int],
        max_depths: Sequence[int],
        options: TreeOptions,
    ) -> BuiltTrees:
        """Reads the missing inputs and builds a tree below each root, whose input lies in KV entry
        `root_entries` [B]: the trees that TreeBuilder builds for greedy sequences."""
        num_slots, max_nodes = len(root_entries), options.max_nodes
        roots, depths = _int64s(root_entries), _int64s(max_depths)
        num_nodes, tokens, parents = (
            _int64s([0] * count) for count in (num_slots, *[num_slots * max_nodes] * 2)
        )
        confidence = (ctypes.c_float * (num_slots * max_nodes))()
        head_inputs, kept = _head_inputs(projection, inputs)
        draft_to_target = projection.draft_to_target
        args = abi.TreeArgs(
            **options._asdict(),
            num_slots=num_slots,
            root_entries=ctypes.addressof(roots),
            max_depths=ctypes.addressof(depths),
            draft_to_target=None if draft_to_target is None else draft_to_target.data_ptr(),
            embeddings=projection.embed.weight.data_ptr(),
            embed_norm=projection.embed_norm.data_ptr(),
            hidden_norm=projection.hidden_norm.data_ptr(),
            norm_before_residual=projection.norm_before_residual,
            norm_output=projection.norm_output,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            inputs=ctypes.addressof(head_inputs),
            max_nodes=max_nodes,
            num_nodes=ctypes.addressof(num_nodes),
            tokens=ctypes.addressof(tokens),
            parents=ctypes.addressof(parents),
            confidence=ctypes.addressof(confidence),
        )
        start = time.perf_counter()
        levels = self._kernels.library.draftahead_build_trees(
            ctypes.byref(self._model), ctypes.byref(args), num_threads()
        )
        seconds = time.perf_counter() - start - args.inputs_seconds
        del kept  # read until here
        parts = [slice(b * max_nodes + 1, b * max_nodes + num_nodes[b]) for b in range(num_slots)]
        return BuiltTrees(
            levels=int(levels),
            seconds=seconds,
            trees=[list(zip(tokens[part], parents[part], strict=True)) for part in parts],
            confidence=[confidence[part] for part in parts],
        )


def _head_inputs(
    projection: InputProjection, inputs: MissingInputs
) -> tuple[abi.HeadInputs, list[Any]]:
    """The struct, and the objects whose addresses it holds."""
    most = max(map(len, inputs.tokens))
    padded = [token for one in inputs.tokens for token in [*one, *[0] * (most - len(one))]]
    num_inputs, tokens = _int64s([len(one) for one in inputs.tokens]), _int64s(padded)
    indices = _int64s(inputs.hidden_indices)
    head_inputs = abi.HeadInputs(
        hidden=inputs.hidden.data_ptr(),
        num_entries=inputs.hidden.shape[2],
        entry_stride=inputs.hidden.shape[3],
        num_hidden=len(indices),
        target_hidden_size=projection.norm_weights.shape[1],
        hidden_indices=ctypes.addressof(indices),
        norm=abi.INPUT_NORMS.index(projection.norm),
        norm_weights=projection.norm_weights.data_ptr(),
        fc=weights_of(projection.fc),
        max_inputs=most,
        num_inputs=ctypes.addressof(num_inputs),
        tokens=ctypes.addressof(tokens),
    )
    return head_inputs, [num_inputs, tokens, indices]


def _int64s(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def cpu_eagle_head(head: EagleHead, spec: LlamaSpec, cache: KVCache) -> CpuEagleHead | None:
    """None if the kernels do not support the head."""
    try:
        return CpuEagleHead(spec, cache, head.screening)
    except UnsupportedSpecError:
        return None


def can_build_trees(projection: InputProjection | None) -> bool:
    """Whether the kernels can read inputs through this projection by themselves."""
    if projection is None or type(projection.embed) is not nn.Embedding:
        return False
    is_float32 = is_plain(projection.embed.weight, torch.float32, "cpu")
    return is_float32 and is_supported(projection.fc)
