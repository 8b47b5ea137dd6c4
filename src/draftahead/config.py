"""What LLM and the command line take, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from draftahead.core.types import Exact
from draftahead.drafters import registry
from draftahead.drafters.base import Drafter
from draftahead.errors import ConfigError, nearest
from draftahead.sampling.accept import AcceptanceRule


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """All that decides how a model generates.

    model: an alias (`smollm2`), a hub id, a folder, a .gguf file, or a loaded PreTrainedModel.
    drafter: a name, a configuration with vLLM's `speculative_config` keys, or a Drafter.
    tokenizer: for a loaded model; one loaded by name brings its own.
    exact: "distribution" keeps the target's distribution; "replay" also makes the tokens a function
        of seed and prompt alone, bit for bit the same for every drafter and in every batch.
    rule: how sampled drafts are accepted, "block" or "token"; both are exact.
    lossless: False accepts drafted tokens, sampled or not, that are merely typical of the target's
        distribution (Medusa's rule, whatever `rule` says): more are accepted, and the output no
        longer follows the target's distribution. All reports say so.
    dtype, device: for models loaded by name.
    revision: a branch, tag or commit of the target, if it comes from a hub.
    max_batch, max_context: sequences and tokens per sequence that the KV cache has room for.
    quantize: "int8" quantizes the weights (CPU). Speculation is exact with respect to that model.
    compile: on a GPU, torch.compile for the layers of models that our own kernels do not support:
        faster forwards, after some seconds of compilation for every new number of nodes.
    trust_remote_code: run Python code that comes with a model from a hub.
    """

    model: Any
    drafter: str | Mapping[str, Any] | Drafter = "auto"
    tokenizer: Any = None
    exact: Exact = "distribution"
    rule: AcceptanceRule = "block"
    lossless: bool = True
    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    revision: str | None = None
    max_batch: int = 8
    max_context: int | None = None
    quantize: Literal["int8"] | None = None
    compile: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.is_named and not hasattr(self.model, "config"):
            raise ConfigError(f"{self.model!r} is no model, and no name or path of one")
        one_of("exact", self.exact, ("distribution", "replay"))
        one_of("rule", self.rule, ("block", "token"))
        if not self.lossless and self.exact == "replay":
            raise ConfigError("lossless=False and exact='replay' exclude each other: leave one out")
        if self.quantize is not None:
            one_of("quantize", self.quantize, ("int8",))
        if self.max_batch < 1:
            raise ConfigError(f"max_batch must be 1 or more, not {self.max_batch}")
        given = (self.dtype, self.device, self.revision, self.quantize)
        if not self.is_named and any(value is not None for value in given):
            raise ConfigError(
                "dtype, device, revision and quantize are for models loaded by name; this one is "
                "as it is"
            )
        registry.check(self.drafter)

    @property
    def is_named(self) -> bool:
        """Whether the model is loaded by name, not passed as an object."""
        return isinstance(self.model, str | Path)

    @classmethod
    def of(cls, model: Any, drafter: Any, options: Mapping[str, Any]) -> LLMConfig:
        """From the arguments of LLM: an unknown option is an error with a hint."""
        known = [field.name for field in fields(cls) if field.name not in ("model", "drafter")]
        for name in options:
            if name not in known:
                raise ConfigError(f"LLM has no option {name!r}{nearest(name, known)}")
        return cls(model=model, drafter=drafter, **options)


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} cannot be {value!r}{nearest(str(value), known)}")
