"""A trained head's layers on the CPU, in one call of our kernels.

Such a head is a llama's decoder but for its entrance: what the first layer looks at is handed over,
as is what its residual starts from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from draftahead.kvcache import KVCache
from draftahead.runtime import build
from draftahead.runtime.cpu import MOST_ROWS, TOP, Layer, Model, Pass, described, vector
from draftahead.runtime.linear import describe, fits
from draftahead.runtime.shape import LlamaShape, NotThisShapeError, require


class CpuHead:
    """`shape` without an embedding and a rotation, bound to a cache."""

    def __init__(self, shape: LlamaShape, cache: KVCache) -> None:
        library = build.library()
        if library is None:
            raise NotThisShapeError(build.problem())
        require(cache.keys[0].dtype == torch.float32, "not float32")
        require(shape.width % 16 == 0 and shape.inner % 16 == 0, "odd widths")
        require(fits(shape.head), "head")
        self._library, self._shape = library, shape  # whose weights must outlive their addresses
        self._layers = (Layer * len(shape.layers))(
            *(
                described(layer, cache.keys[i], cache.values[i])
                for i, layer in enumerate(shape.layers)
            )
        )
        self._model = Model(
            layers=ctypes.addressof(self._layers),
            layer_count=len(shape.layers),
            hidden=shape.hidden,
            heads=shape.heads,
            key_heads=shape.key_heads,
            width=shape.width,
            inner=shape.inner,
            length=cache.length,
            activation=shape.activation,
            final_norm=vector(shape.norm),
            head=describe(shape.head),
            eps=shape.eps,
        )
        self._scratch = torch.empty(0)

    def takes(self, texts: int, nodes: int, block: int) -> bool:
        return texts * nodes <= MOST_ROWS and block <= MOST_ROWS

    def run(
        self,
        x: Tensor,
        seen: Tensor,
        turns: tuple[Tensor, Tensor],
        *,
        first: int,
        lengths: Seq[int],
        depths: Seq[Seq[int]],
        ancestors: Seq[Seq[int]],
        which: Seq[Seq[int]] | None = None,
        keys_only: bool = False,
    ) -> Tensor:
        """Nodes [B, N]: residuals x [B, N, H], inputs `seen`, turns [B, N, width] -> logits
        [B, N, D]; x becomes what the last layer makes of it. `which` of a row's block they are, if
        they are not all of it: by `depths` and `ancestors` (as bits) of the whole block."""
        texts, nodes = x.shape[:2]
        assert x.is_contiguous() and seen.is_contiguous()
        cos, sin = (turn.contiguous() for turn in turns)
        threads, model = build.threads(), ctypes.byref(self._model)
        needed = self._library.draftahead_scratch(model, texts * nodes, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        logits = torch.empty(texts, nodes, 0 if keys_only else self._model.head.out)
        top = torch.empty(texts, nodes, TOP, dtype=torch.int64)
        block = len(depths[0])
        count = texts * block
        numbers: dict[str, ctypes.Array[Any]] = {
            "lengths": (ctypes.c_int64 * texts)(*lengths),
            "depths": (ctypes.c_int32 * count)(*(d for row in depths for d in row)),
            "ancestors": (ctypes.c_uint64 * count)(*(a for row in ancestors for a in row)),
        }
        if which is not None:
            numbers["which"] = (ctypes.c_int64 * (texts * nodes))(
                *(w for row in which for w in row)
            )
        arguments = Pass(
            rows=texts,
            nodes=nodes,
            first=first,
            real=0,
            block=block,
            **{name: ctypes.addressof(array) for name, array in numbers.items()},
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            seen=seen.data_ptr(),
            keys_only=keys_only,
            x=x.data_ptr(),
            logits=None if keys_only else logits.data_ptr(),
            top=top.data_ptr(),
            scratch=self._scratch.data_ptr(),
        )
        self._library.draftahead_pass(model, ctypes.byref(arguments), threads)
        return logits
