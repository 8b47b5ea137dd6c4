"""Over quantized weights no drafter changes the output, in any arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_gguf
from draftahead import LLM, SamplingParams
from draftahead.loader.stored import ACTIVATIONS
from drafted import Garbage, GarbageTree, KnowsOutput
from llama_shaped import needs_kernels

pytestmark = needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=11)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13] * 20]
DRAFTERS: dict[str, Any] = {
    "garbage": lambda path: Garbage(tiny_gguf.VOCABULARY),
    "garbage tree": lambda path: GarbageTree(tiny_gguf.VOCABULARY),
    "lookup": lambda path: {"method": "lookup", "num_speculative_tokens": 3},
    "suffix": lambda path: "suffix",
    "recycle": lambda path: {"method": "recycle", "num_speculative_tokens": 7},
    "early_exit": lambda path: {"method": "early_exit", "layers": 1, "num_speculative_tokens": 3},
    "draft_model": lambda path: {
        "method": "draft_model",
        "model": str(path),
        "num_speculative_tokens": 5,
    },
    "auto": lambda path: "auto",
}


@pytest.fixture(scope="module", params=["Q4_K", "Q8_0"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("stored") / "tiny.gguf", request.param)


@pytest.fixture(scope="module", params=ACTIVATIONS)
def plain(request: pytest.FixtureRequest, path: Path) -> LLM:
    """Plain decoding in replay mode."""
    options = {"max_batch": 2, "activations": request.param, "device": "cpu", "exact": "replay"}
    llm = LLM(str(path), "none", **options)
    assert llm.engine.verifier.runner.batch_invariant
    return llm


def test_it_says_how_it_multiplies(plain: LLM, path: Path) -> None:
    (line,) = [line for line in plain.describe() if line.startswith("activations: ")]
    name = plain.config.activations
    assert line == f"activations: {name} ({ACTIVATIONS[name]})"
    widened = LLM(str(path), "none", max_batch=1, dtype="float32", device="cpu")
    assert not any(line.startswith("activations: ") for line in widened.describe())


def outputs(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params)]


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", PARAMS)
def test_output_is_that_of_plain_decoding(name: str, params: str, plain: LLM, path: Path) -> None:
    drafted = plain.with_drafter(DRAFTERS[name](path))
    assert outputs(drafted, PARAMS[params]) == outputs(plain, PARAMS[params])


@pytest.mark.usefixtures("generous_policy")
def test_nodes_deep_in_trees_are_accepted(plain: LLM) -> None:
    expected = outputs(plain, GREEDY)
    answers = {tuple(p): text for p, text in zip(PROMPTS, expected, strict=True)}
    drafted = plain.with_drafter(KnowsOutput(answers), exact="distribution")
    outs = drafted.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == expected
    assert all(out.stats.mean_acceptance_length > 3 for out in outs if len(out.token_ids) > 9)


def test_batch_mates_change_nothing(plain: LLM) -> None:
    alone = [plain.generate([prompt], SAMPLED)[0].token_ids for prompt in PROMPTS]
    assert outputs(plain, SAMPLED) == alone


def test_a_draft_model_of_the_same_file_is_always_right(plain: LLM, path: Path) -> None:
    """Target and draft model share kernels and panels: their logits have the same bits."""
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}
    out = plain.with_drafter(config).generate([PROMPTS[0]], GREEDY)[0]
    assert out.stats.acceptance_rate == 1.0
