"""A model that its owner changes after LLM(): its texts are those of the model as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import (
    ConfigError,
    NonFiniteLogitsError,
    ReplayUnsupportedError,
    UnsupportedModelError,
)
from llama_shaped import llama_shaped, needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPT = zoo.ragged_prompts(4)[3]
Patch = pytest.MonkeyPatch


class Adapted(nn.Linear):
    """A linear layer with adapters that are switched by an attribute, as PEFT's are."""

    active = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * {"none": 1.0, "one": -1.2, "two": 0.3}[self.active]


def louder(self: Any, x: torch.Tensor) -> torch.Tensor:
    return -0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def patched_class(model: Any, patch: Patch) -> None:
    patch.setattr(LlamaMLP, "forward", louder)


def global_hook(model: Any, patch: Patch) -> None:
    def hook(module: Any, args: Any, out: Any) -> Any:
        return -out if isinstance(module, LlamaMLP) else None

    patch.setitem(torch_module._global_forward_hooks, 0, hook)


def hook_on_a_layer(model: Any, patch: Patch) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)


def scaling(model: Any, patch: Patch) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def epsilon(model: Any, patch: Patch) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 5.0
        layer.post_attention_layernorm.variance_epsilon = 5.0
    model.model.norm.variance_epsilon = 5.0


def weights_in_place(model: Any, patch: Patch) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)


def weights_through_data(model: Any, patch: Patch) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data *= -1


def adapter(model: Any, patch: Patch) -> None:
    linear = model.model.layers[0].self_attn.v_proj
    linear.__class__, linear.active = Adapted, "one"


# With the backend that runs the model then.
CHANGES: dict[str, tuple[Callable[[Any, Patch], None], str]] = {
    "a forward patched on the class": (patched_class, "transformers"),
    "a global hook": (global_hook, "transformers"),
    "a hook": (hook_on_a_layer, "transformers"),
    "an adapter": (adapter, "transformers"),
    "attention's scaling": (scaling, "cpu kernels"),
    "norms' epsilon": (epsilon, "cpu kernels"),
    "weights in place": (weights_in_place, "cpu kernels"),
    "weights through data": (weights_through_data, "cpu kernels"),
}


def streamed(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    """With the KV entries that the stream before left."""
    chunks = llm.stream(prompt, GREEDY, reuse=True)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("by", [pytest.param("cpu kernels", marks=needs_kernels), "transformers"])
@pytest.mark.parametrize("kind", CHANGES)
def test_texts_are_those_of_the_model_as_it_is(kind: str, by: str, monkeypatch: Patch) -> None:
    change, backend = CHANGES[kind]
    model = llama_shaped("llama") if by == "cpu kernels" else zoo.tiny("llama", torch.float32)
    llm = LLM(model, "lookup", max_batch=2)
    before = zoo.reference(model, PROMPT, 16)
    runner = llm.engine.verifier.runner
    assert runner.backend_choice.name == by
    assert streamed(llm) == streamed(llm) == before
    change(model, monkeypatch)
    after = zoo.reference(model, PROMPT, 16)
    assert after != before  # else it shows nothing
    assert streamed(llm) == streamed(llm) == after
    assert llm.generate([PROMPT, PROMPT[3:]], GREEDY)[0].token_ids == after
    assert runner.backend_choice.name == (backend if by == "cpu kernels" else by)


@needs_kernels
def test_the_kernels_run_again_when_the_change_is_undone(monkeypatch: Patch) -> None:
    model = llama_shaped("llama")
    llm, before = LLM(model, "lookup", max_batch=2), zoo.reference(model, PROMPT, 16)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", louder)
        assert streamed(llm) == zoo.reference(model, PROMPT, 16)
        assert not llm.engine.verifier.runner.batch_invariant
    assert streamed(llm) == before
    assert llm.engine.verifier.runner.batch_invariant


def test_switched_adapters_do_not_read_each_others_entries() -> None:
    model = zoo.tiny("llama", torch.float32)
    linear: Any = model.model.layers[0].self_attn.v_proj
    linear.__class__ = Adapted
    llm, texts = LLM(model, "lookup", max_batch=2), []
    for linear.active in ("one", "two", "one", "none", "two"):
        texts.append(streamed(llm))
        assert texts[-1] == zoo.reference(model, PROMPT, 16)
    assert texts[0] == texts[2] != texts[1] == texts[4]


def test_a_change_between_chunks_takes_effect_with_the_next_prompt() -> None:
    """Sequences that run then are computed anew with the model as it is."""
    model, other = llama_shaped("llama"), [3, 1, 4, 1, 5]
    llm = LLM(model, "lookup", max_batch=2)
    stream = llm.stream(PROMPT, GREEDY)
    first = list(next(stream).token_ids)
    model.model.layers[0].self_attn.scaling = 0.9
    assert llm.generate(other, GREEDY)[0].token_ids == zoo.reference(model, other, 16)
    rest = [token for chunk in stream for token in chunk.token_ids]
    done = len(first)
    # Some tokens were made beside the other prompt, all of them with the changed model.
    assert rest == zoo.reference(model, PROMPT + first, 16 - done)


class Overriding(LlamaForCausalLM):
    """A subclass that changes logits by less than a comparison at load would show."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits[..., 5] += 2.0
        return output


def test_the_forward_of_a_subclass_is_called() -> None:
    model = llama_shaped("llama")
    plain = zoo.reference(model, PROMPT, 16)
    model.__class__ = Overriding
    model.lm_head.weight *= 0.2
    expected = zoo.reference(model, PROMPT, 16)
    llm = LLM(model, "lookup")
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected != plain
    reason = llm.engine.verifier.runner.backend_choice.reason
    assert "Overriding is not a class of transformers or torch" in reason


def test_autocast_goes_through_the_models_own_forward() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup", max_batch=2)
    runner = llm.engine.verifier.runner
    before = llm.generate(PROMPT, GREEDY)[0].token_ids
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert len(streamed(llm)) == 16
        assert "torch.autocast is on" in runner.backend_choice.reason
        runner.prefill(0, PROMPT)
        ours = runner.forward(torch.tensor([[7]])).logits[0, 0].float()
        theirs = model(torch.tensor([[*PROMPT, 7]])).logits[0, -1].float()
    exact = model(torch.tensor([[*PROMPT, 7]])).logits[0, -1]
    assert (theirs - exact).norm() / exact.norm() > 1e-3
    assert (ours - exact).norm() / exact.norm() > 1e-3
    assert (ours - theirs).norm() / theirs.norm() < 0.15
    assert streamed(llm) == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made_there = LLM(model, "lookup")
    assert made_there.generate(PROMPT, GREEDY)[0].token_ids == before


CASTS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.double(),
}


@pytest.mark.parametrize("kind", CASTS)
def test_a_cast_needs_a_new_llm(kind: str) -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup")
    CASTS[kind](model)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"it is torch.{kind} on cpu now.*make a new LLM"):
            llm.generate(PROMPT, GREEDY)
    model.float()
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == zoo.reference(model, PROMPT, 16)


def test_weights_that_are_gone_are_an_error() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup")
    model.to("meta")
    with pytest.raises(UnsupportedModelError, match="weights on the device meta"):
        llm.generate(PROMPT, GREEDY)


def test_training_mode_after_loading_is_an_error() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup")
    model.model.layers[1].train()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM \(model.layers.1\) is in training"):
        llm.generate(PROMPT, GREEDY)
    model.eval()
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == zoo.reference(model, PROMPT, 16)


def test_replay_holds_after_the_kernels_have_gone() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup", exact="replay", max_batch=2)
    assert not llm.engine.verifier.fixed_shape
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)
    plain = LLM(model, "none", exact="replay", max_batch=2)
    outs = [one.generate([PROMPT, PROMPT[2:]], GREEDY) for one in (llm, plain)]
    assert llm.engine.verifier.fixed_shape
    assert [o.token_ids for o in outs[0]] == [o.token_ids for o in outs[1]]
    hook.remove()
    llm.generate(PROMPT, GREEDY)
    assert not llm.engine.verifier.fixed_shape


# ------------------------------------------------------------------------ nothing is left behind


def state(model: Any) -> dict[str, Any]:
    """All that LLM could change of a model."""
    found: dict[str, Any] = {"config": model.config.to_dict(), "attention": []}
    found["generation"] = model.generation_config.to_dict()
    for name, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
        found[name] = type(module), attributes, [list(vars(module)[k]) for k in ("_modules",)]
        hooks = [k for k in vars(module) if k.endswith("hooks")]
        found[f"{name}: hooks"] = {k: dict(vars(module)[k]) for k in hooks}
        config = vars(module).get("config")
        found["attention"].append(getattr(config, "_attn_implementation", None))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name}: tensor"] = id(tensor), tensor._version, tensor.requires_grad, tensor.dtype
    return found


@pytest.mark.parametrize("drafter", ["none", "auto", "layer_skip", "early_exit"])
@pytest.mark.parametrize("kind", ["cpu kernels", "transformers", "gemma2"])
def test_llm_does_not_change_a_loaded_model(kind: str, drafter: str) -> None:
    model: Any = llama_shaped("llama") if kind == "cpu kernels" else zoo.tiny("llama")
    if kind == "gemma2":
        model = zoo.tiny("gemma2")
    model.requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = state(model)
    config = {"method": "early_exit", "layers": 1} if drafter == "early_exit" else drafter
    llm = LLM(model, config, max_batch=2)
    assert state(model) == before
    llm.generate([PROMPT, PROMPT[5:]], GREEDY)
    assert state(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_checks_at_load_leave_nothing_in_the_cache() -> None:
    """Entries of their random tokens may be NaN, and masked NaN reach a sum."""
    for kind in ("llama_shaped", "zoo"):
        model: Any = llama_shaped("llama") if kind == "llama_shaped" else zoo.tiny("llama")
        expected = zoo.reference(model, [3, 5, 7], 16)
        ids = set(expected) | {3, 5, 7}
        with torch.no_grad():
            for token in set(range(zoo.VOCABULARY)) - ids:
                model.get_input_embeddings().weight[token] = torch.nan
        for options in ({}, {"exact": "replay"}):
            with contextlib.suppress(ReplayUnsupportedError):  # its self-test compares NaN
                llm = LLM(model, "lookup", max_batch=1, **options)
            assert not any(tensor.isnan().any() for tensor in llm.engine.verifier.cache.tensors())
            assert llm.generate([3, 5, 7], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("kind", ["cpu kernels", "transformers"])
def test_a_sequence_given_up_before_its_first_verdict_leaves_no_nan(
    kind: str, monkeypatch: Patch
) -> None:
    model: Any = llama_shaped("llama") if kind == "cpu kernels" else zoo.tiny("llama")
    clean = [3, 5, 7]
    long = [token for token in zoo.ragged_prompts(3)[1] if token != 50] * 2
    plain = LLM(model, "none", max_batch=2).generate([clean, long], GREEDY)
    expected = [out.token_ids for out in plain]
    assert all(50 not in tokens for tokens in expected)
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = torch.nan
    llm = LLM(model, "none", max_batch=2)
    verifier, forward = llm.engine.verifier, llm.engine.verifier.forward

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for reuse in (False, True):
        monkeypatch.setattr(verifier, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream([9, 8, 50, *[5, 4, 3, 2, 1, 2, 3] * 6], GREEDY, reuse=reuse))
        monkeypatch.setattr(verifier, "forward", forward)
        outs = llm.generate([clean, long], GREEDY)
        assert [out.token_ids for out in outs] == expected
        with pytest.raises(NonFiniteLogitsError):
            llm.generate([3, 50], GREEDY)
