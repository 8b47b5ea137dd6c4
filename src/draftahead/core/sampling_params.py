"""The sampling parameters of a request, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from draftahead.core.checks import (
    FLAG,
    FUNCTION,
    TEXT,
    TOKEN_IDS,
    Kind,
    Parameters,
    as_list,
    list_of,
    mapping_of,
    number,
    shown,
    whole,
)
from draftahead.errors import ConfigError

# A smaller repetition penalty could take a logit beyond float32.
SMALLEST_PENALTY = 1e-6
# The smallest normal float32. A temperature or top-p below it has the same distribution, and must
# not become 0 on the way to a kernel.
SMALLEST = 2.0**-126
# A bias that leaves a finite float32, whatever penalty multiplies it.
LARGEST_BIAS = 1e30


def _temperature(value: Any) -> float:
    plain: float = number(0, 1e4).read(value)
    return max(plain, SMALLEST) if plain else 0.0


def _top_p(value: Any) -> float:
    plain: float = number(0, 1).read(value)
    return max(plain, SMALLEST)  # the most likely token always stays


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (TEXT.read(value),) if value else ()
    return tuple(list_of(TEXT, "").read(value))


def _bad_word(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return str(TEXT.read(value))
    return tuple(list_of(whole(), "", at_least=1).read(value))


_KINDS = {
    "temperature": Kind("a number from 0 (greedy) to 10000", _temperature),
    "top_k": Kind(
        "a whole number, 1 or more, or 0 or -1 (all)", lambda value: max(0, whole(-1).read(value))
    ),
    "top_p": Kind("a number from 0 to 1", _top_p),
    "min_p": number(0, 1),
    "repetition_penalty": number(SMALLEST_PENALTY, 1e4, "1 is off"),
    "presence_penalty": number(-100, 100),
    "frequency_penalty": number(-100, 100),
    "logit_bias": mapping_of(
        whole(),
        number(-math.inf, LARGEST_BIAS),
        f"a number, at most {LARGEST_BIAS}, for each of some token ids",
    ),
    "bad_words": list_of(
        Kind("", _bad_word), "a list of words that are not empty, as text or token ids"
    ),
    "min_tokens": whole(0),
    "max_tokens": whole(0),
    "stop": Kind("text that is not empty, or a list of it", _stop),
    "stop_token_ids": TOKEN_IDS,
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "n": whole(1, 2**14),
    "seed": whole(),
    "logprobs": whole(0),
    "prompt_logprobs": whole(0),
    "raw_logprobs": FLAG,
    "processors": list_of(FUNCTION, "a list of LogitsProcessors"),
}

_BEAMS = "beam search is not supported; samples of their own are n"
_PROCESSOR = (
    "set it on model.generation_config, or pass the LogitsProcessor of transformers in processors"
)
_UNSUPPORTED = "it is not supported: docs/generation_config.md says why"
_SPECULATION = "how to draft is said once, by the drafter of LLM(model, drafter=...)"
_SPECIAL = "special tokens are left out of the text; they are in token_ids"
_OF_LLM = "it is an option of LLM"
# What to write for names of vLLM and transformers.
_ADVICE = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "write max_tokens"),
    "max_length": "write max_tokens, which counts the output without the prompt",
    **dict.fromkeys(("min_new_tokens", "min_length"), "write min_tokens"),
    "do_sample": "temperature=0 is greedy, any other samples",
    "num_return_sequences": "write n",
    "best_of": "take n samples and choose among them, for example by their logprobs",
    **dict.fromkeys(("num_beams", "use_beam_search", "beam_width", "early_stopping"), _BEAMS),
    **dict.fromkeys(("length_penalty", "diversity_penalty", "num_beam_groups"), _BEAMS),
    "top_logprobs": "write logprobs",
    **dict.fromkeys(("output_scores", "output_logits"), "write logprobs"),
    **dict.fromkeys(("logits_processors", "logits_processor"), "write processors"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "write stop"),
    "eos_token_id": "write stop_token_ids",
    "bad_words_ids": "write bad_words",
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), _PROCESSOR),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _PROCESSOR),
    **dict.fromkeys(("encoder_repetition_penalty", "sequence_bias"), _PROCESSOR),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _PROCESSOR),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty"), _PROCESSOR),
    **dict.fromkeys(("remove_invalid_values", "watermarking_config"), _PROCESSOR),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints"), _UNSUPPORTED),
    **dict.fromkeys(("force_words_ids", "guidance_scale", "token_healing"), _UNSUPPORTED),
    **dict.fromkeys(("max_time", "assistant_ensemble_weight"), _UNSUPPORTED),
    "cache_implementation": "the KV cache is draftahead's own: leave it out",
    "truncate_prompt_tokens": "shorten the prompt before",
    "suppress_tokens": "give them a logit_bias of -inf",
    "allowed_token_ids": "pass a LogitsProcessor in processors",
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format"),
        "pass a LogitsProcessor of a grammar library in processors",
    ),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _SPECIAL),
    "detokenize": "pass a loaded model without its tokenizer to LLM for ids alone",
    **dict.fromkeys(("stream", "streamer"), "use the method stream of LLM"),
    "use_tqdm": "there is no progress bar to switch off: leave it out",
    "lora_request": "merge the adapter into the model first",
    "generation_config": "give its fields as parameters of their own",
    **dict.fromkeys(
        ("prompt", "prompts", "messages", "prompt_token_ids", "inputs"), "it is the first argument"
    ),
    "attention_mask": "prompts are not padded: leave it out",
    "input_ids": "give the token ids as the prompt",
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "num_assistant_tokens", "num_draft_tokens"),
        _SPECULATION,
    ),
    **dict.fromkeys(("speculative_config", "num_speculative_tokens", "drafter"), _SPECULATION),
    **dict.fromkeys(("exact", "lossless", "max_context", "max_batch", "tokenizer"), _OF_LLM),
    **dict.fromkeys(("max_model_len", "max_num_seqs"), f"{_OF_LLM}: max_context, max_batch"),
    "reuse": "it is an argument of the method stream of LLM",
    "errors": "it is an argument of the method generate of LLM",
    "echo": "the prompt is Completion.prompt",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams(Parameters):
    """How a request samples tokens, along the path of every node of a draft. A field left at None
    follows the model's generation_config."""

    owner: ClassVar = "SamplingParams"
    kinds: ClassVar = _KINDS
    advice: ClassVar = _ADVICE

    temperature: float | None = None  # 0 is greedy: argmax, lowest id on ties
    top_k: int | None = None  # 0, or -1, keeps all
    top_p: float | None = None  # 1 is off; 0 keeps the most likely token
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output, as is the next one
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()  # text or token ids that are never emitted
    min_tokens: int | None = None  # the output does not end before so many tokens
    max_tokens: int | None = None  # 0 generates nothing: for prompt_logprobs
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False  # the text ends behind the stop, not before it
    ignore_eos: bool = False
    n: int = 1  # samples of a prompt
    seed: int | None = None  # None: a fresh one, found in Completion.seed
    logprobs: int | None = None  # how many of the most likely tokens; 0: the chosen one only
    raw_logprobs: bool = False  # of the model's own logits, not of the distribution sampled from
    # The same of each token of the prompt but the first, always of the model's own logits. With
    # max_tokens=0 they are all that is computed.
    prompt_logprobs: int | None = None
    # transformers LogitsProcessors. They are called with the whole path of a node and must be
    # stateless: drafted paths that are rejected pass through them too.
    processors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_tokens
        if self.min_tokens and most is not None and self.min_tokens > most:
            raise ConfigError(
                f"min_tokens ({shown(self.min_tokens)}) must not exceed max_tokens ({shown(most)})"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def modifies_logits(self) -> bool:
        """Whether the logits of a node are changed before temperature and truncation: by penalties,
        min_tokens, a bias, or a processor of the user's."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in (None, 1.0)
            or self.logit_bias
            or self.processors
            or self.min_tokens
        )


GivenParams = SamplingParams | Mapping[str, Any] | None
_FORMS = "SamplingParams, a dictionary of its parameters, or a list of one for each prompt"


def params_of(given: Any, named: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts: those given for all, for each, or by name."""
    if named and given is not None:
        raise ConfigError(f"give sampling_params or {next(iter(named))}=, not both")
    if given is None or isinstance(given, SamplingParams | Mapping):
        return [_params(named if given is None else given)] * count
    try:
        found = list(as_list(given))
    except Exception:
        raise ConfigError(f"sampling_params must be {_FORMS}, not {shown(given)}") from None
    if len(found) != count:
        raise ConfigError(f"{len(found)} sampling_params for {count} prompts")
    return [_params({} if one is None else one) for one in found]


def _params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    try:
        named = {TEXT.read(name): value for name, value in given.items()}
    except Exception:
        raise ConfigError(f"sampling_params must be {_FORMS}, not {shown(given)}") from None
    return SamplingParams(**named)
