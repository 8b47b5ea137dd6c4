"""On a CUDA device: the same parity, the same losslessness. Not run in CI, which has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Sampling, errors
from drafted import ALL, Clairvoyant

pytestmark = pytest.mark.gpu
GREEDY = Sampling(temperature=0, max_tokens=32)
WARM = Sampling(temperature=0.9, top_p=0.95, max_tokens=32, seed=3)


def tiny(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return zoo.tiny(name, dtype=dtype).to("cuda")


@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n != "phi3_longrope"])
def test_greedy_equals_generate(name: str) -> None:
    model, prompts = tiny(name), zoo.ragged_prompts(4)
    answers = {tuple(p): zoo.reference(model, p, 32) for p in prompts}
    for drafter in (Clairvoyant(answers), "lookup"):
        outs = LLM(model, drafter, max_batch=4).generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == list(answers.values())


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lookup", "garbage_tree", "draft_model_self"])
def test_replay(name: str, dtype: torch.dtype, sampling: Sampling) -> None:
    """Equal to plain decoding to the last bit, or refused."""
    model, prompts = tiny("llama", dtype), zoo.ragged_prompts(3)
    try:
        plain = LLM(model, "none", exact="replay", max_batch=3).generate(prompts, sampling)
    except errors.ReplayUnsupportedError as refused:
        pytest.skip(str(refused))
    llm = LLM(model, ALL[name](model), exact="replay", max_batch=3)
    assert [o.token_ids for o in llm.generate(prompts, sampling)] == [o.token_ids for o in plain]


def test_noise_is_the_same_on_every_device() -> None:
    from draftahead.sampling import hash_key, uniforms

    keys = [hash_key(i) for i in range(8)]
    assert torch.equal(uniforms(keys, 5000, "cuda").cpu(), uniforms(keys, 5000))
