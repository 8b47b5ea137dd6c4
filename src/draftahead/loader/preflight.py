"""What the files of a model say about it, checked before transformers builds or allocates anything
by it: numbers of layers and weights against those that the files hold, and against the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from draftahead.core.device import free_host_memory
from draftahead.errors import DamagedModelError, ModelMemoryError
from draftahead.loader.skeleton import without_memory
from draftahead.loader.weight_files import Held, some

# Numbers of a configuration by which models build modules one by one, and the most of any model.
MAX_COUNT = 10_000
COUNTS = re.compile(r"(^|[._])(layers?|experts?|blocks?|block_count|expert_count|depth)([._]|$)")
# How many times the weights of the files a model may have: most are as many, but some classes fill
# weights that are not stored. Quantized files hold several weights in a number.
SLACK = 2
MOST_WEIGHTS_PER_BYTE = 8
# Buffers that files of older versions hold, and that models compute today.
OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.\w+$|\bposition_ids$")
LAYER_INDEX = re.compile(r"\blayers\.(\d+)\.")


def check_counts(source: Any, config: Mapping[str, Any], held: Held | None = None) -> None:
    """Refuses a configuration that counts more layers or experts than any model has, or than the
    files can hold, where each has a tensor or a row of one. Building them would take minutes."""
    for name, value in _numbers(config):
        if not COUNTS.search(name):
            continue
        if not 0 <= value <= MAX_COUNT:
            raise DamagedModelError(f"{source} is damaged: {name} is {value}, as of no model")
        if held is not None and value > max(len(held.names), held.largest_dimension):
            raise DamagedModelError(
                f"{source} is damaged: {name} is {value}, and its weights are {len(held.names)} "
                "tensors"
            )


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif type(value) is int:
            yield f"{prefix}{key}", value


def check_size(
    source: Any,
    config: Any,
    held: Held,
    model: Any,
    dtype: str | torch.dtype,
    *,
    weight_bytes: int | None = None,
) -> None:
    """Refuses a model with many more weights than the files hold, and one that is larger than the
    memory: transformers would allocate and initialize what is missing. `model`: see `skeleton_of`.
    `weight_bytes`: what its weights take, if they are not all widened to the dtype."""
    if model is None:
        return
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    is_quantized = getattr(config, "quantization_config", None) is not None
    most = held.num_bytes * MOST_WEIGHTS_PER_BYTE if is_quantized else held.num_weights * SLACK
    if num_weights > most:
        raise DamagedModelError(
            f"{source} is damaged or incomplete: its configuration describes {num_weights} "
            f"weights, and its files hold {held.num_weights}"
        )
    if weight_bytes is None:
        weight_bytes = held.num_bytes if is_quantized else num_weights * _bytes_of(dtype, config)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    if weight_bytes + buffers > (free := free_host_memory()):
        raise ModelMemoryError(
            f"{source} needs {(weight_bytes + buffers) / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free: choose a smaller dtype or a smaller model"
        )


def skeleton_of(config: Any, trust_remote_code: bool = False) -> Any:
    """The model that transformers will build, in float32 and without memory for its weights; None
    if it cannot be built, which is explained when it is loaded."""
    try:
        return without_memory(config, trust_remote_code)
    except Exception:
        return None


def _bytes_of(dtype: str | torch.dtype, config: Any) -> int:
    """Of one weight."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return int(found.itemsize)


def check_loaded(source: Any, model: Any, info: Mapping[str, Any]) -> None:
    """Refuses a model some of whose weights are not those of the files: what `from_pretrained`
    reports with `output_loading_info`, which leaves out tied weights and what the class says it can
    do without."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise DamagedModelError(
            f"{source} is incomplete: {_number(missing)} missing from its weights ({some(missing)})"
        )
    if misshapen := sorted(info["mismatched_keys"]):
        raise _misshapen(source, misshapen)
    unexpected = sorted(name for name in info["unexpected_keys"] if not may_be_left(name, model))
    if unexpected:
        raise DamagedModelError(
            f"{source} does not fit its configuration: {_number(unexpected)} in its files that "
            f"the model does not have ({some(unexpected)})"
        )


def check_shapes(source: Any, model: Any, shapes: Mapping[str, torch.Size]) -> None:
    """For a GGUF file, of which transformers compares no shapes: refuses those that differ."""
    found = {name: parameter.shape for name, parameter in model.named_parameters()}
    refuse_misshapen(source, found, shapes)


def refuse_misshapen(source: Any, stored: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Refuses tensors that have another shape in the files than in the model."""
    misshapen = [
        (name, stored[name], shape)
        for name, shape in built.items()
        if stored.get(name, shape) != shape
    ]
    if misshapen:
        raise _misshapen(source, misshapen)


def _misshapen(source: Any, tensors: Sequence[tuple[str, Any, Any]]) -> DamagedModelError:
    name, stored, built = tensors[0]
    names = [item[0] for item in tensors]
    return DamagedModelError(
        f"{source} does not fit its configuration: {_number(names)} of another shape "
        f"({some(names)}; {name} is {list(stored)} in the files and {list(built)} by the "
        "configuration)"
    )


def _number(names: list[str]) -> str:
    return "a tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def may_be_left(name: str, model: Any) -> bool:
    """Whether a tensor that the model does not have changes nothing: buffers of old versions,
    layers that predict further tokens, scales of the KV cache beside quantized weights."""
    config = model.config.get_text_config(decoder=True)
    if OLD_BUFFERS.search(name) or getattr(model.config, "quantization_config", None) is not None:
        return True
    num_layers = getattr(config, "num_hidden_layers", 0)
    num_extra = getattr(config, "num_nextn_predict_layers", None) or 0
    index = LAYER_INDEX.search(name)
    return index is not None and num_layers <= int(index[1]) < num_layers + num_extra


def check_gguf_layers(source: Any, metadata: Mapping[str, Any], held: Held) -> None:
    """Refuses layers that the metadata does not count: transformers would leave them out."""
    architecture = metadata.get("general.architecture")
    count = metadata.get(f"{architecture}.block_count")
    extra = sorted(
        name
        for name in held.names
        if (index := re.match(r"blk\.(\d+)\.", name))
        and type(count) is int
        and int(index[1]) >= count
    )
    if extra:
        raise DamagedModelError(
            f"{source} does not fit its metadata: {_number(extra)} in it of layers from {count} on "
            f"({some(extra)})"
        )
