"""What a model's generation_config says: defaults of sampling parameters, transformers' own logits
processors, and what cannot be done, which is refused by name.

Every field of GenerationConfig is in one of the tables below. One that a later transformers adds is
refused if it is set.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import logits_process

from draftahead.core.checks import FLAG, TOKEN_IDS, Kind, shown, whole
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import ModelProcessors, Processor
from draftahead.errors import ConfigError

DEFAULT_MAX_TOKENS = 256  # where neither the user nor the model sets a limit

# Fields of SamplingParams, and the field of generation_config that they follow if they are unset.
DEFAULTS = {
    "temperature": "temperature",  # only with do_sample; else 0
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",  # else max_length
    "min_tokens": "min_new_tokens",  # else min_length
    "bad_words": "bad_words_ids",
    "stop": "stop_strings",
}
READ_BESIDE_DEFAULTS = ("do_sample", "max_length", "min_length", "eos_token_id")
_END_IDS = Kind(
    "a token id, or a list of them",
    (Kind("", lambda value: (whole().read(value),)) | TOKEN_IDS).read,
)


# ------------------------------------------------------------------------- processors by field


@dataclass(frozen=True)
class _Request:
    """What processors depend on."""

    prompt: Sequence[int]
    max_length: int  # of prompt and output
    end_ids: list[int]
    begin: int  # the length at which begin_suppress_tokens applies
    vocab_size: int
    device: torch.device

    def tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def check(self, ids: Iterable[int]) -> None:
        """transformers would not fail before it forces or biases the token."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")


def _sequence_bias(value: Any, request: _Request) -> Any:
    processor = logits_process.SequenceBiasLogitsProcessor(value)
    request.check(token for sequence in processor.sequence_bias for token in sequence)
    return processor


def _forced_bos(token: Any, request: _Request) -> Any:
    request.check([token])
    return logits_process.ForcedBOSTokenLogitsProcessor(token)


def _forced_eos(value: Any, request: _Request) -> Any:
    ids = [value] if isinstance(value, int) else list(value)
    request.check(ids)
    return logits_process.ForcedEOSTokenLogitsProcessor(request.max_length, request.tensor(ids))


# By field: its value, and the request -> a LogitsProcessor.
Builds = Mapping[str, Callable[[Any, _Request], Any]]
# In the order of transformers' GenerationMixin._get_logits_processor.
BEFORE_PENALTIES: Builds = {
    "sequence_bias": _sequence_bias,
    "encoder_repetition_penalty": lambda penalty, request: (
        logits_process.EncoderRepetitionPenaltyLogitsProcessor(
            penalty, request.tensor(request.prompt)[None]
        )
    ),
}
AFTER_PENALTIES: Builds = {
    "no_repeat_ngram_size": lambda size, _: logits_process.NoRepeatNGramLogitsProcessor(size),
    "encoder_no_repeat_ngram_size": lambda size, request: (
        logits_process.EncoderNoRepeatNGramLogitsProcessor(
            min(size, len(request.prompt) + 1),  # it takes memory for its size
            request.tensor(request.prompt),
        )
    ),
    "forced_bos_token_id": _forced_bos,
    "forced_eos_token_id": _forced_eos,
    "remove_invalid_values": lambda *_: logits_process.InfNanRemoveLogitsProcessor(),
    "exponential_decay_length_penalty": lambda decay, request: (
        logits_process.ExponentialDecayLengthPenalty(
            decay, request.tensor(request.end_ids), len(request.prompt)
        )
    ),
    "suppress_tokens": lambda ids, request: logits_process.SuppressTokensLogitsProcessor(
        ids, request.device
    ),
    "begin_suppress_tokens": lambda ids, request: (
        logits_process.SuppressTokensAtBeginLogitsProcessor(ids, request.begin, request.device)
    ),
}
BEFORE_TOP_K: Builds = {"top_h": lambda share, _: logits_process.TopHLogitsWarper(share)}
AFTER_MIN_P: Builds = {
    "typical_p": lambda mass, _: logits_process.TypicalLogitsWarper(mass),
    "epsilon_cutoff": lambda cutoff, _: logits_process.EpsilonLogitsWarper(cutoff),
    "eta_cutoff": lambda cutoff, request: logits_process.EtaLogitsWarper(
        cutoff, device=request.device
    ),
}
LAST: Builds = {  # of all, greedy or sampled
    "watermarking_config": lambda config, request: config.construct_processor(
        request.vocab_size, request.device
    )
}

# ---------------------------------------------------------------------------- refused, harmless

REFUSED = {
    "num_beams": "beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "guidance_scale": "a second forward of the model for every token",
    "token_healing": "another prompt than the one given",
    "num_return_sequences": "say SamplingParams(n=...)",
    "max_time": "time never decides about the text",
    "cache_implementation": "quantized keys and values change the text",
    "assistant_ensemble_weight": "not lossless",
}
# Values at which a field changes nothing, besides None.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (1.0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), (False,)),
    "cache_implementation": (
        *("dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "paged"),
        *("hybrid", "hybrid_chunked", "sliding_window", "offloaded_hybrid"),
        "offloaded_hybrid_chunked",
    ),
}
HARMLESS = frozenset(
    (
        # Of beam search alone, or of contrastive search.
        *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory"),
        "renormalize_logits",  # a distribution always adds up to 1
        # How transformers drafts, or its model drafts for another.
        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
        # Where the cache lies and how fast it runs.
        *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config"),
        # What its generate returns besides the tokens.
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        "return_dict_in_generate",
        # Of batches with padding, of an empty prompt, of an encoder.
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("transformers_version", "_from_model_config", "_commit_hash"),
    )
)
PROCESSORS = {**BEFORE_PENALTIES, **AFTER_PENALTIES, **BEFORE_TOP_K, **AFTER_MIN_P, **LAST}
KNOWN = {*DEFAULTS.values(), *READ_BESIDE_DEFAULTS, *PROCESSORS, *REFUSED, *HARMLESS}


@functools.cache
def unknown_fields() -> frozenset[str]:
    """Fields of this transformers' GenerationConfig that were added after this was written."""
    return frozenset(vars(GenerationConfig())) - KNOWN


# ------------------------------------------------------------------------------- for a request


class Resolved(NamedTuple):
    """What a request follows."""

    params: SamplingParams  # no field unset
    eos_token_ids: frozenset[int]
    processors: ModelProcessors


def resolve(
    given: SamplingParams,
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    *,
    follow_model: bool,
    vocab_size: int,
    max_new_tokens: int,
) -> Resolved:
    """Fills what is not set from the model's generation_config, else with neutral values.
    `max_new_tokens`: what the context has room for."""
    config = getattr(model, "generation_config", None) if follow_model else None
    if config is not None and not hasattr(config, "eos_token_id"):  # nor any other field
        raise ConfigError(
            f"model.generation_config must be a GenerationConfig or None, not {shown(config)}"
        )
    _refuse(config, takes_stop_strings=tokenizer is not None or bool(given.stop))
    eos = frozenset(i for i in _eos_token_ids(config, model, tokenizer) if i < vocab_size)
    params = _with_defaults(given, config, eos, len(prompt), max_new_tokens)
    forces_bos = getattr(config, "forced_bos_token_id", None) is not None
    request = _Request(
        prompt=prompt,
        max_length=len(prompt) + (params.max_tokens or 0),
        end_ids=sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}),
        begin=len(prompt) + (len(prompt) == 1 and forces_bos),
        vocab_size=vocab_size,
        device=model.device,
    )

    def built(stage: Builds) -> tuple[Processor, ...]:
        found = [_built(build, name, config, request) for name, build in stage.items()]
        return tuple(processor for processor in found if processor is not None)

    before_penalties = _replaced(built(BEFORE_PENALTIES), params.processors)
    after_penalties = _replaced(built(AFTER_PENALTIES), params.processors)
    others = [p for p in params.processors if p not in (*before_penalties, *after_penalties)]
    if params.is_greedy:
        others += built(LAST)
        model_processors = ModelProcessors(before_penalties)
    else:
        after_min_p = (*built(AFTER_MIN_P), *built(LAST))
        model_processors = ModelProcessors(before_penalties, built(BEFORE_TOP_K), after_min_p)
    params = dataclasses.replace(params, processors=(*after_penalties, *others))
    return Resolved(params, eos, model_processors)


def _built(
    build: Callable[[Any, _Request], Any], name: str, config: Any, request: _Request
) -> Processor | None:
    if not _is_set(config, name):
        return None
    value = getattr(config, name)
    try:
        processor: Processor = build(value, request)
        return processor
    except Exception as failure:
        raise _error(
            f"sets {name}={shown(value)}, which does not work: {failure}", name
        ) from failure


def _replaced(own: Iterable[Processor], users: Sequence[Processor]) -> tuple[Processor, ...]:
    """As in transformers, a processor of the user's stands in for the model's of its class."""
    by_class = {type(processor): processor for processor in users}
    return tuple(by_class.get(type(processor), processor) for processor in own)


def _is_set(config: Any, name: str) -> bool:
    value = getattr(config, name, None)
    is_neutral = isinstance(value, str | int | float) and value in NEUTRAL.get(name, ())
    return value is not None and not is_neutral


def _refuse(config: Any, *, takes_stop_strings: bool) -> None:
    """Names the fields that cannot be followed."""
    reasons = {name: why for name, why in REFUSED.items() if _is_set(config, name)}
    for name in unknown_fields():
        if _is_set(config, name):
            reasons[name] = "this version does not know it"
    watermark = getattr(config, "watermarking_config", None)
    if not isinstance(watermark, WatermarkingConfig | None):
        reasons["watermarking_config"] = "only a WatermarkingConfig depends on the text alone"
    if _is_set(config, "stop_strings") and not takes_stop_strings:
        reasons["stop_strings"] = "it needs a tokenizer: pass tokenizer="
    if reasons:
        found = ", ".join(f"{n}={shown(getattr(config, n))} ({why})" for n, why in reasons.items())
        raise _error(f"sets {found}, which cannot be done", *reasons)


def _error(problem: str, *names: str) -> ConfigError:
    unset = ", ".join(f"model.generation_config.{name} = None" for name in names)
    return ConfigError(
        f"the model's generation_config {problem}; go on with {unset}, or ignore all of it with "
        "LLM(..., generation_config=None)"
    )


def _eos_token_ids(config: Any, model: Any, tokenizer: Any) -> frozenset[int]:
    """Of the generation_config, else of the model's config, else of the tokenizer."""
    for source in (config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        try:
            return frozenset(_END_IDS.of("eos_token_id", ids))
        except ConfigError as error:
            if source is not config:
                raise
            raise _error(f"sets eos_token_id={shown(ids)}, but {error}", "eos_token_id") from error
    return frozenset()


def _with_defaults(
    given: SamplingParams, config: Any, eos: frozenset[int], prompt_length: int, room: int
) -> SamplingParams:
    def default(name: str, neutral: Any) -> Any:
        return _checked(config, name, DEFAULTS[name], neutral)

    if (max_tokens := given.max_tokens) is None:
        max_tokens = default("max_tokens", None)
        if max_tokens is None:
            max_length = _checked(config, "max_tokens", "max_length", None)
            if max_length is not None and max_length <= prompt_length:
                problem = f"sets max_length={max_length}, and the prompt has {prompt_length} tokens"
                raise _error(f"{problem}: pass max_tokens", "max_length")
            max_tokens = DEFAULT_MAX_TOKENS if max_length is None else max_length - prompt_length
        max_tokens = min(max_tokens, room)
    min_length = _checked(config, "min_tokens", "min_length", 0)
    min_tokens = default("min_tokens", max(0, min_length - prompt_length))
    defaults = {
        "temperature": default("temperature", 1.0) if _samples(config) else 0.0,
        "top_k": default("top_k", 0),
        "top_p": default("top_p", 1.0),
        "min_p": default("min_p", 0.0),
        "repetition_penalty": default("repetition_penalty", 1.0),
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        # transformers, too, never forbids a word that is an end token.
        "bad_words": [w for w in default("bad_words", ()) if len(w) > 1 or w[0] not in eos],
        "stop": default("stop", ()),
    }
    unset = {name: v for name, v in defaults.items() if getattr(given, name) in (None, ())}
    return dataclasses.replace(given, **unset)


def _samples(config: Any) -> bool:
    value = getattr(config, "do_sample", None)
    try:
        return value is not None and bool(FLAG.of("do_sample", value))
    except ConfigError as error:
        raise _error(f"sets do_sample={shown(value)}, but {error}", "do_sample") from error


def _checked(config: Any, name: str, field: str, neutral: Any) -> Any:
    """A field of generation_config, as SamplingParams would check it under that name."""
    if (value := getattr(config, field, None)) is None:
        return neutral
    try:
        return getattr(SamplingParams(**{name: value}), name)
    except ConfigError as error:
        raise _error(f"sets {field}={shown(value)}, but {error}", field) from error
