"""Passes over some of a model's layers: what transformers' own layers give, and nothing stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import errors
from draftahead.backends.cpu.linear import quantize_model
from draftahead.backends.fingerprint import is_patched
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from test_runtime import shaped

TEXTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
TREE = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]
PARENTS = [[-1, 0, 0, 2, 1], [-1, 0, 1, 1, 3]]


def model_of(kind: str) -> Any:
    return shaped(kind[:-8]) if kind.endswith("_kernels") else zoo.tiny(kind, dtype=torch.float32)


KINDS = ["llama_kernels", "mistral_kernels", "gpt2", "gemma2", "falcon", "qwen3_moe", "opt"]


def filled(model: Any) -> ModelRunner:
    passes = ModelRunner(model, max_batch=3, max_context=64, scratch_entries=16)
    for row, text in enumerate(TEXTS, start=1):
        passes.prefill(row, text)
    return passes


def paths() -> list[tuple[int, int, list[int]]]:
    """Row, node, and the text that the node ends."""
    found = []
    for row, (tokens, parents) in enumerate(zip(TREE, PARENTS, strict=True)):
        for node in range(len(tokens)):
            path, at = list[int](), node
            while at >= 0:
                path, at = [tokens[at], *path], parents[at]
            found.append((row, node, TEXTS[row] + path))
    return found


def head_of(model: Any, states: Tensor) -> Tensor:
    """The model's last norm and head, by its own forward over no layers at all."""
    body = model.get_decoder()
    norm = next(getattr(body, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(body, n))
    logits: Tensor = model.get_output_embeddings()(norm(states))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_first_layers_and_the_head(kind: str) -> None:
    """A tree in a batch of rows: every node as in its own text, after so many layers."""
    model = model_of(kind)
    passes = filled(model)
    assert passes.batch_invariant == kind.endswith("_kernels")
    for count in (1, 2):
        part = LayerSubset(model, range(count))
        logits = passes.forward(
            torch.tensor(TREE), first_slot=1, parents=torch.tensor(PARENTS), layers=part
        )
        for row, node, text in paths():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[count]
            expected = head_of(model, states[0, -1])
            assert torch.allclose(logits[row, node], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_layers_are_the_model_itself(kind: str) -> None:
    model = model_of(kind)
    passes = filled(model)
    nodes, parents = torch.tensor(TREE), torch.tensor(PARENTS)
    whole = passes.forward(nodes, first_slot=1, parents=parents).clone()
    part = LayerSubset(model, range(model.config.num_hidden_layers))
    assert torch.equal(passes.forward(nodes, first_slot=1, parents=parents, layers=part), whole)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_layers_in_between_are_left_out(kind: str) -> None:
    """As in a model whose layer hands on what it is given, by a hook of the test's own."""
    model = model_of(kind)
    passes = filled(model)
    nodes = torch.tensor([row[:1] for row in TREE])
    found = passes.forward(nodes, first_slot=1, layers=LayerSubset(model, (0, 2))).clone()
    body = model.get_decoder()
    layer = (body.h if hasattr(body, "h") else body.layers)[1]

    def hand_on(_: Any, args: Any, kwargs: Any, out: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *out[1:]) if isinstance(out, tuple) else given

    hook = layer.register_forward_hook(hand_on, with_kwargs=True)
    for row, text in enumerate(TEXTS):
        # The text itself was read by all layers; what the hook changes must not reach its keys.
        hook.remove()
        past = model(torch.tensor([text]), use_cache=True).past_key_values
        hook = layer.register_forward_hook(hand_on, with_kwargs=True)
        expected = model(nodes[row : row + 1], past_key_values=past).logits[0, -1]
        assert torch.allclose(found[row, 0], expected, rtol=1e-3, atol=1e-3)
    hook.remove()


@pytest.mark.parametrize("kind", ["llama_kernels", "gpt2"])
@torch.no_grad()
def test_a_chain_that_goes_on_behind_the_rows(kind: str) -> None:
    """Node by node, each in a pass of its own, as all of them in one pass."""
    model = model_of(kind)
    passes, part = filled(model), LayerSubset(model, (0, 1))
    nodes = torch.tensor(TREE)
    together = passes.forward(nodes, first_slot=1, layers=part).clone()
    for at in range(nodes.shape[1]):
        alone = passes.forward(nodes[:, at : at + 1], first_slot=1, layers=part, offset=at)
        assert torch.allclose(alone[:, 0], together[:, at], rtol=1e-4, atol=1e-4)
    assert [len(held) for held in passes.cache.tokens_in] == [0, *map(len, TEXTS)]


@pytest.mark.parametrize("kind", ["llama_kernels", "int8", "gemma2", "gptj"])
@torch.no_grad()
def test_an_exit_and_a_smaller_vocabulary(kind: str) -> None:
    model = shaped("llama") if kind == "int8" else model_of(kind)
    if kind == "int8":
        quantize_model(model)
    passes, nodes, ids = filled(model), torch.tensor(TREE), torch.tensor([3, 90, 17, 41])
    doubled = LayerSubset(model, (0, 1), exit=lambda states: -2 * states)
    whole = passes.forward(nodes, first_slot=1, layers=doubled).clone()
    plain = passes.forward(nodes, first_slot=1, layers=LayerSubset(model, (0, 1))).clone()
    # The last norm takes the factor away, but for the sign.
    near = {"rtol": 1e-2, "atol": 2e-2}
    if kind in ("llama_kernels", "int8"):
        assert torch.allclose(whole, -plain, **near)
    assert not torch.allclose(whole, plain, **near)
    part = LayerSubset(model, (0, 1), exit=lambda states: -2 * states, tokens=ids)
    few, best = passes.forward(nodes, first_slot=1, layers=part), passes.best
    assert torch.allclose(few, whole[..., ids], rtol=1e-4, atol=1e-4)
    scatter_to_vocab, best = part.scatter_to_vocab(few, best)
    assert torch.equal(scatter_to_vocab[..., ids], few)
    others = torch.ones(scatter_to_vocab.shape[-1], dtype=torch.bool)
    others[ids] = False
    assert (
        scatter_to_vocab[..., others].eq(-torch.inf).all()
        and others.sum() == scatter_to_vocab.shape[-1] - 4
    )
    if best is not None:
        assert torch.equal(best, scatter_to_vocab.argmax(-1))


@pytest.mark.parametrize("kind", ["llama_kernels", "gpt2"])
@torch.no_grad()
def test_nothing_stays_behind(kind: str) -> None:
    """Neither in the model, nor in the states that are watched, nor in what the rows hold; and a
    guess that is not finite poisons nobody. (The root is no guess: see below.py.)"""
    model = model_of(kind)
    passes = filled(model)
    passes.capture_hidden((1,))
    for row, text in enumerate(TEXTS, start=1):
        passes.prefill(row, text)
    assert passes.cache.hidden is not None
    states = passes.cache.hidden.clone()
    nodes = torch.tensor(TREE)
    model.get_input_embeddings().weight[nodes[0, 1 if passes.batch_invariant else 0]] = torch.nan
    part = LayerSubset(model, (0, 1), exit=lambda states: states + 1, tokens=torch.tensor([1, 2]))
    passes.forward(nodes, first_slot=1, layers=part)
    passes.forward(nodes[:, :2].flip(1), first_slot=1, layers=part, offset=2)
    assert torch.equal(states, passes.cache.hidden)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.isfinite(t).all() for t in [*passes.cache.keys, *passes.cache.values])
    assert [list(held) for held in passes.cache.tokens_in] == [[], *TEXTS]


@torch.no_grad()
def test_weights_that_are_replaced_are_noticed() -> None:
    model = shaped("llama")
    passes, part = filled(model), LayerSubset(model, (0, 1))
    nodes = torch.tensor(TREE)
    before = passes.forward(nodes, first_slot=1, layers=part).clone()
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(2 * linear.weight, requires_grad=False)
    for row, text in enumerate(TEXTS, start=1):
        passes.cache.tokens_in[row].clear()
        passes.prefill(row, text)
    after = passes.forward(nodes, first_slot=1, layers=part).clone()
    assert passes.batch_invariant and not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(
        after, filled(model).forward(nodes, first_slot=1, layers=LayerSubset(model, (0, 1)))
    )


def test_the_share_of_the_weights() -> None:
    model = zoo.tiny("llama")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    assert LayerSubset(model, (0, 1, 2)).share == 1
    assert LayerSubset(model, (0, 2)).share == pytest.approx(
        (2 * layer + head) / (3 * layer + head)
    )
    few = LayerSubset(model, (0,), tokens=torch.arange(10))
    expected = (layer + head * 10 / zoo.VOCABULARY) / (3 * layer + head)
    assert few.share == pytest.approx(expected)


def test_a_part_that_cannot_be() -> None:
    model = zoo.tiny("llama")
    for layers in ((), (1, 2), (0, 3), (-1, 0)):
        with pytest.raises(errors.ConfigError, match="starts with layer 0"):
            LayerSubset(model, layers)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi3", "qwen3_moe"])
@torch.no_grad()
def test_states_are_shown_as_transformers_counts_them(name: str) -> None:
    """After each layer, and behind the last norm; and the model is left as it was."""
    model, ids = zoo.tiny(name), torch.tensor([[3, 1, 4, 1, 5]])
    depths = range(1, model.config.num_hidden_layers + 1)
    with captured_hidden(model, depths) as found:
        model(ids)
    assert not any(is_patched(module) for module in model.modules())
    told = model(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(found[depth], told[depth]) for depth in depths)
