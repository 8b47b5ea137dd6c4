"""Forwards over some of a model's layers: the logits of transformers' own, no side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import errors
from draftahead.backends.cpu.linear import quantize_model
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from llama_shaped import filled_runner, llama_shaped

TEXTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
TREE = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
PARENTS = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, 1, 3]])
KINDS = ["llama_kernels", "mistral_kernels", "gpt2", "gemma2", "falcon", "qwen3_moe", "opt"]


def model_of(kind: str) -> Any:
    kernels = kind.endswith("_kernels")
    return llama_shaped(kind[:-8]) if kernels else zoo.tiny(kind, dtype=torch.float32)


def filled(model: Any) -> ModelRunner:
    return filled_runner(model, TEXTS)


def logits_of(runner: ModelRunner, layers: LayerSubset | None, **options: Any) -> Tensor:
    """Of the tree's tokens, by default as chains."""
    output = runner.forward(TREE, first_slot=1, layers=layers, **options)
    return output.logits.clone()


def paths() -> list[tuple[int, int, list[int]]]:
    """Sequence, node, and the text that the node ends."""
    found = []
    for b, (tokens, parents) in enumerate(zip(TREE.tolist(), PARENTS.tolist(), strict=True)):
        for node in range(len(tokens)):
            path, at = list[int](), node
            while at >= 0:
                path, at = [tokens[at], *path], parents[at]
            found.append((b, node, TEXTS[b] + path))
    return found


def lm_head_of(model: Any, hidden: Tensor) -> Tensor:
    """The model's last norm and LM head."""
    body = model.get_decoder()
    norm = next(getattr(body, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(body, n))
    logits: Tensor = model.get_output_embeddings()(norm(hidden))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


# ----------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_first_layers_then_the_lm_head(kind: str) -> None:
    """Trees in a batch: every node as in its own text, after so many layers."""
    model = model_of(kind)
    runner = filled(model)
    assert runner.batch_invariant == kind.endswith("_kernels")
    for count in (1, 2):
        logits = logits_of(runner, LayerSubset(model, range(count)), parents=PARENTS)
        for b, node, text in paths():
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[count]
            expected = lm_head_of(model, hidden[0, -1])
            assert torch.allclose(logits[b, node], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_layers_are_the_model_itself(kind: str) -> None:
    model = model_of(kind)
    runner, layers = filled(model), LayerSubset(model, range(model.config.num_hidden_layers))
    whole = logits_of(runner, None, parents=PARENTS)
    assert torch.equal(logits_of(runner, layers, parents=PARENTS), whole)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_skipped_layer_passes_its_input_on(kind: str) -> None:
    """As in a model whose layer is bypassed by a hook of the test's own."""
    model = model_of(kind)
    runner = filled(model)
    found = logits_of(runner, LayerSubset(model, (0, 2)))[:, 0]
    body = model.get_decoder()
    layer = (body.h if hasattr(body, "h") else body.layers)[1]

    def bypass(_: Any, args: Any, kwargs: Any, out: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *out[1:]) if isinstance(out, tuple) else given

    for b, text in enumerate(TEXTS):  # all layers have read the text itself
        past = model(torch.tensor([text]), use_cache=True).past_key_values
        hook = layer.register_forward_hook(bypass, with_kwargs=True)
        expected = model(TREE[b : b + 1, :1], past_key_values=past).logits[0, -1]
        hook.remove()
        assert torch.allclose(found[b], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama_kernels", "gpt2"])
@torch.no_grad()
def test_a_chain_fed_node_by_node(kind: str) -> None:
    """Behind the tokens of the slots, each node in a forward of its own."""
    model = model_of(kind)
    runner, layers = filled(model), LayerSubset(model, (0, 1))
    together = logits_of(runner, layers)
    for offset in range(TREE.shape[1]):
        node = TREE[:, offset : offset + 1]
        alone = runner.forward(node, first_slot=1, layers=layers, offset=offset).logits
        assert torch.allclose(alone[:, 0], together[:, offset], rtol=1e-4, atol=1e-4)
    assert [len(held) for held in runner.cache.tokens_in] == [0, *map(len, TEXTS)]


@pytest.mark.parametrize("kind", ["llama_kernels", "int8", "gemma2", "gptj"])
@torch.no_grad()
def test_an_exit_transform_and_a_draft_vocabulary(kind: str) -> None:
    model = llama_shaped("llama") if kind == "int8" else model_of(kind)
    if kind == "int8":
        quantize_model(model)
    runner, ids = filled(model), torch.tensor([3, 90, 17, 41])
    assert runner.batch_invariant == (kind in ("llama_kernels", "int8"))
    whole = logits_of(runner, LayerSubset(model, (0, 1), exit_transform=lambda hidden: -2 * hidden))
    plain = logits_of(runner, LayerSubset(model, (0, 1)))
    near = {"rtol": 1e-2, "atol": 2e-2}
    if kind in ("llama_kernels", "int8"):  # the last norm takes the factor away, but for the sign
        assert torch.allclose(whole, -plain, **near)
    assert not torch.allclose(whole, plain, **near)
    layers = LayerSubset(
        model, (0, 1), exit_transform=lambda hidden: -2 * hidden, draft_to_target=ids
    )
    output = runner.forward(TREE, first_slot=1, layers=layers)
    assert torch.allclose(output.logits, whole[..., ids], rtol=1e-4, atol=1e-4)
    scattered, argmax = layers.scatter(output.logits, output.argmax)
    assert torch.equal(scattered[..., ids], output.logits)
    others = torch.ones(zoo.VOCABULARY, dtype=torch.bool)
    others[ids] = False
    assert scattered.shape[-1] == zoo.VOCABULARY
    assert scattered[..., others].eq(-torch.inf).all()
    assert (argmax is None) != runner.batch_invariant
    if argmax is not None:
        assert torch.equal(argmax, scattered.argmax(-1))


@torch.no_grad()
def test_replaced_weights_are_noticed() -> None:
    model = llama_shaped("llama")
    runner, layers = filled(model), LayerSubset(model, (0, 1))
    before = logits_of(runner, layers)
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(2 * linear.weight, requires_grad=False)
    for slot, text in enumerate(TEXTS, start=1):
        runner.cache.tokens_in[slot].clear()
        runner.prefill(slot, text)
    after = logits_of(runner, layers)
    assert runner.batch_invariant
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(after, logits_of(filled(model), LayerSubset(model, (0, 1))))


# ------------------------------------------------------------------------------ side effects


@pytest.mark.parametrize("kind", ["llama_kernels", "gpt2"])
@torch.no_grad()
def test_nothing_is_left_behind(kind: str) -> None:
    """Neither in the model, nor in captured hidden states, nor in the slots; and the NaN of a
    drafted token is stored nowhere. (With kernels the root counts as context: verification may
    reuse its lower layers.)"""
    model = model_of(kind)
    runner = filled(model)
    runner.add_aux_layers((1,))
    for slot, text in enumerate(TEXTS, start=1):
        runner.prefill(slot, text)
    assert runner.cache.hidden is not None
    hidden = runner.cache.hidden.clone()
    nan_token = TREE[0, 1 if runner.batch_invariant else 0]
    model.get_input_embeddings().weight[nan_token] = torch.nan
    layers = LayerSubset(
        model,
        (0, 1),
        exit_transform=lambda hidden: hidden + 1,
        draft_to_target=torch.tensor([1, 2]),
    )
    logits_of(runner, layers)
    runner.forward(TREE[:, :2].flip(1), first_slot=1, layers=layers, offset=2)
    assert torch.equal(hidden, runner.cache.hidden)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(t.isfinite().all() for t in [*runner.cache.keys, *runner.cache.values])
    assert [list(held) for held in runner.cache.tokens_in] == [[], *TEXTS]


# ------------------------------------------------------------------------------------ options


def test_share_of_the_weights() -> None:
    model = zoo.tiny("llama")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    whole = 3 * layer + head
    assert LayerSubset(model, (0, 1, 2)).weight_share == 1
    assert LayerSubset(model, (0, 2)).weight_share == pytest.approx((2 * layer + head) / whole)
    few = LayerSubset(model, (0,), draft_to_target=torch.arange(10))
    assert few.weight_share == pytest.approx((layer + head * 10 / zoo.VOCABULARY) / whole)


@pytest.mark.parametrize("layers", [(), (1, 2), (0, 3), (-1, 0)])
def test_a_subset_without_the_first_layer_or_beyond_the_last_is_refused(
    layers: tuple[int, ...],
) -> None:
    with pytest.raises(errors.ConfigError, match="starts with layer 0"):
        LayerSubset(zoo.tiny("llama"), layers)
