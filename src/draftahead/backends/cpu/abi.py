"""ctypes mirrors of the structs in csrc/abi.h, and the check that a library has the same ones.

A field that is missing, reordered or of another size would make the kernels read wrong addresses.
So the library describes its structs, and `mismatch` compares that with the mirrors at load.
"""

from __future__ import annotations

import ctypes
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from draftahead.backends.llama_spec import GELU_TANH, SILU
from draftahead.core import tree
from draftahead.kv.formats import KV_BLOCK

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Compared with the library's, as are the structs. csrc/abi.h says what they mean.
PANEL, CHUNK, TOPK, MAX_CHILDREN = 48, 64, 4, 16
# enum WeightKind; from F16 on by the names of GGUF.
KINDS = (
    "F32",
    "INT8",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
ARITHMETICS = ("float32", "int24", "int8")  # enum Arithmetic
INPUT_NORMS = ("none", "each", "all")  # enum InputNorm
KV_FORMATS = ("float32", "bfloat16", "int8")  # enum KVFormat
CONSTANTS = {
    "ABI_VERSION": 5,
    "PANEL": PANEL,
    "CHUNK": CHUNK,
    "TOPK": TOPK,
    "MAX_CHILDREN": MAX_CHILDREN,
    "MAX_NODES": tree.MAX_NODES,
    "KV_BLOCK": KV_BLOCK,
    "SILU": SILU,
    "GELU_TANH": GELU_TANH,
    **{kind: index for index, kind in enumerate(KINDS)},
    "FLOAT32_INPUTS": ARITHMETICS.index("float32"),
    "INT24_INPUTS": ARITHMETICS.index("int24"),
    "INT8_INPUTS": ARITHMETICS.index("int8"),
    **{f"KV_{name.upper()}": number for number, name in enumerate(KV_FORMATS)},
    "NO_NORM": INPUT_NORMS.index("none"),
    "NORM_EACH": INPUT_NORMS.index("each"),
    "NORM_ALL": INPUT_NORMS.index("all"),
}


class Struct(ctypes.Structure):
    """A ctypes struct that rejects unknown field names, at no cost: empty __slots__, here and in
    every mirror, leave no place for other attributes. An ordinary ctypes.Structure would take them
    as attributes of the Python object, and the kernels would read zeros."""

    __slots__ = ()


class Weights(Struct):
    __slots__ = ()
    _fields_ = (
        ("data", POINTER),
        ("panels", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
        ("out_features", INT),
        ("in_features", INT),
        ("group_size", INT),
        ("kind", INT),
        ("arithmetic", INT),
    )


class DecoderLayer(Struct):
    __slots__ = ()
    _fields_ = (
        *((name, Weights) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("input_norm", POINTER),
        ("post_attention_norm", POINTER),
        ("q_norm", POINTER),
        ("k_norm", POINTER),
        ("keys", POINTER),
        ("values", POINTER),
        ("sliding_window", INT),
        ("scaling", FLOAT),
    )


class ScreenedHead(Struct):
    __slots__ = ()
    _fields_ = (
        ("projection", Weights),
        ("screening_head", Weights),
        ("vocab_rows", Weights),
        ("min_blocks", INT),
    )


class Model(Struct):
    __slots__ = ()
    _fields_ = (
        ("layers", POINTER),
        ("num_layers", INT),
        ("hidden_size", INT),
        ("num_heads", INT),
        ("num_kv_heads", INT),
        ("head_dim", INT),
        ("first_input_size", INT),
        ("intermediate_size", INT),
        ("num_slots", INT),
        ("num_entries", INT),
        ("kv_format", INT),
        ("activation", INT),
        ("final_norm", POINTER),
        ("lm_head", Weights),
        ("screened_head", POINTER),
        ("norm_eps", FLOAT),
    )


class ForwardArgs(Struct):
    __slots__ = ()
    _fields_ = (
        ("num_sequences", INT),
        ("num_nodes", INT),
        ("first_slot", INT),
        ("num_context_tokens", INT),
        ("num_cached", POINTER),
        ("tree_size", INT),
        ("tree_nodes", POINTER),
        ("depths", POINTER),
        ("ancestors", POINTER),
        ("cos", POINTER),
        ("sin", POINTER),
        ("first_input", POINTER),
        ("kv_only", INT),
        ("hidden", POINTER),
        ("logits", POINTER),
        ("num_aux_layers", INT),
        ("aux_layers", POINTER),
        ("aux_hidden", POINTER),
        ("topk", POINTER),
        ("scratch", POINTER),
    )


class HeadInputs(Struct):
    __slots__ = ()
    _fields_ = (
        ("hidden", POINTER),
        ("num_slots", INT),
        ("num_entries", INT),
        ("entry_stride", INT),
        ("num_hidden", INT),
        ("target_hidden_size", INT),
        ("hidden_indices", POINTER),
        ("norm", INT),
        ("norm_weights", POINTER),
        ("fc", Weights),
        ("max_inputs", INT),
        ("num_inputs", POINTER),
        ("tokens", POINTER),
    )


class TreeArgs(Struct):
    __slots__ = ()
    _fields_ = (
        ("num_sequences", INT),
        ("max_levels", INT),
        ("nodes_per_level", INT),
        ("num_children", INT),
        ("min_confidence", FLOAT),
        ("min_level_confidence", FLOAT),
        ("root_entries", POINTER),
        ("max_depths", POINTER),
        ("draft_to_target", POINTER),
        ("embeddings", Weights),
        ("embed_norm", POINTER),
        ("hidden_norm", POINTER),
        ("norm_before_residual", INT),
        ("norm_output", INT),
        ("cos", POINTER),
        ("sin", POINTER),
        ("inputs", POINTER),
        ("max_nodes", INT),
        ("num_nodes", POINTER),
        ("tokens", POINTER),
        ("parents", POINTER),
        ("confidence", POINTER),
        ("levels", INT),
        ("inputs_seconds", ctypes.c_double),
    )


STRUCTS: tuple[type[Struct], ...] = (
    Weights,
    DecoderLayer,
    ScreenedHead,
    Model,
    ForwardArgs,
    HeadInputs,
    TreeArgs,
)


# Result and arguments of each function. ABI_VERSION is raised when one of them changes.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "draftahead_abi": (ctypes.c_char_p, []),
    "draftahead_scratch_size": (INT, [POINTER, INT, INT]),
    "draftahead_forward": (ctypes.c_char_p, [POINTER, POINTER, INT]),
    "draftahead_build_trees": (ctypes.c_char_p, [POINTER, POINTER, INT]),
    "draftahead_integer_bytes": (INT, [POINTER]),
    "draftahead_linear": (None, [POINTER, POINTER, INT, POINTER, INT, POINTER]),
    "draftahead_float_rows": (INT, [POINTER, POINTER, INT, POINTER]),
    "draftahead_panels_size": (INT, [POINTER]),
    "draftahead_make_panels": (None, [POINTER, POINTER, INT]),
    "draftahead_read_memory": (FLOAT, [POINTER, INT, INT]),
}


class Library:
    """The functions of a compiled library for one instruction set, by the names above."""

    def __init__(self, compiled: ctypes.CDLL, isa: str) -> None:
        """AttributeError where a function is missing."""
        self.compiled, self.isa = compiled, isa
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(compiled, f"{name}_{isa}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def mismatch(library: Library) -> str | None:
    """How a library's constants and structs differ from these, or None."""
    lines = library.draftahead_abi().decode().splitlines()
    theirs = {name: items for name, *items in (line.split() for line in lines)}
    ours = {name: [str(value)] for name, value in CONSTANTS.items()}
    ours |= {struct.__name__: _described(struct) for struct in STRUCTS}
    for name in theirs | ours:
        if name not in theirs or name not in ours:
            return f"{name} is only in {'abi.py' if name in ours else 'the library'}"
        fields = zip_longest(theirs[name][1:], ours[name][1:], fillvalue="missing")
        for their, our in fields:
            if their != our:
                return (
                    f"field of {name} (name:offset:size) is {their} in the library, {our} in abi.py"
                )
        if theirs[name] != ours[name]:  # a constant, or the size of a struct
            return f"{name} is {theirs[name][0]} in the library, {ours[name][0]} in abi.py"
    return None


def _described(struct: type[Struct]) -> list[str]:
    """Size, then name:offset:size of each field: as abi_description in csrc/abi.h."""
    fields = [getattr(struct, field[0]) for field in struct._fields_]
    names = [field[0] for field in struct._fields_]
    described = [f"{n}:{f.offset}:{f.size}" for n, f in zip(names, fields, strict=True)]
    return [str(ctypes.sizeof(struct)), *described]
