"""No address reaches the kernels before what lies there was checked: a model that does not fit runs
by its own forward, and sizes of a call that do not fit are refused before memory is touched."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.base import UnsupportedSpecError, kernels_can_read
from draftahead.backends.cpu import build
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cpu.kernels import AuxHidden, CpuAttentionMetadata, Outputs, bind
from draftahead.backends.cpu.linear import (
    Int8Linear,
    quantize_linears,
    quantize_model,
    run_linear,
    weights_of,
)
from draftahead.backends.llama_spec import LlamaSpec, llama_spec_of
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv.cache import KVCache, LayerKVShape
from llama_shaped import llama_shaped, needs_kernels, runner_of

pytestmark = needs_kernels
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [1, 2, 3]


class Elsewhere(torch.Tensor):
    """A tensor whose numbers lie in another one, as torchao's: it has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(unwrapped, value))
            return value.inner if isinstance(value, Elsewhere) else value

        found = func(*unwrapped(args), **(kwargs or {}))
        return cls(found) if func is torch.ops.aten.detach.default else found


def put_elsewhere(module: Any, name: str = "weight") -> None:
    setattr(module, name, nn.Parameter(Elsewhere(getattr(module, name).detach()), False))


# -------------------------------------------------------------------------- tensors of a model


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a subclass": lambda x: Elsewhere(x),
    "another dtype": lambda x: x.double(),
    "other strides": lambda x: x.T.contiguous().T,
    "expanded": lambda x: x[:1].expand(len(x), -1),
    "sparse": lambda x: x.to_sparse(),
    "without memory": lambda x: x.to("meta"),
    "lazily negated": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_only_plain_tensors_are_read_by_their_address(kind: str) -> None:
    x = torch.randn(6, 8)
    assert kernels_can_read(x, torch.float32, "cpu")
    assert kernels_can_read(nn.Parameter(x[2:]), torch.float32, "cpu")
    assert not kernels_can_read(UNREADABLE[kind](x), torch.float32, "cpu")
    assert not kernels_can_read(x, torch.float32, "cuda")


def test_a_tensor_whose_memory_was_freed_is_not_read() -> None:
    x = torch.randn(6, 8)
    x.untyped_storage().resize_(6 * 8 * 4 - 1)
    assert not kernels_can_read(x, torch.float32, "cpu")


PLACES: dict[str, Callable[[Any], None]] = {
    "a linear layer": lambda model: put_elsewhere(model.model.layers[1].mlp.up_proj),
    "the bias of a linear layer": lambda model: put_elsewhere(
        model.model.layers[0].self_attn.q_proj, "bias"
    ),
    "a norm": lambda model: put_elsewhere(model.model.layers[2].input_layernorm),
    "the last norm": lambda model: put_elsewhere(model.model.norm),
    "the LM head": lambda model: put_elsewhere(model.lm_head),
    "the embedding": lambda model: put_elsewhere(model.model.embed_tokens),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_with_tensors_of_a_subclass_runs(place: str) -> None:
    """The embedding is the model's own module: it gives plain tensors."""
    model = llama_shaped("llama")
    expected = zoo.reference(model, PROMPT, 12)
    PLACES[place](model)
    llm = LLM(model, "lookup")
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    backend = next(line for line in llm.describe() if line.startswith("backend: "))
    assert ("Elsewhere" in backend) == (place != "the embedding"), backend


def test_linear_layers_of_another_model_with_tensors_of_a_subclass_run() -> None:
    """Those that our kernels run one by one; also if they become such tensors later."""
    model: Any = zoo.tiny("phi", dtype=torch.float32)
    expected = zoo.reference(model, PROMPT, 12)
    put_elsewhere(model.lm_head)
    llm = LLM(model, "none")
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    for layer in model.model.layers:
        put_elsewhere(layer.mlp.fc1)
        put_elsewhere(layer.mlp.fc2, "bias")
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_a_linear_layer_that_was_cast_after_loading_is_not_read_as_float32() -> None:
    model: Any = zoo.tiny("phi", dtype=torch.float32)
    llm = LLM(model, "none")
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    model.lm_head.double()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_weights_that_were_replaced_stay_alive_while_a_backend_has_their_addresses() -> None:
    """The model is checked before each prompt; a forward may come between."""
    runner = runner_of(model := llama_shaped("llama"))
    assert runner.batch_invariant
    tokens = torch.tensor([[5, 6, 7]])
    before = runner.forward(tokens).logits.clone()
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    del parameter
    gc.collect()
    others = [torch.full((192, 192), torch.nan) for _ in range(64)]  # in the memory set free
    embedding = model.model.embed_tokens.weight
    embedding.data = llama_shaped("llama").model.embed_tokens.weight.data
    assert torch.equal(runner.forward(tokens).logits, before)
    del others


def test_layers_that_cannot_be_read_are_not_quantized() -> None:
    model = llama_shaped("llama")
    for module in model.modules():
        if type(module) is nn.Linear:
            put_elsewhere(module)
    assert quantize_linears(model) == 0
    with pytest.raises(ConfigError, match="no linear layer that int8 could take"):
        quantize_model(model)


def test_an_int8_layer_that_was_cast_says_so() -> None:
    layer = Int8Linear(nn.Linear(64, 48).half())
    layer(torch.randn(2, 64))  # a bias in half precision was cast
    layer.half()
    with pytest.raises(UnsupportedModelError, match=r"scales is .* torch.float16, not .*float32"):
        layer(torch.randn(2, 64))


# ------------------------------------------------------------------------------- sizes of a model


def spec_and_cache() -> tuple[LlamaSpec, KVCache]:
    runner = runner_of(llama_shaped("qwen3"), max_batch=2)
    return llama_spec_of(runner.model, runner.cache, {}), runner.cache


def test_a_spec_that_fits_is_bound() -> None:
    bind(*spec_and_cache())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 208),
        ("hidden_size", 176),
        ("first_input_size", 384),
        ("intermediate_size", 208),
        ("intermediate_size", 100),
        ("num_heads", 12),
        ("num_heads", 5),
        ("num_heads", 0),
        ("num_kv_heads", 1),
        ("num_kv_heads", 6),
        ("num_kv_heads", 0),
        ("head_dim", 48),
        ("head_dim", 31),
        ("head_dim", 8192),
        ("final_norm", torch.ones(191)),
        ("lm_head", nn.Linear(191, 97)),
        ("lm_head", nn.Conv1d(192, 97, 1)),
    ],
)
def test_sizes_that_do_not_fit_are_not_bound(field: str, value: Any) -> None:
    spec, cache = spec_and_cache()
    with pytest.raises(UnsupportedSpecError):
        bind(dataclasses.replace(spec, **{field: value}), cache)


NORMS = ("input_norm", "post_attention_norm", "q_norm", "k_norm")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1, 16, 384])
def test_a_norm_of_another_length_is_not_bound(norm: str, size: int) -> None:
    """torch would broadcast a single weight."""
    spec, cache = spec_and_cache()
    layers = [*spec.layers[:2], dataclasses.replace(spec.layers[2], **{norm: torch.ones(size)})]
    with pytest.raises(UnsupportedSpecError, match=rf"{norm} is \({size},\)"):
        bind(dataclasses.replace(spec, layers=layers), cache)


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "gate", "up", "down"])
@pytest.mark.parametrize("int8", [False, True])
def test_a_linear_layer_of_another_size_is_not_bound(name: str, int8: bool) -> None:
    spec, cache = spec_and_cache()
    original = spec.layers[1].linears[name]
    out, in_ = original.out_features, original.in_features

    def bound(linear: nn.Linear, change: Callable[[Any], None] = lambda linear: None) -> None:
        layer: Any = Int8Linear(linear) if int8 else linear
        change(layer)
        linears = spec.layers[1].linears | {name: layer}
        other = dataclasses.replace(spec.layers[1], linears=linears)
        layers = [spec.layers[0], other, spec.layers[2]]
        bind(dataclasses.replace(spec, layers=layers), cache)

    def lie(linear: Any) -> None:  # the weight is what counts
        linear.in_features = in_

    def one_bias(linear: Any) -> None:  # torch would broadcast it
        linear.bias = nn.Parameter(torch.ones(1)) if not int8 else torch.ones(1)

    bound(nn.Linear(in_, out))
    for linear, change in (
        (nn.Linear(in_ + 64, out), lambda linear: None),
        (nn.Linear(in_, out + 48), lambda linear: None),
        (nn.Linear(in_ - 64, out), lie),
        (nn.Linear(in_, out), one_bias),
    ):
        with pytest.raises(UnsupportedSpecError):
            bound(linear, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "group_size", 96),
        lambda layer: setattr(layer, "group_size", 0),
        lambda layer: setattr(layer, "group_size", 64),
        lambda layer: setattr(layer, "scales", layer.scales[:, :, :1].contiguous()),
        lambda layer: setattr(layer, "weight", layer.weight[:1]),
        lambda layer: setattr(layer, "out_features", 1000),
    ],
)
def test_an_int8_layer_whose_parts_do_not_fit_does_not_run(change: Callable[[Any], None]) -> None:
    layer = Int8Linear(nn.Linear(384, 100))
    layer(torch.randn(1, 384))
    change(layer)
    with pytest.raises(UnsupportedModelError):
        layer(torch.randn(1, 384))


def test_a_cache_of_another_size_is_not_bound() -> None:
    spec, cache = spec_and_cache()
    shape = LayerKVShape(2, 32, 2, 32)
    for shapes in ([shape] * 2, [LayerKVShape(1, 32, 1, 32)] * 3, [LayerKVShape(2, 16, 2, 16)] * 3):
        other = KVCache(shapes, 2, 160, torch.float32, torch.device("cpu"))
        with pytest.raises(UnsupportedSpecError):
            bind(spec, other)
    cache.keys[1] = cache.keys[1].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsupportedSpecError, match=r"keys is .* not contiguous"):
        bind(spec, cache)


class Changed(nn.Module):
    """A module whose outputs are changed."""

    def __init__(self, module: Any, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.change = module, change

    def forward(self, *args: Any) -> Any:
        found = self.module(*args)
        if isinstance(found, Tensor):
            return self.change(found)
        return tuple(map(self.change, found))


@pytest.mark.parametrize("name", ["embed", "rotary"])
@pytest.mark.parametrize(
    "change", [Tensor.double, Elsewhere, lambda x: x[..., :-16], lambda x: x[:, :1]]
)
def test_a_model_whose_embeddings_or_angles_are_no_plain_tensors_is_not_bound(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    spec, cache = spec_and_cache()
    module = Changed(getattr(spec, name), change)
    with pytest.raises(UnsupportedSpecError, match="embedding is"):
        CpuDecoder(dataclasses.replace(spec, **{name: module}), cache)


# ------------------------------------------------------------------------------- sizes of a call


class Call:
    """A forward by the kernels over 2 sequences of 3 nodes, whose arguments the tests change."""

    def __init__(self) -> None:
        spec, self.cache = spec_and_cache()
        self.binding = bind(spec, self.cache)
        self.hidden = torch.randn(2, 3, 192)
        self.nodes = CpuAttentionMetadata(
            first_slot=0,
            num_context_tokens=1,
            num_cached=torch.tensor([0, 0]),
            depths=torch.arange(3, dtype=torch.int32).repeat(2, 1),
            ancestors=torch.tensor([[1, 3, 7]] * 2),
            cos=torch.randn(2, 3, 32),
            sin=torch.randn(2, 3, 32),
        )
        self.outputs: Outputs | None = Outputs.empty(2, 3, 97)
        self.options: dict[str, Any] = {}

    def run(self) -> None:
        kernels, model = self.binding.kernels, self.binding.model
        kernels.forward(model, self.hidden, self.nodes, self.outputs, **self.options)

    def change(self, name: str, value: Any) -> None:
        if name in CpuAttentionMetadata._fields:
            self.nodes = self.nodes._replace(**{name: value})
        elif name in ("hidden", "outputs"):
            setattr(self, name, value)
        else:
            self.options[name] = value


LAST = 96 + 64  # entries of a slot
OUTSIDE: list[tuple[str, Any]] = [
    ("first_slot", 1),
    ("first_slot", -1),
    ("num_cached", torch.tensor([0, LAST - 2])),
    ("num_cached", torch.tensor([-1, 0])),
    ("num_cached", torch.tensor([0, 2**62])),
    ("ancestors", torch.tensor([[1, 3, 7], [1, 3, 15]])),
    ("ancestors", torch.tensor([[1, 3, 7], [1, 3, -1]])),
    ("tree_nodes", torch.tensor([[0, 1, 2], [0, 1, 3]])),
    ("tree_nodes", torch.tensor([[0, 1, 2], [-1, 1, 2]])),
]
MISSHAPEN: list[tuple[str, Any]] = [
    ("num_cached", torch.tensor([0])),
    ("num_cached", torch.tensor([0, 0], dtype=torch.int32)),
    ("depths", torch.zeros(1, 3, dtype=torch.int32)),
    ("depths", torch.zeros(2, 3, dtype=torch.int64)),
    ("ancestors", torch.tensor([[1, 3, 7]])),
    ("ancestors", torch.tensor([[1, 3]] * 2)),
    ("tree_nodes", torch.tensor([[0, 1, 2]])),
    ("tree_nodes", torch.tensor([[0, 1]] * 2)),
    ("cos", torch.randn(2, 3, 16)),
    ("cos", torch.randn(2, 3, 32).double()),
    ("sin", torch.randn(1, 3, 32).expand(2, 3, 32)),
    ("sin", torch.randn(2, 3, 32, device="meta")),
    ("hidden", torch.randn(2, 3, 176)),
    ("hidden", torch.randn(2, 3, 192).half()),
    ("hidden", Elsewhere(torch.randn(2, 3, 192))),
    ("hidden", torch.randn(3, 2, 192).transpose(0, 1)),
    ("outputs", Outputs.empty(2, 3, 96)),
    ("outputs", Outputs.empty(1, 3, 97)),
    ("outputs", Outputs.empty(2, 3, 97)._replace(topk=torch.zeros(2, 3, 3, dtype=torch.int64))),
    ("aux", AuxHidden(torch.tensor([1, 2]), torch.zeros(2, 3, 1, 192))),
    ("aux", AuxHidden(torch.tensor([1]), torch.zeros(2, 3, 1, 191))),
    ("first_input", torch.randn(2, 3, 384)),
]


def test_a_call_of_the_kernels_whose_sizes_fit_runs() -> None:
    call = Call()
    call.run()
    assert call.outputs is not None
    assert call.outputs.logits.isfinite().all()


@pytest.mark.parametrize(("name", "value"), OUTSIDE + MISSHAPEN)
def test_sizes_of_a_call_that_do_not_fit_are_refused_before_anything_is_touched(
    name: str, value: Any
) -> None:
    call = Call()
    before = [call.hidden.clone(), *(x.clone() for x in call.cache.keys)]
    call.change(name, value)
    with pytest.raises(UnsupportedModelError, match="the CPU kernels"):
        call.run()
    after = [call.hidden if name != "hidden" else before[0], *call.cache.keys]
    assert all(map(torch.equal, after, before))


def test_more_nodes_than_the_bits_of_a_word_are_refused() -> None:
    call, count = Call(), 65
    call.hidden, call.outputs = torch.randn(2, count, 192), None
    call.nodes = call.nodes._replace(
        depths=torch.zeros(2, count, dtype=torch.int32),
        ancestors=torch.ones(2, count, dtype=torch.int64),
        cos=torch.randn(2, count, 32),
        sin=torch.randn(2, count, 32),
    )
    with pytest.raises(UnsupportedModelError, match="number of nodes"):
        call.run()


# --------------------------------------------------------------------------------- empty shapes


@pytest.mark.parametrize("nodes", [(0, 0), (0, 3), (2, 0)])
def test_a_call_of_the_kernels_without_nodes_does_nothing(nodes: tuple[int, int]) -> None:
    call, num_sequences = Call(), nodes[0]
    before = [keys.clone() for keys in call.cache.keys]
    call.hidden, call.outputs = torch.randn(*nodes, 192), Outputs.empty(*nodes, 97)
    call.nodes = call.nodes._replace(
        num_cached=torch.zeros(num_sequences, dtype=torch.int64),
        depths=torch.zeros(*nodes, dtype=torch.int32),
        ancestors=torch.zeros(*nodes, dtype=torch.int64),
        cos=torch.randn(*nodes, 32),
        sin=torch.randn(*nodes, 32),
    )
    call.run()
    assert all(map(torch.equal, call.cache.keys, before))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_a_linear_layer_without_rows(shape: tuple[int, ...], int8: bool) -> None:
    linear = nn.Linear(64, 100)
    layer: Any = Int8Linear(linear) if int8 else linear
    assert run_linear(layer, torch.randn(shape)).shape == (*shape[:-1], 100)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_a_linear_layer_without_weights_is_left_to_torch(size: tuple[int, int]) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = nn.Linear(*size)
    with pytest.raises(UnsupportedSpecError):
        run_linear(layer, torch.randn(2, size[0]))
    assert quantize_linears(nn.Sequential(layer)) == 0


def test_inputs_of_another_size_are_not_read() -> None:
    with pytest.raises(UnsupportedSpecError, match="the input has shape"):
        run_linear(nn.Linear(64, 8), torch.randn(4, 32))


def test_the_kernels_themselves_take_a_linear_layer_without_rows() -> None:
    """Python does not call them then."""
    library, x, y = build.library(), torch.randn(1, 64), torch.zeros(1, 8)
    assert library is not None
    weights = weights_of(nn.Linear(64, 8), addresses := Addresses(), "it")
    library.draftahead_linear(
        ctypes.byref(weights), x.data_ptr(), 0, y.data_ptr(), 1, None, None, None
    )
    assert not y.any()
    del addresses
