"""Defaults from a model's generation_config, for SamplingParams fields that are not set."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from draftahead.core.sampling_params import SamplingParams

# Fields of generation_config that SamplingParams lacks: a warning names those that are set.
UNSUPPORTED = (
    *("no_repeat_ngram_size", "encoder_repetition_penalty", "sequence_bias", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "suppress_tokens", "begin_suppress_tokens", "top_h"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
)
DEFAULT_MAX_TOKENS = 256  # where neither the user nor the model sets a limit


def with_model_defaults(
    params: SamplingParams, model: Any, max_new_tokens: int, *, has_tokenizer: bool
) -> SamplingParams:
    """Fills fields that are not set from the model's generation_config, else with neutral values.
    `max_new_tokens`: what the context has room for."""
    config: Any = getattr(model, "generation_config", None)

    def default(name: str, neutral: Any) -> Any:
        value = getattr(config, name, None)
        return neutral if value is None else value

    defaults = {
        "temperature": default("temperature", 1.0) if default("do_sample", False) else 0.0,
        "top_k": default("top_k", 0),
        "top_p": default("top_p", 1.0),
        "min_p": default("min_p", 0.0),
        "repetition_penalty": default("repetition_penalty", 1.0),
        "max_tokens": min(default("max_new_tokens", DEFAULT_MAX_TOKENS), max_new_tokens),
    }
    max_tokens = defaults["max_tokens"] if params.max_tokens is None else params.max_tokens
    defaults["min_tokens"] = min(default("min_new_tokens", 0), max_tokens)
    if not params.bad_words and default("bad_words_ids", None):
        defaults["bad_words"] = config.bad_words_ids
    if not params.stop_strings and default("stop_strings", None) and has_tokenizer:
        defaults["stop"] = config.stop_strings
    unset = {name: v for name, v in defaults.items() if getattr(params, name) in (None, (), "")}
    return dataclasses.replace(params, **unset)


def warn_unsupported(model: Any) -> None:
    """Names the fields of the model's generation_config that are ignored."""
    config = getattr(model, "generation_config", None)
    found = [name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 0, 1.0)]
    if found:
        warnings.warn(
            f"the model's generation_config sets {', '.join(found)}, which is not applied; "
            "pass a LogitsProcessor in SamplingParams(processors=...) if you need it",
            stacklevel=4,
        )


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Of the generation_config, else of the model's config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
