"""What LLM and the command line take, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedTokenizerBase

from draftahead.core.checks import FLAG, NAME, TEXT, Kind, Parameters, choice, instance, whole
from draftahead.core.types import Exact
from draftahead.drafters import registry
from draftahead.drafters.base import Drafter
from draftahead.errors import ConfigError
from draftahead.kv.formats import KV_CACHE_DTYPES
from draftahead.loader.hub import DTYPES
from draftahead.loader.stored import ACTIVATIONS
from draftahead.models.support import MODEL
from draftahead.sampling.accept import AcceptanceRule


def _dtype(value: Any) -> str | torch.dtype:
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    choice(*DTYPES).read(name)
    return value  # type: ignore[no-any-return]


def _device(value: Any) -> str | torch.device:
    if not isinstance(value, str | torch.device):
        raise TypeError
    choice("cpu", "cuda").read(torch.device(value).type)
    return value


_KINDS = {  # but of the drafter, which is checked when it is built, and of generation_config
    "model": MODEL,
    "tokenizer": NAME | instance(PreTrainedTokenizerBase, "a tokenizer of transformers"),
    "exact": choice("distribution", "replay"),
    "rule": choice("block", "token"),
    "lossless": FLAG,
    "dtype": Kind(f"one of {', '.join(DTYPES)}, or the torch.dtype", _dtype, DTYPES),
    "device": Kind("cpu or cuda, as cuda:1 if there are several", _device),
    "max_batch": whole(1),
    "max_context": whole(1),
    "revision": TEXT,
    "quantize": choice("int8"),
    "activations": choice(*ACTIVATIONS),
    "kv_cache_dtype": choice(*KV_CACHE_DTYPES),
    "compile": FLAG,
    "trust_remote_code": FLAG,
}

_ONE_DEVICE = "a model runs on one device; choose it with device"
_CACHE = "the KV cache has max_batch slots of max_context tokens, whose memory is checked at load"
_SAMPLING = "it is a parameter of SamplingParams"
# What to write for names of vLLM and transformers.
_ADVICE = {
    **dict.fromkeys(
        ("max_model_len", "max_length", "max_seq_len", "context_length"), "write max_context"
    ),
    **dict.fromkeys(("max_num_seqs", "batch_size"), "write max_batch"),
    **dict.fromkeys(("gpu_memory_utilization", "kv_cache_memory_bytes", "swap_space"), _CACHE),
    **dict.fromkeys(("block_size", "max_num_batched_tokens", "cpu_offload_gb"), _CACHE),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "tp_plan"), _ONE_DEVICE),
    **dict.fromkeys(("data_parallel_size", "distributed_executor_backend"), _ONE_DEVICE),
    "device_map": _ONE_DEVICE,
    "torch_dtype": "write dtype",
    **dict.fromkeys(
        ("quantization", "load_in_8bit", "load_in_4bit", "quantization_config"),
        "write quantize='int8', or load the quantized model yourself and pass it",
    ),
    "speculative_config": "write drafter",
    **dict.fromkeys(
        ("assistant_model", "speculative_model", "draft_model"),
        "write drafter={'method': 'draft_model', 'model': name}",
    ),
    "prompt_lookup_num_tokens": (
        "write drafter={'method': 'lookup', 'num_speculative_tokens': number}"
    ),
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens"),
        "write drafter={'method': name, 'num_speculative_tokens': number}",
    ),
    "enable_prefix_caching": "pass reuse=True to the method stream",
    "enforce_eager": "compile=False is the default",
    "attn_implementation": "attention is draftahead's own: leave it out",
    **dict.fromkeys(("temperature", "top_p", "top_k", "max_tokens", "seed"), _SAMPLING),
    "max_new_tokens": "write max_tokens, a parameter of SamplingParams",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class LLMConfig(Parameters):
    """All that decides how a model generates.

    model: an alias (`smollm2`), a hub id, a folder, a .gguf file, or a loaded PreTrainedModel.
    drafter: a name, a configuration with vLLM's `speculative_config` keys, or a Drafter; None
        drafts nothing.
    tokenizer: one of transformers, or its name or path. A model that is loaded by name, or that
        knows the name by which it was, brings its own. Without one, prompts are token ids.
    exact: "distribution" keeps the target's distribution; "replay" also makes the tokens a function
        of seed and prompt alone, bit for bit the same for every drafter and in every batch.
    rule: how sampled drafts are accepted, "block" or "token"; both are exact.
    lossless: False accepts drafted tokens, sampled or not, that are merely typical of the target's
        distribution (Medusa's rule, whatever `rule` says): more are accepted, and the output no
        longer follows the target's distribution. All reports say so.
    generation_config: "model" fills sampling parameters that are not set from the model's
        generation_config, as `model.generate` does; None ignores it.
    dtype, device: for models loaded by name. Unset, a CPU computes in float32 over weights as they
        are stored, in their file; "float32" widens them in memory.
    revision: a branch, tag or commit of the target, if it comes from a hub.
    max_batch, max_context: sequences and tokens per sequence that the KV cache has room for.
    quantize: "int8" quantizes the weights (CPU). Speculation is exact with respect to that model.
    activations: how the CPU multiplies quantized weights of a file. "int24" (the default), fixed
        point of 24 bits, is as exact as "float32", and faster; "int8" is faster still and rounds
        inputs to 8 bits, as llama.cpp does: another model, with respect to which speculation is
        exact.
    kv_cache_dtype: "bfloat16" or "int8" (with a scale per 32 numbers) rounds the target's keys and
        values as they are stored (CPU): half and 28% of float32's memory. Speculation is exact with
        respect to that model.
    compile: on a GPU, torch.compile for the layers of models that our own kernels do not support:
        faster forwards, after some seconds of compilation for every new number of nodes.
    trust_remote_code: run Python code that comes with a model from a hub.
    """

    owner: ClassVar = "LLM"
    kinds: ClassVar = _KINDS
    advice: ClassVar = _ADVICE

    model: Any
    drafter: str | Mapping[str, Any] | Drafter | None = "auto"
    tokenizer: Any = None
    exact: Exact = "distribution"
    rule: AcceptanceRule = "block"
    lossless: bool = True
    generation_config: Literal["model"] | None = "model"
    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    revision: str | None = None
    max_batch: int = 8
    max_context: int | None = None
    quantize: Literal["int8"] | None = None
    activations: Literal["float32", "int24", "int8"] | None = None
    kv_cache_dtype: Literal["bfloat16", "int8"] | None = None
    compile: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation_config is not None:  # which is not the default here
            choice("model").of("generation_config", self.generation_config)
        if not self.lossless and self.exact == "replay":
            raise ConfigError("lossless=False and exact='replay' exclude each other: leave one out")
        given = (self.dtype, self.device, self.revision, self.quantize, self.activations)
        if not self.is_named and any(value is not None for value in given):
            raise ConfigError(
                "dtype, device, revision, quantize and activations are for models loaded by name; "
                "this one is as it is"
            )
        registry.check(self.drafter)

    @property
    def is_named(self) -> bool:
        """Whether the model is loaded by name, not passed as an object."""
        return isinstance(self.model, str | Path)

    @classmethod
    def of(cls, model: Any, drafter: Any, options: Mapping[str, Any]) -> LLMConfig:
        """From the arguments of LLM, which takes vLLM's name for the drafter as well."""
        given = dict(options)
        if "speculative_config" in given:
            if not isinstance(drafter, str) or drafter != cls.drafter:
                raise ConfigError("give drafter or speculative_config, not both")
            drafter = given.pop("speculative_config")
        return cls(model=model, drafter=drafter, **given)
