"""An EAGLE head on the CPU by our kernels, with low-rank screening of its LM head."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError
from draftahead.backends.cpu import abi
from draftahead.backends.cpu.abi import CHUNK
from draftahead.backends.cpu.kernels import (
    NODES_PER_CALL,
    CpuAttentionMetadata,
    Outputs,
    bind,
    require_valid,
)
from draftahead.backends.cpu.linear import Int8Linear, unpack, weights_of
from draftahead.backends.cpu.threads import num_threads
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core.tree import MAX_NODES
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.screening import Screening
from draftahead.kv.cache import KVCache

# Blocks of 32 tokens of which at least one becomes a candidate, and so the fewest candidates: more
# find the argmax more often and read more of the LM head's weights.
MIN_BLOCKS = 128


class CpuEagleHead:
    """A head bound to its KV cache."""

    def __init__(self, spec: LlamaSpec, cache: KVCache, screening: Screening | None = None) -> None:
        """With `screening`, logits are approximate but for the largest, and take less time."""
        self._kernels, self._addresses, self._layers, self._model = bind(spec, cache)
        self._screened: abi.ScreenedHead | None = None
        if screening is not None and type(spec.lm_head) is Int8Linear:
            rank, _ = shape = screening.projection.shape
            # Projected outputs are written to the kernels' buffer of queries.
            fits = rank % CHUNK == 0 and 0 < rank <= spec.num_heads * spec.head_dim
            if fits and shape == screening.basis.shape == (rank, spec.hidden_size):
                self._screened = self._screen(spec.lm_head, screening)
                self._model.screened_head = ctypes.addressof(self._screened)

    def _screen(self, lm_head: Int8Linear, screening: Screening) -> abi.ScreenedHead:
        addresses, rank = self._addresses, len(screening.projection)
        vocab_size, hidden_size = lm_head.out_features, self._model.hidden_size
        projection = _linear(screening.projection, None)
        screening_weight = lm_head.dequantized() @ screening.basis.T
        screening_head = Int8Linear(_linear(screening_weight, lm_head.bias))
        vocab_rows = weights_of(lm_head, addresses, "lm_head", vocab_size, hidden_size)
        # Weights of single tokens are read: they must not be packed in panels.
        weight, scales = (
            unpack(packed, vocab_size).contiguous() for packed in (lm_head.weight, lm_head.scales)
        )
        groups = hidden_size // lm_head.group_size
        vocab_rows.data = addresses.of(
            "lm_head.weight", weight, vocab_size, hidden_size, dtype=torch.uint8
        )
        vocab_rows.scales = addresses.of("lm_head.scales", scales, vocab_size, groups)
        return abi.ScreenedHead(
            projection=weights_of(projection, addresses, "projection", rank, hidden_size),
            screening_head=weights_of(screening_head, addresses, "screening", vocab_size, rank),
            vocab_rows=vocab_rows,
            min_blocks=MIN_BLOCKS,
        )

    def supports(self, num_sequences: int, num_nodes: int, tree_size: int) -> bool:
        return num_sequences * num_nodes <= NODES_PER_CALL and tree_size <= MAX_NODES

    def forward(
        self,
        hidden: Tensor,
        first_input: Tensor,
        nodes: CpuAttentionMetadata,
        *,
        kv_only: bool = False,
    ) -> Tensor:
        """Residuals `hidden` [B, N, H] and inputs of the first layer's attention [B, N, 2 * H] ->
        logits [B, N, D]; `hidden` becomes the last layer's output. `kv_only`: only keys and values
        are computed."""
        num_sequences, num_nodes = hidden.shape[:2]
        vocab_size = 0 if kv_only else self._model.lm_head.out_features
        outputs = Outputs.empty(num_sequences, num_nodes, vocab_size)
        self._kernels.forward(
            self._model,
            hidden,
            nodes,
            None if kv_only else outputs,
            first_input=first_input,
            kv_only=kv_only,
        )
        return outputs.logits

    def build_trees(self, args: abi.TreeArgs) -> int:
        """Builds trees in the memory of `args`; returns the number of levels expanded."""
        build = self._kernels.library.draftahead_build_trees
        require_valid(build(ctypes.byref(self._model), ctypes.byref(args), num_threads()))
        return int(args.levels)


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
