"""A trained head's layers on the CPU, in one call of our kernels.

Such a head is a llama's decoder but for its entrance: what the first layer looks at is handed over,
as is what its residual starts from.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, is_plain
from draftahead.backends.cpu import build
from draftahead.backends.cpu.decoder import MOST_ROWS, TOP, Nodes, Screening, bound
from draftahead.backends.cpu.linear import Int8Linear, Weights, describe, fits, unpacked
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.spec import _fusing
from draftahead.kv.cache import KVCache

NORMS = ("none", "each", "all")  # as in kernels/grow.h
STRETCHES = 128  # of 32 tokens each: the best of at least so many are looked at


class PairsRead(ctypes.Structure):
    """As Pairs in kernels/grow.h."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slots", "stride", "parts", "width")),
        ("places", ctypes.c_void_p),
        ("norm", ctypes.c_int64),
        ("norms", ctypes.c_void_p),
        ("fuse", Weights),
        ("most", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("counts", "tokens")),
    )


class Growth(ctypes.Structure):
    """As in kernels/grow.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "deepest", "a_level", "children")),
        *((name, ctypes.c_float) for name in ("least", "enough")),
        *((name, ctypes.c_void_p) for name in ("bases", "max_depths", "tokens", "embeddings")),
        *((name, ctypes.c_void_p) for name in ("embed_norm", "hidden_norm")),
        *((name, ctypes.c_int64) for name in ("norms_residual", "norms_output")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "pairs")),
        ("most", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sizes", "said", "above", "likely")),
        ("pairs_seconds", ctypes.c_double),
    )


class InputProjection(NamedTuple):
    """How a head takes in the target's states, a token, and what it made of the one before."""

    fuse: nn.Module
    norm: str  # of the states: "each", "all" or "none"
    norms: Tensor  # [states, H'] its weights
    embeddings: Tensor  # [target's vocabulary, H]
    embed_norm: Tensor
    hidden_norm: Tensor
    norms_residual: bool
    norms_output: bool
    cos: Tensor  # [slots, width]
    sin: Tensor
    tokens: Tensor | None  # draft token -> the target's


class Pairs(NamedTuple):
    """What a head lacks of some texts."""

    states: Tensor  # [rows, 1, slots, W * H'] of the target
    places: tuple[int, ...]  # which of a token's states are fused
    tokens: Sequence[
        Sequence[int]
    ]  # a row each, each token beside the states before it; the root at the end


class Grown(NamedTuple):
    levels: int
    seconds: float  # of these levels, without the pairs
    trees: list[list[tuple[int, int]]]  # (token, parent), parents first; parent 0 is the root
    confidence: list[list[float]]


# An output h is about `span.T @ sight @ h`, both [directions, H]: see heads/shortlist.py.
Directions = tuple[Tensor, Tensor]


class CpuEagleHead:
    """`shape` without an embedding and a rotation, bound to a cache."""

    def __init__(
        self, shape: LlamaSpec, cache: KVCache, directions: Directions | None = None
    ) -> None:
        """With `directions`, logits are rough but for the largest, and take less time."""
        self._kernels, self._layers, self._model = bound(shape, cache)
        self._held: list[Any] = [shape, cache]  # whose addresses these are
        room = shape.heads * shape.width  # for directions, while a pass is under way
        if type(shape.head) is Int8Linear and directions and len(directions[0]) <= room:
            self._shorten(shape.head, directions)

    def _shorten(self, whole: Int8Linear, directions: Directions) -> None:
        sight, span = _linear(directions[0], None), directions[1]
        preview = Int8Linear(_linear(whole.dequantized() @ span.T, whole.bias))
        rows, scales = (
            unpacked(part, whole.out_features).contiguous() for part in (whole.weight, whole.scales)
        )
        exact = describe(whole)
        exact.data, exact.scales = rows.data_ptr(), scales.data_ptr()
        shortlist = Screening(describe(sight), describe(preview), exact, STRETCHES)
        self._model.shortlist = ctypes.addressof(shortlist)
        self._held += [sight, preview, rows, scales, shortlist]

    def takes(self, texts: int, nodes: int, block: int) -> bool:
        return texts * nodes <= MOST_ROWS and block <= MOST_ROWS

    def run(
        self,
        x: Tensor,
        seen: Tensor,
        turns: tuple[Tensor, Tensor],
        *,
        first: int,
        lengths: Sequence[int],
        depths: Sequence[Sequence[int]],
        ancestors: Sequence[Sequence[int]],
        which: Sequence[Sequence[int]] | None = None,
        keys_only: bool = False,
    ) -> Tensor:
        """Nodes [B, N]: residuals x [B, N, H], inputs `seen`, turns [B, N, width] -> logits
        [B, N, D]; x becomes what the last layer makes of it. `which` of a row's block they are, if
        they are not all of it: by `depths` and `ancestors` (as bits) of the whole block."""
        texts, count = x.shape[:2]
        cos, sin = (turn.contiguous() for turn in turns)
        nodes = Nodes(
            first,
            0,  # guesses, all of them
            torch.tensor(lengths),
            torch.tensor(depths, dtype=torch.int32),
            torch.tensor(ancestors),
            cos,
            sin,
            None if which is None else torch.tensor(which),
        )
        logits = torch.empty(texts, count, 0 if keys_only else self._model.head.out)
        found = None if keys_only else (logits, torch.empty(texts, count, TOP, dtype=torch.int64))
        self._kernels.run(self._model, x, nodes, found, seen=seen, keys_only=keys_only)
        return logits

    def grow(
        self,
        entrance: InputProjection,
        pairs: Pairs,
        *,
        bases: Sequence[int],
        max_depths: Sequence[int],
        deepest: int,
        a_level: int,
        children: int,
        least: float,
        enough: float,
    ) -> Grown:
        """Reads the pairs that are lacking, and grows trees below the last of each text, which lie
        in slots `bases`: as growth.Grower grows them, for greedy texts."""
        texts, most = len(bases), 1 + children * (1 + a_level * deepest)
        slots, deep = _whole(bases), _whole(max_depths)
        sizes, said, above = (_whole([0] * count) for count in (texts, texts * most, texts * most))
        likely = (ctypes.c_float * (texts * most))()
        tokens = entrance.tokens
        lacking, held = _described(entrance, pairs)
        arguments = Growth(
            rows=texts,
            deepest=deepest,
            a_level=a_level,
            children=children,
            least=least,
            enough=enough,
            bases=ctypes.addressof(slots),
            max_depths=ctypes.addressof(deep),
            tokens=None if tokens is None else tokens.data_ptr(),
            embeddings=entrance.embeddings.data_ptr(),
            embed_norm=entrance.embed_norm.data_ptr(),
            hidden_norm=entrance.hidden_norm.data_ptr(),
            norms_residual=entrance.norms_residual,
            norms_output=entrance.norms_output,
            cos=entrance.cos.data_ptr(),
            sin=entrance.sin.data_ptr(),
            pairs=ctypes.addressof(lacking),
            most=most,
            sizes=ctypes.addressof(sizes),
            said=ctypes.addressof(said),
            above=ctypes.addressof(above),
            likely=ctypes.addressof(likely),
        )
        start, model = time.perf_counter(), ctypes.byref(self._model)
        levels = self._kernels.library.draftahead_grow(
            model, ctypes.byref(arguments), build.threads()
        )
        seconds = time.perf_counter() - start - arguments.pairs_seconds
        del held  # until here
        trees, confidence = [], []
        for row in range(texts):
            part = slice(row * most + 1, row * most + sizes[row])
            trees.append(list(zip(said[part], above[part], strict=True)))
            confidence.append(likely[part])
        return Grown(int(levels), seconds, trees, confidence)


def _whole(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _described(entrance: InputProjection, pairs: Pairs) -> tuple[PairsRead, list[Any]]:
    """For the kernels, and what must stay as long as they read it."""
    most = max(map(len, pairs.tokens))
    padded = [token for row in pairs.tokens for token in [*row, *[0] * (most - len(row))]]
    counts, read = _whole([len(row) for row in pairs.tokens]), _whole(padded)
    places = _whole(pairs.places)
    found = PairsRead(
        states=pairs.states.data_ptr(),
        slots=pairs.states.shape[2],
        stride=pairs.states.shape[3],
        parts=len(places),
        width=entrance.norms.shape[1],
        places=ctypes.addressof(places),
        norm=NORMS.index(entrance.norm),
        norms=entrance.norms.data_ptr(),
        fuse=describe(entrance.fuse),
        most=most,
        counts=ctypes.addressof(counts),
        tokens=ctypes.addressof(read),
    )
    return found, [counts, read, places]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    found.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
    if bias is not None:
        found.bias = nn.Parameter(bias, requires_grad=False)
    return found


def cpu_kernels(head: EagleHead, shape: LlamaSpec, cache: KVCache) -> CpuEagleHead | None:
    try:
        return CpuEagleHead(shape, cache, head.screening)
    except UnsupportedSpecError:
        return None


def cpu_entrance(
    head: EagleHead, embed: Any, turns: list[Tensor], whole: bool
) -> InputProjection | None:
    """How it takes in states and tokens, where the CPU kernels can do that by themselves."""
    fused, first = _fusing(head), list[Any](head.layers)[0]
    near = type(embed) is nn.Embedding and is_plain(embed.weight, torch.float32, "cpu")
    if fused is None or not near or not fits(head.fc):
        return None
    return InputProjection(
        head.fc,
        *fused,
        embed.weight,
        first.input_layernorm.weight,
        first.hidden_norm.weight,
        head.config.norm_before_residual,
        head.config.norm_output,
        turns[0],
        turns[1],
        None if whole else head.tokens,
    )
