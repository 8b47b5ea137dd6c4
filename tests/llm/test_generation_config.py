"""Every field of a model's generation_config is followed as `model.generate` follows it, changes
nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import zoo
from draftahead import LLM, Completion, SamplingParams
from draftahead.errors import ConfigError, NonFiniteLogitsError, ProcessorError
from draftahead.loader import generation_config
from drafted import KnowsOutput

PROMPT = zoo.ragged_prompts(3)[1]
# What both models follow in these tests where a case says nothing else.
BASE = {"max_new_tokens": 10, "top_k": 0}
SAMPLED = {"do_sample": True}


@contextmanager
def settings(*models: Any, **fields: Any) -> Iterator[None]:
    """The fields of the models' generation_config, for a time."""
    before = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig(pad_token_id=0, **{**BASE, **fields})
    try:
        yield
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The target again, for `generate`: nothing of ours has touched it."""
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def drafter() -> KnowsOutput:
    return KnowsOutput({})


@pytest.fixture(scope="module")
def drafting(target: Any, tokenizer: Any, drafter: KnowsOutput) -> LLM:
    return LLM(target, drafter, tokenizer=tokenizer, max_batch=3)


@pytest.fixture
def run(plain: LLM, drafting: LLM, drafter: KnowsOutput) -> Callable[..., Completion]:
    """Without drafting and with a drafter that knows the output: the same."""

    def generate(prompt: list[int] = PROMPT, **params: Any) -> Completion:
        asked = SamplingParams(seed=3, logprobs=zoo.VOCABULARY, **params)
        expected = plain.generate([prompt], asked)[0]
        drafter.answers = {tuple(prompt): expected.token_ids}
        found = drafting.generate([prompt], asked)[0]
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert found.stats.accepted > 0 or len(found.token_ids) < 3
        return found

    return generate


def assert_follows_generate(found: Completion, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` has the same distributions along the text, and ends it at the same token. What it
    would sample is replaced by what we did."""
    assert found.logprobs is not None
    tokens = iter(found.token_ids)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([[next(tokens)]]))
        out = model.generate(
            torch.tensor([found.prompt_token_ids]),
            attention_mask=torch.ones(1, len(found.prompt_token_ids), dtype=torch.int64),
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert out.sequences[0].tolist() == found.prompt_token_ids + found.token_ids
    for scores, logprob in zip(out.scores, found.logprobs, strict=True):
        expected = scores[0].log_softmax(-1)
        ours = torch.full_like(expected, -torch.inf)
        ours[list(logprob.top)] = torch.tensor(list(logprob.top.values()), dtype=expected.dtype)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # theirs: float32


# Greedy continuation of PROMPT, by `generate`: cases forbid or favour its tokens.
TEXT = zoo.reference(zoo.tiny("llama"), PROMPT, 10)
END = TEXT[6]  # as an end token it cuts the text short
WATERMARKS = {
    "lefthash": WatermarkingConfig(bias=4.0, greenlist_ratio=0.4),
    "selfhash": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2),
}
# Fields that are followed, and values that change the text.
FOLLOWED: dict[str, list[dict[str, Any]]] = {
    "do_sample": [{"do_sample": True}],
    "temperature": [{"temperature": 0.4, **SAMPLED}],
    "top_k": [{"top_k": 2, **SAMPLED}],
    "top_p": [{"top_p": 0.4, **SAMPLED}],
    "min_p": [{"min_p": 0.5, **SAMPLED}],
    "top_h": [
        {"top_h": 0.3, **SAMPLED},
        {"top_h": 0.2, "top_k": 3, "temperature": 0.8, **SAMPLED},  # in this order
    ],
    "typical_p": [
        {"typical_p": 0.3, **SAMPLED},
        {"typical_p": 0.5, "top_p": 0.7, "min_p": 0.02, **SAMPLED},
    ],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.2, **SAMPLED}],
    "eta_cutoff": [{"eta_cutoff": 0.3, **SAMPLED}],
    "repetition_penalty": [{"repetition_penalty": 3.0}],
    "encoder_repetition_penalty": [
        {"encoder_repetition_penalty": 2.5},
        {"encoder_repetition_penalty": 2.5, "repetition_penalty": 2.0},
    ],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 1}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 1}],
    "bad_words_ids": [{"bad_words_ids": [[TEXT[0]], TEXT[1:3], [END]], "eos_token_id": END}],
    "sequence_bias": [
        {"sequence_bias": {(TEXT[1],): -50.0, (TEXT[0], 7): 60.0}},
        {"sequence_bias": [[[PROMPT[0]], 5.0]], "repetition_penalty": 2.0},  # in this order
    ],
    "forced_bos_token_id": [{"forced_bos_token_id": 0}, {"forced_bos_token_id": 8}],
    "forced_eos_token_id": [
        {"forced_eos_token_id": 0},
        {"forced_eos_token_id": 1, "max_length": len(PROMPT) + 6, "max_new_tokens": None},
        {"forced_eos_token_id": [4, 9], "suppress_tokens": [9]},
    ],
    "exponential_decay_length_penalty": [
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5}
    ],
    "suppress_tokens": [{"suppress_tokens": TEXT[3:5]}],
    "begin_suppress_tokens": [
        {"begin_suppress_tokens": TEXT[:2]},
        {"begin_suppress_tokens": [8, 44], "forced_bos_token_id": 8},  # from the second token on
    ],
    "watermarking_config": [
        {"watermarking_config": watermark, **sampled, **others}
        for watermark in WATERMARKS.values()
        for sampled in ({}, SAMPLED)
        for others in ({}, {"repetition_penalty": 1.5, "typical_p": 0.6})
    ],
    "max_new_tokens": [{"max_new_tokens": 4}],
    "max_length": [{"max_length": len(PROMPT) + 5, "max_new_tokens": None}],
    "min_new_tokens": [{"min_new_tokens": 8, "eos_token_id": END, "min_length": 1}],
    "min_length": [{"min_length": len(PROMPT) + 8, "eos_token_id": END}],
    "eos_token_id": [{"eos_token_id": END}, {"eos_token_id": [END, TEXT[3]]}],
}
# Followed, but tested by itself below.
APART = {"remove_invalid_values", "stop_strings"}


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in FOLLOWED.items() for case in range(len(cases))],
)
def test_a_field_changes_the_text_as_it_does_for_generate(
    name: str,
    case: int,
    target: Any,
    theirs: Any,
    run: Callable[..., Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FOLLOWED[name][case]
    prompt = PROMPT[-1:] if "forced_bos_token_id" in fields else PROMPT
    others = {field: value for field, value in fields.items() if field != name}
    with settings(target, **others):
        without = run(prompt)
    with settings(target, theirs, **fields):
        found = run(prompt)
        assert_follows_generate(found, theirs, monkeypatch)
    assert (found.token_ids, found.finish_reason) != (without.token_ids, without.finish_reason)


def test_stop_strings_end_the_text(
    target: Any, tokenizer: Any, run: Callable[..., Completion]
) -> None:
    with settings(target, stop_strings=f"<{TEXT[4]}>"):
        found = run()
        assert (found.finish_reason, found.token_ids) == ("stop", TEXT[:5])
        assert run(stop=f"<{TEXT[2]}>").token_ids == TEXT[:3]
        without_tokenizer = LLM(target, drafter="none")
        with pytest.raises(ConfigError, match=r"stop_strings='<60>' \(it needs a tokenizer"):
            without_tokenizer.generate(PROMPT)


def test_invalid_values_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that computes NaN for one token fails without it."""
    model, reference = zoo.tiny("llama"), zoo.tiny("llama")
    llm = LLM(model, KnowsOutput({tuple(PROMPT): TEXT}))
    for one in (model, reference):
        with torch.no_grad():
            one.get_output_embeddings().weight[7] = torch.nan
    with settings(model), pytest.raises(NonFiniteLogitsError):
        llm.generate(PROMPT)
    with settings(model, reference, remove_invalid_values=True):
        found = llm.generate(PROMPT, SamplingParams(logprobs=zoo.VOCABULARY))[0]
        assert found.stats.accepted
        assert_follows_generate(found, reference, monkeypatch)


# ------------------------------------------------------------------------- harmless, refused

# Values that change nothing, neither here nor in `generate`.
HARMLESS: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "low_memory": True,
    "renormalize_logits": True,
    "use_mtp": False,
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.0,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 2,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
    "speculation_type": "dflash",
    "use_cache": False,
    "cache_config": {"max_cache_len": 64},
    "max_cache_len": 64,
    "prefill_chunk_size": 4,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": {"block_size": 4},
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 3,
    "bos_token_id": 5,
    "decoder_start_token_id": 5,
    "transformers_version": "5.0.0",
    "_from_model_config": True,
    "_commit_hash": "0" * 40,
}
REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "constraints": ["any"],
    "force_words_ids": [[5]],
    "guidance_scale": 1.5,
    "token_healing": True,
    "num_return_sequences": 2,
    "max_time": 2.0,
    "cache_implementation": "quantized",
    "assistant_ensemble_weight": 0.5,
    "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[4, 5]),
}


def test_every_field_is_followed_harmless_or_refused() -> None:
    """A field that a later transformers adds must be put into one of the tables."""
    tables = generation_config
    followed = {*tables.DEFAULTS.values(), *tables.READ_BESIDE_DEFAULTS, *tables.PROCESSORS}
    kinds = [followed, set(tables.REFUSED), set(tables.HARMLESS)]
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    assert set(vars(GenerationConfig())) <= set.union(*kinds)
    assert followed == {*FOLLOWED, *APART}
    assert set(tables.REFUSED) == {*REFUSED} - {"watermarking_config"}
    assert set(tables.HARMLESS) == {*HARMLESS}
    assert set(tables.NEUTRAL) <= {*followed, *tables.REFUSED}


def test_every_field_that_matters_is_a_sampling_parameter_or_has_advice() -> None:
    """For those who pass it to generate(...) as they would to transformers'."""
    matter = generation_config.KNOWN - generation_config.HARMLESS
    assert matter <= {*vars(SamplingParams()), *SamplingParams.advice}


def test_the_documentation_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "generation_config.md").read_text()
    assert not [name for name in generation_config.KNOWN if f"`{name}`" not in page]


def test_harmless_fields_change_nothing(target: Any, run: Callable[..., Completion]) -> None:
    with settings(target):
        for name, value in HARMLESS.items():
            setattr(target.generation_config, name, value)
        assert run().token_ids == TEXT


def test_neutral_values_change_nothing(target: Any, run: Callable[..., Completion]) -> None:
    with settings(target, num_return_sequences=1.0):
        for name, values in generation_config.NEUTRAL.items():
            for value in values:
                setattr(target.generation_config, name, value)
        assert run().token_ids == TEXT
        target.generation_config.cache_implementation = "static"
        assert run(temperature=1.0).token_ids != TEXT


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_followed_is_refused_by_name(
    name: str, target: Any, plain: LLM
) -> None:
    with settings(target):
        setattr(target.generation_config, name, REFUSED[name])
        with pytest.raises(ConfigError, match=rf"{name}=.*, or ignore all of it") as failed:
            plain.generate(PROMPT)
        assert f"model.generation_config.{name} = None" in str(failed.value)
        assert (
            LLM(target, "none", generation_config=None)
            .generate(PROMPT, SamplingParams(max_tokens=10))[0]
            .token_ids
            == TEXT
        )
        setattr(target.generation_config, name, None)
        assert plain.generate(PROMPT)[0].token_ids == TEXT


@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_token_id", 0.5), ("eos_token_id", "2"), ("eos_token_id", [2, "3"]), ("do_sample", "no")],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(
    field: str, value: Any, target: Any, plain: LLM
) -> None:
    with settings(target):
        setattr(target.generation_config, field, value)
        with pytest.raises(ConfigError, match=f"sets {field}=.*, but {field} must be"):
            plain.generate(PROMPT)


def test_what_is_no_generation_config_is_refused(target: Any, plain: LLM) -> None:
    """Its fields would not be found, and so not followed."""
    before = target.generation_config
    try:
        target.generation_config = {"temperature": 0.5}
        with pytest.raises(ConfigError, match="must be a GenerationConfig or None"):
            plain.generate(PROMPT)
        target.generation_config = None
        assert plain.generate(PROMPT, max_tokens=10)[0].token_ids == TEXT
    finally:
        target.generation_config = before


def test_all_refused_fields_are_named_at_once(target: Any, plain: LLM) -> None:
    named = r"num_beams=4 \(.*\), max_time=1.0 \(.*\), which"
    with settings(target, num_beams=4, max_time=1.0), pytest.raises(ConfigError, match=named):
        plain.generate(PROMPT)


def test_a_field_of_a_later_transformers_is_refused_if_it_is_set(
    target: Any, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(GenerationConfig):
        def __init__(self, **fields: Any) -> None:
            self.top_z = fields.pop("top_z", None)
            super().__init__(**fields)

    monkeypatch.setattr(generation_config, "GenerationConfig", Later)
    generation_config.unknown_fields.cache_clear()
    try:
        with settings(target):
            target.generation_config.chat_format = "a field of the model's own code"
            assert plain.generate(PROMPT)[0].token_ids == TEXT
            target.generation_config.top_z = 0.5
            with pytest.raises(ConfigError, match=r"top_z=0.5 \(this version does not know it\)"):
                plain.generate(PROMPT)
    finally:
        generation_config.unknown_fields.cache_clear()


WRONG = ("x", -5, [1.5], object(), {"a": 1}, 10**9)


@pytest.mark.parametrize(
    "name", sorted({*FOLLOWED, "stop_strings"} - {"do_sample", "eos_token_id"})
)
def test_a_value_that_is_wrong_is_refused_by_name_or_has_no_effect(
    name: str, target: Any, plain: LLM
) -> None:
    refused, max_tokens = 0, None if name.startswith("max_") else 2
    for value in WRONG:
        with settings(target, do_sample=True, max_new_tokens=None):
            setattr(target.generation_config, name, value)
            try:
                plain.generate(PROMPT[-1:], SamplingParams(max_tokens=max_tokens))
            except ConfigError as error:
                assert name in str(error)
                refused += 1
            except ProcessorError:  # a few classes check their values only when they are applied
                pass
    assert refused


# ------------------------------------------------------------------ what wins over what


def test_sampling_parameters_win_over_the_generation_config(
    target: Any, run: Callable[..., Completion]
) -> None:
    fields: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.3,
        "repetition_penalty": 2.0,
        "max_length": 3,
        "min_length": 99,
        "bad_words_ids": [[TEXT[0]]],
        "stop_strings": f"<{TEXT[1]}>",
        "eos_token_id": END,
    }
    asked: dict[str, Any] = {"max_tokens": 10, "min_tokens": 0, "bad_words": [[0]], "stop": "x"}
    asked |= {"temperature": 0, "repetition_penalty": 1.0}
    with settings(target, **fields):
        assert run(**asked).token_ids == TEXT[:7]
        assert run(**asked, ignore_eos=True).token_ids == TEXT


def test_a_processor_of_the_users_takes_the_place_of_the_models(
    target: Any, theirs: Any, run: Callable[..., Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same class, as in transformers."""
    bias = {"sequence_bias": {(TEXT[0],): 30.0}, "no_repeat_ngram_size": 1}
    own = [NoRepeatNGramLogitsProcessor(2), SequenceBiasLogitsProcessor({(PROMPT[0],): 9.0})]
    with settings(target, repetition_penalty=2.0, **bias):
        found = run(processors=own)
    with settings(
        theirs, repetition_penalty=2.0, sequence_bias={(PROMPT[0],): 9.0}, no_repeat_ngram_size=2
    ):
        assert_follows_generate(found, theirs, monkeypatch)


def test_a_prompt_that_reaches_max_length_is_refused(target: Any, plain: LLM) -> None:
    with settings(target, max_length=len(PROMPT), max_new_tokens=None):
        with pytest.raises(ConfigError, match="max_length=11, and the prompt has 11 tokens: pass"):
            plain.generate(PROMPT)
        assert len(plain.generate(PROMPT[1:])[0].token_ids) == 1
        assert plain.generate(PROMPT, SamplingParams(max_tokens=3))[0].token_ids == TEXT[:3]
        target.generation_config.max_new_tokens = 4
        assert plain.generate(PROMPT)[0].token_ids == TEXT[:4]


def test_lengths_of_the_model_are_cut_to_the_context(target: Any, plain: LLM) -> None:
    context = plain.engine.verifier.max_context
    for fields in ({"max_new_tokens": 10**6}, {"max_length": 10**6, "max_new_tokens": None}):
        with settings(target, min_length=10**6, **fields):
            found = plain.generate(PROMPT)[0]
            assert len(PROMPT) + len(found.token_ids) == context


# --------------------------------------------------------------------- generation_config=None


def test_without_generation_config_only_end_tokens_of_config_and_tokenizer_count() -> None:
    model = zoo.tiny("llama")
    model.generation_config = GenerationConfig(
        eos_token_id=TEXT[1], do_sample=True, max_new_tokens=3, num_beams=4, suppress_tokens=TEXT
    )
    llm = LLM(model, "none", generation_config=None)
    assert llm.generate(PROMPT)[0].token_ids[:10] == TEXT
    assert len(llm.generate(PROMPT)[0].token_ids) == zoo.POSITIONS - len(PROMPT)
    model.config.eos_token_id = END
    assert llm.generate(PROMPT)[0].token_ids == TEXT[:7]
    assert llm.with_drafter("lookup").generate(PROMPT)[0].token_ids == TEXT[:7]


def test_generation_config_is_model_or_none(target: Any) -> None:
    with pytest.raises(ConfigError, match="generation_config must be 'model', not 'models'"):
        LLM(target, "none", generation_config="models")
