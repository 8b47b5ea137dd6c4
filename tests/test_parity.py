"""Greedy output is transformers' own, token by token, for every architecture we name."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import UnsupportedModelError
from draftahead.models.support import TESTED

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


def expected(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    if model.config.model_type == "phi3" and Version(transformers.__version__) < Version("5.22"):
        # Past longrope's switch, its generate feeds single tokens there: compare prefix by prefix.
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]
    return zoo.reference(model, prompt, NEW_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_greedy_equals_generate(name: str, dtype: torch.dtype) -> None:
    model = zoo.tiny(name, dtype=dtype)
    prompts = zoo.ragged_prompts(4)
    answers = [expected(model, prompt) for prompt in prompts]
    implementation = model.config._attn_implementation
    llm = LLM(model, drafter={"method": "lookup", "prompt_lookup_min": 1}, max_batch=4)
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts[:2]]
    together = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    assert alone == answers[:2]
    assert together == answers
    # The user's model is as it was: same attention, same text by its own generate.
    assert model.config._attn_implementation == implementation
    assert expected(model, prompts[0]) == answers[0]


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_models_that_cannot_roll_back_are_refused_by_name(name: str) -> None:
    model = zoo.tiny(name)
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        LLM(model)


def test_every_architecture_called_tested_is_tested() -> None:
    assert {zoo.tiny(name).config.model_type for name in zoo.ARCHITECTURES} == TESTED


def test_untested_architecture_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: a model that agrees is taken, one whose window we would miss is not."""
    from draftahead.kv import attention
    from draftahead.models import support

    monkeypatch.setattr(support, "TESTED", frozenset())
    LLM(zoo.tiny("mistral"))
    real = attention.grouped_attention

    def blind(*args: object, **kwargs: object) -> object:
        return real(*args, **{**kwargs, "sliding_window": None})  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "grouped_attention", blind)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        LLM(zoo.tiny("mistral"))
    monkeypatch.undo()
    attention.register({})


def test_longrope_is_rotated_anew_where_the_text_outgrows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deep drafts across the switch, rows on both sides of it, and a prefill in pieces."""
    from draftahead.models import runner
    from drafted import Clairvoyant

    monkeypatch.setattr(runner, "PREFILL_CHUNK", 5)
    model = zoo.tiny("phi3_longrope")
    prompts = zoo.ragged_prompts(4)
    answers = {tuple(prompt): expected(model, prompt) for prompt in prompts}
    llm = LLM(model, drafter=Clairvoyant(answers), max_batch=4)
    outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.acceptance_rate > 0.3 for out in outs)


def test_long_prompt_is_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftahead.models import runner

    model = zoo.tiny("gemma3")
    prompt = zoo.ragged_prompts(4)[3] * 3
    answer = zoo.reference(model, prompt, NEW_TOKENS)
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 7)
    assert LLM(model).generate(prompt, GREEDY)[0].token_ids == answer


def test_text_may_fill_the_context_to_its_last_position() -> None:
    """Learned positions end there; drafts and padding must not step over."""
    for name in ("gpt2", "opt", "llama"):
        model = zoo.tiny(name)
        prompt = zoo.ragged_prompts(1)[0]
        room = model.config.max_position_embeddings - len(prompt)
        llm = LLM(model, drafter={"method": "lookup", "prompt_lookup_min": 1}, max_batch=2)
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=room))[0]
        assert out.token_ids == zoo.reference(model, prompt, room)
