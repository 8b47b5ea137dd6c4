"""What a model's generation_config says, for the fields of Sampling that are left unset."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from draftahead.core.sampling_params import SamplingParams

UNFOLLOWED = (
    *("no_repeat_ngram_size", "encoder_repetition_penalty", "sequence_bias", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "suppress_tokens", "begin_suppress_tokens", "top_h"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
)
DEFAULT_MAX_TOKENS = 256  # where neither the user nor the model says


def filled(asked: SamplingParams, model: Any, room: int, *, with_text: bool) -> SamplingParams:
    """Unset fields follow the model's generation_config, and else do nothing."""
    config: Any = getattr(model, "generation_config", None)

    def preset(name: str, otherwise: Any) -> Any:
        value = getattr(config, name, None)
        return otherwise if value is None else value

    warmth = preset("temperature", 1.0) if preset("do_sample", False) else 0.0
    presets = {
        "temperature": warmth,
        "top_k": preset("top_k", 0),
        "top_p": preset("top_p", 1.0),
        "min_p": preset("min_p", 0.0),
        "repetition_penalty": preset("repetition_penalty", 1.0),
        "min_tokens": preset("min_new_tokens", 0),
        "max_tokens": min(preset("max_new_tokens", DEFAULT_MAX_TOKENS), room),
    }
    most = presets["max_tokens"] if asked.max_tokens is None else asked.max_tokens
    presets["min_tokens"] = min(presets["min_tokens"], most)
    if not asked.bad_words and preset("bad_words_ids", None):
        presets["bad_words"] = config.bad_words_ids
    if not asked.stops and preset("stop_strings", None) and with_text:
        presets["stop"] = config.stop_strings
    unset = {
        name: value for name, value in presets.items() if getattr(asked, name) in (None, (), "")
    }
    return dataclasses.replace(asked, **unset)


def warn_of_unfollowed(model: Any) -> None:
    """Settings of the model that we have no field for are named, not dropped in silence."""
    config = getattr(model, "generation_config", None)
    found = [name for name in UNFOLLOWED if getattr(config, name, None) not in (None, 0, 1.0)]
    if found:
        warnings.warn(
            f"the model's generation_config sets {', '.join(found)}, which is not applied; "
            "pass a LogitsProcessor in Sampling(processors=...) if you need it",
            stacklevel=4,
        )


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, by whoever names them first."""
    for source in (getattr(model, "generation_config", None), model.config):
        ends = getattr(source, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if end is None else frozenset([end])
