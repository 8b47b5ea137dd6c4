"""Whatever a model's forward depends on: the fingerprint holds until it is changed. And which code
counts as transformers' own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import zoo
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.backends.fingerprint import ModelFingerprint
from draftahead.backends.own_code import foreign_code
from draftahead.loader import hub
from draftahead.loader.stored import stored_layers
from llama_shaped import SHAPES, llama_shaped

Patch = pytest.MonkeyPatch


def louder(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 0.5


@functools.wraps(LlamaMLP.forward)
def disguised(self: Any, x: torch.Tensor) -> torch.Tensor:
    return louder(self, x)


class Louder(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return louder(self, x)


class Spoofed(LlamaMLP):
    """Says that it is LlamaMLP."""

    forward = disguised


Spoofed.__module__, Spoofed.__qualname__, Spoofed.__name__ = (
    LlamaMLP.__module__,
    LlamaMLP.__qualname__,
    LlamaMLP.__name__,
)


class WithHelper(LlamaMLP):
    """Overrides what forward calls, not forward itself."""

    def __call__(self, x: torch.Tensor) -> Any:
        return louder(self, x)


def other_class(kind: type) -> Callable[[Any, Patch], None]:
    def change(model: Any, patch: Patch) -> None:
        model.model.layers[1].mlp.__class__ = kind

    return change


def other_code(model: Any, patch: Patch) -> None:
    patch.setattr(LlamaMLP.forward, "__code__", louder.__code__)


def patched(owner: Any, name: str, value: Any) -> Callable[[Any, Patch], None]:
    return lambda model, patch: patch.setattr(owner, name, value, raising=False)


def on_instance(name: str) -> Callable[[Any, Patch], None]:
    def change(model: Any, patch: Patch) -> None:
        mlp = model.model.layers[1].mlp
        setattr(mlp, name, types.MethodType(louder, mlp))

    return change


def hooked(kind: str) -> Callable[[Any, Patch], None]:
    def change(model: Any, patch: Patch) -> None:
        getattr(model.model.layers[1].mlp, f"register_{kind}")(lambda *_: None)

    return change


def global_hook(name: str) -> Callable[[Any, Patch], None]:
    return lambda model, patch: patch.setitem(getattr(torch_module, name), 0, lambda *_: None)


# All that makes code another's: each changes the fingerprint, and is told by name.
FOREIGN: dict[str, tuple[Callable[[Any, Patch], None], str]] = {
    "a subclass with another forward": (other_class(Louder), "Louder is not a class of"),
    "a subclass with the same name": (other_class(Spoofed), "LlamaMLP is not a class of"),
    "a subclass that is called otherwise": (other_class(WithHelper), "WithHelper is not a class"),
    "a forward patched on the class": (patched(LlamaMLP, "forward", louder), "LlamaMLP.forward is"),
    "the same in disguise": (patched(LlamaMLP, "forward", disguised), "LlamaMLP.forward is"),
    "a partial": (patched(LlamaMLP, "forward", functools.partial(louder)), "LlamaMLP.forward is"),
    "another model's forward": (
        patched(LlamaRMSNorm, "forward", GemmaRMSNorm.forward),
        "LlamaRMSNorm.forward is patched",
    ),
    "the same code of another model": (
        patched(LlamaMLP, "forward", GemmaMLP.forward),
        "LlamaMLP.forward is patched",
    ),
    "a call patched on the class": (patched(LlamaMLP, "__call__", louder), "LlamaMLP.forward is"),
    "other code in the function": (other_code, "LlamaMLP.forward is patched"),
    "a function that forward calls": (
        patched(modeling_llama, "rotate_half", lambda x: -x),
        "<lambda> is patched",
    ),
    "torch's own linear layer": (
        patched(torch.nn.Linear, "forward", lambda self, x: x),
        "Linear.forward is patched",
    ),
    "torch's own call": (patched(torch.nn.Module, "_call_impl", louder), "louder is patched"),
    "a forward patched on the instance": (on_instance("forward"), "a patched forward on LlamaMLP"),
    "a call patched on the instance": (on_instance("_call_impl"), "a patched forward on LlamaMLP"),
    "a hook": (hooked("forward_hook"), "hooks or a patched forward on LlamaMLP"),
    "a hook before": (hooked("forward_pre_hook"), "hooks or a patched forward on LlamaMLP"),
    "a global hook": (global_hook("_global_forward_hooks"), "global module hooks"),
    "a global hook before": (global_hook("_global_forward_pre_hooks"), "global module hooks"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_code_that_is_not_transformers_own_is_told(kind: str, monkeypatch: Patch) -> None:
    change, reason = FOREIGN[kind]
    model = llama_shaped("llama")
    assert foreign_code(model) is None
    before = ModelFingerprint(model)
    assert before.holds()
    change(model, monkeypatch)
    assert not before.holds()
    found = foreign_code(model)
    assert found is not None and reason in found
    monkeypatch.undo()


@pytest.mark.parametrize("name", [*SHAPES, *zoo.ARCHITECTURES])
def test_models_of_transformers_have_its_own_code(name: str) -> None:
    assert foreign_code(llama_shaped(name) if name in SHAPES else zoo.tiny(name)) is None


def test_our_int8_layers_are_own_code() -> None:
    model = llama_shaped("llama")
    assert quantize_linears(model)
    assert foreign_code(model) is None


def attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def in_place(model: Any) -> None:
    model.model.norm.weight[7] = 3


def through_data(model: Any) -> None:
    model.model.norm.weight.data *= 2


def cast(model: Any) -> None:
    model.bfloat16()


def storage(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data = weight.data.clone()


def replaced(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)


def shared_list(model: Any) -> None:
    model.model.layers[0].mlp.merged_adapters.append("one")


def rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5.0


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


LAYER = "model.layers.1"
CHANGES: dict[str, Callable[[Any], None]] = {
    "attention's scaling": attribute(f"{LAYER}.self_attn", "scaling", 0.5),
    "a norm's epsilon": attribute(f"{LAYER}.input_layernorm", "variance_epsilon", 0.1),
    "a switched adapter": attribute(f"{LAYER}.mlp", "_active_adapter", "other"),
    "a list of adapters": shared_list,
    "training mode": attribute(LAYER, "training", True),
    "a new module": attribute(f"{LAYER}.mlp", "extra", torch.nn.Linear(1, 1)),
    "another activation": attribute(f"{LAYER}.mlp", "act_fn", torch.nn.SiLU()),
    "rotary frequencies": attribute("model.rotary_emb", "inv_freq", torch.ones(16)),
    "rotary parameters": rope,
    "the configuration": fewer_layers,
    "a weight in place": in_place,
    "a weight through data": through_data,
    "a weight that lies elsewhere": storage,
    "another weight": replaced,
    "another dtype": cast,
    "another device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_a_model_is_noticed(kind: str) -> None:
    model = llama_shaped("llama")
    model.model.layers[0].mlp.merged_adapters = []
    before = ModelFingerprint(model)
    model(torch.tensor([[1, 2, 3]]))
    assert before.holds()  # a forward changes nothing
    CHANGES[kind](model)
    assert not before.holds()
    assert ModelFingerprint(model).holds()


def test_autocast_in_this_thread_is_noticed() -> None:
    before = ModelFingerprint(llama_shaped("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not before.holds()
    assert before.holds()


def test_weights_made_in_inference_mode_are_compared_by_samples() -> None:
    with torch.inference_mode():
        model = llama_shaped("llama")
        before = ModelFingerprint(model)
        assert before.holds()
        model.lm_head.weight *= 2
        assert not before.holds()


def test_what_has_no_effect_is_not_noticed() -> None:
    model = llama_shaped("llama")
    before = ModelFingerprint(model)
    model.config._attn_implementation_internal = "ours, while a forward runs"
    model.config._name_or_path = "elsewhere"
    assert before.holds()


def test_the_first_use_of_torch_compile_is_no_change(monkeypatch: Patch) -> None:
    """Anywhere in the process: it replaces two methods of nn.Module that no forward runs."""
    fingerprint = ModelFingerprint(model := zoo.tiny("llama"))
    for name in ("__init__", "__setstate__"):
        method = getattr(torch.nn.Module, name)
        monkeypatch.setattr(torch.nn.Module, name, functools.wraps(method)(lambda *_: None))
    assert fingerprint.holds()
    assert foreign_code(model) is None


def test_longrope_may_rewrite_its_frequencies() -> None:
    model = zoo.tiny("phi3_longrope")
    before = ModelFingerprint(model)
    model(torch.arange(30)[None])  # beyond the threshold
    assert before.holds()
    model.model.rotary_emb.register_forward_hook(lambda *_: None)
    assert not before.holds()


class Wrapped(torch.Tensor):
    """A tensor whose numbers are in another one, as quantized weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise NotImplementedError(function)


def test_tensors_inside_of_a_tensor_are_compared() -> None:
    model, inner = llama_shaped("llama"), torch.ones(97, 192)
    weight = torch.nn.Parameter(Wrapped(inner), requires_grad=False)
    model.lm_head.weight = weight
    before = ModelFingerprint(model)
    assert before.holds()
    inner[5] = 2
    assert not before.holds()


def test_stored_weights_are_bound_without_being_read(tmp_path: Path) -> None:
    llama_shaped("llama").bfloat16().save_pretrained(tmp_path)
    model, _ = hub.load(tmp_path, device="cpu")
    fingerprint = ModelFingerprint(model)
    rows = {layer.rows.data_ptr() for layer in stored_layers(model)}
    sampled = fingerprint._tensors._samples
    assert not rows & {sample.ctypes.data for sample in sampled}
    assert sampled  # norms
    assert fingerprint.holds()
    layer: Any = model.model.layers[1].mlp.up_proj
    layer.rows.add_(1)
    assert not fingerprint.holds()
    fingerprint = ModelFingerprint(model)
    layer.rows = layer.rows.clone()
    assert not fingerprint.holds()
    fingerprint = ModelFingerprint(model)
    layer.kind = "F16"
    assert not fingerprint.holds()
    assert foreign_code(model) is None
