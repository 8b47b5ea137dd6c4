"""With rounded keys and values no drafter changes the output either, in the CPU kernels and in
transformers' forward."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError
from draftahead.kv.formats import KV_CACHE_DTYPES
from drafted import ALL, KnowsOutput
from emulated_gpu import emulated_gpu
from llama_shaped import llama_shaped, needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=11)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}
PROMPTS = zoo.ragged_prompts(3)
TARGETS: dict[str, Any] = {
    "kernels": lambda: llama_shaped("llama"),
    "transformers": lambda: zoo.tiny("llama"),
}


def outputs(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((target, dtype), marks=needs_kernels if target == "kernels" else ())
        for target in TARGETS
        for dtype in KV_CACHE_DTYPES
    ],
    ids="-".join,
)
def rounded(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A target, options, and the output of plain decoding in replay mode."""
    target, dtype = request.param
    model = TARGETS[target]()
    options = {"kv_cache_dtype": dtype, "max_batch": 2, "exact": "replay"}
    plain = LLM(model, "none", **options)
    assert plain.engine.verifier.runner.batch_invariant == (target == "kernels")
    assert plain.engine.verifier.cache.stored_dtype == KV_CACHE_DTYPES[dtype]
    return model, options, {name: outputs(plain, PARAMS[name]) for name in PARAMS}


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", ALL)
def test_output_is_that_of_plain_decoding(name: str, rounded: Any) -> None:
    model, options, plain = rounded
    llm = LLM(model, ALL[name](model), **options)
    for params in PARAMS:
        assert outputs(llm, PARAMS[params]) == plain[params]


@pytest.mark.usefixtures("generous_policy")
def test_nodes_deep_in_trees_are_accepted(rounded: Any) -> None:
    """Their rows are moved in the cache, and read by what follows."""
    model, options, plain = rounded
    answers = {tuple(p): text for p, text in zip(PROMPTS, plain["greedy"], strict=True)}
    llm = LLM(model, KnowsOutput(answers), **options | {"exact": "distribution"})
    outs = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == plain["greedy"]
    assert all(out.stats.mean_acceptance_length > 3 for out in outs)


def test_rounding_is_no_pretence(rounded: Any) -> None:
    """Logits differ from those of exact keys, and little."""
    model, options, _ = rounded
    both = [
        LLM(model, "none", **options | {"kv_cache_dtype": dtype}).generate(
            [PROMPTS[2]], max_tokens=1, temperature=0, logprobs=5
        )[0]
        for dtype in (options["kv_cache_dtype"], None)
    ]
    (ours,), (exact,) = (out.logprobs or [] for out in both)
    assert 0 < abs(ours.logprob - exact.logprob) < 0.1


def test_describe_names_the_format_and_a_second_engine_keeps_it(rounded: Any) -> None:
    model, options, _ = rounded
    llm = LLM(model, "none", **options)
    line = next(line for line in llm.describe() if line.startswith("KV cache"))
    assert line.startswith(f"KV cache: {options['kv_cache_dtype']}, 2 slots of ")
    assert llm.with_drafter("lookup").engine.verifier.cache.stored_dtype == (
        llm.engine.verifier.cache.stored_dtype
    )


def test_memory_of_a_rounded_cache() -> None:
    model = zoo.tiny("llama")
    dims = LLM(model, "none", max_batch=2).engine.verifier.cache.shapes
    numbers = sum(s.num_key_heads * s.key_dim + s.num_value_heads * s.value_dim for s in dims)
    dim = dims[0].key_dim
    for dtype, per_number in (
        (None, model.dtype.itemsize),
        ("bfloat16", 2.0),
        ("int8", 1 + 4 * -(-dim // 32) / dim),
    ):
        cache = LLM(model, "none", max_batch=2, kv_cache_dtype=dtype).engine.verifier.cache
        assert cache.bytes == numbers * per_number * 2 * cache.num_entries
        assert cache.bytes == sum(stored.nbytes for stored in cache.tensors())


@pytest.mark.parametrize("wrong", ["fp8", "float32", "auto", 8])
def test_a_dtype_that_does_not_exist_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'bfloat16' or 'int8', not "):
        LLM(zoo.tiny("llama"), "none", kv_cache_dtype=wrong)


def test_a_gpu_keeps_keys_and_values_in_the_dtype_of_the_model() -> None:
    with emulated_gpu(), pytest.raises(ConfigError, match=r"for models on a CPU.*leave it out"):
        LLM(zoo.tiny("llama"), "none", kv_cache_dtype="int8")
