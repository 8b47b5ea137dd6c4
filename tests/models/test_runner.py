"""The user's model is as they gave it after every forward, also after one that raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.support import attention_configs
from llama_shaped import llama_shaped, needs_kernels, runner_of

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPT = [1, 2, 3]


@pytest.mark.parametrize("kernels", [True, False])
def test_the_users_model_is_not_changed(kernels: bool) -> None:
    model = llama_shaped("llama") if kernels else zoo.tiny("llama", dtype=torch.float32)
    before = zoo.reference(model, PROMPT, 16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    llm = LLM(model, "lookup")
    assert llm.engine.verifier.runner.batch_invariant == kernels
    llm.generate(PROMPT, GREEDY)
    assert zoo.reference(model, PROMPT, 16) == before
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def as_given(model: Any) -> list[Any]:
    """What a forward replaces for its time: attention, patched forwards, hooks."""
    return [
        [config._attn_implementation for config in attention_configs(model)],
        [vars(module).get("forward") for module in model.modules()],
        [dict(module._forward_hooks) for module in model.modules()],
    ]


class Broken:
    """A forward hook that raises when it is told to."""

    def __init__(self) -> None:
        self.error: type[BaseException] | None = None

    def __call__(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error("broken")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("what", ["forward", "layer subset", "auxiliary hidden states"])
def test_the_users_model_is_as_before_after_an_exception_in_its_forward(
    what: str, implementation: str, error: type[BaseException]
) -> None:
    model, broken = zoo.tiny("llama", dtype=torch.float32), Broken()
    model.set_attn_implementation(implementation)
    model.model.layers[1].register_forward_hook(broken)
    runner, before = runner_of(model), as_given(model)
    assert set(before[0]) == {implementation}
    layers = LayerSubset(model, (0, 1)) if what == "layer subset" else None
    if what == "auxiliary hidden states":
        runner.add_aux_layers((1, 3))
    broken.error = error
    with pytest.raises(error, match="broken"):
        runner.forward(torch.tensor([PROMPT]), layers=layers)
    assert as_given(model) == before
    broken.error = None
    runner.forward(torch.tensor([PROMPT]), layers=layers)
    assert as_given(model) == before


def test_an_llm_goes_on_after_an_exception_in_the_models_forward() -> None:
    model, broken = zoo.tiny("llama"), Broken()
    expected = zoo.reference(model, PROMPT, 16)
    model.model.layers[1].register_forward_hook(broken)
    llm, before = LLM(model, "lookup"), as_given(model)
    broken.error = RuntimeError
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate(PROMPT, GREEDY)
    assert as_given(model) == before
    broken.error = None
    assert zoo.reference(model, PROMPT, 16) == expected
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


@needs_kernels
@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_check_of_a_backend_installs_nothing(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the backend that was not checked nor the model without our linear layers stays."""
    runner = runner_of(llama_shaped("llama"))
    backend, calls = runner._backend, list[Any]()
    assert backend is not None
    forward = runner.forward

    def interrupted(tokens: Any, **options: Any) -> Any:
        if options.get("with_logits", True):
            calls.append(tokens)
        if len(calls) == call:
            raise KeyboardInterrupt
        return forward(tokens, **options)

    monkeypatch.setattr(runner, "forward", interrupted)
    runner._backend = None
    with pytest.raises(KeyboardInterrupt):
        runner._disagreement(0, backend)
    assert runner._backend is None
    assert runner._linears.enabled
    assert not runner.cache.tokens_in[0]
