"""A runner's forwards by the model: sizes, KV entries, hidden states, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from draftahead.backends.base import DeviceTree
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.models import runner as runners
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from llama_shaped import SIZES, needs_kernels, runner_of
from runner_checks import NotingBackend, assert_close, made, text

THRESHOLD = 24  # of phi3_longrope


# -------------------------------------------------------------------------------------- sizes


def test_nodes_that_do_not_fit_into_the_cache_are_refused() -> None:
    runner = made(max_context=20, scratch_entries=4, max_batch=2)
    assert runner.cache.num_entries == 24
    runner.prefill(1, text(20))
    nodes = torch.zeros(2, 4, dtype=torch.long)
    assert runner.forward(nodes, kv_len=24).logits.shape == (2, 4, zoo.VOCABULARY)
    with pytest.raises(ConfigError, match="5 nodes do not fit behind 20 tokens"):
        runner.forward(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ConfigError, match="do not fit"):
        runner.forward(nodes, kv_len=25)
    with pytest.raises(ConfigError, match="4 nodes do not fit behind 21 tokens"):
        runner.forward(nodes, offset=1)


def test_the_dummy_token_of_a_long_sequence_must_fit_too() -> None:
    runner = made("phi3_longrope", max_context=16, scratch_entries=4, max_batch=1)
    runner.cache.long_rope[0] = True
    runner.forward(torch.zeros(1, 19, dtype=torch.long))
    with pytest.raises(ConfigError, match="20 nodes do not fit behind 0 tokens"):
        runner.forward(torch.zeros(1, 20, dtype=torch.long))
    beyond = made("phi3_longrope", max_context=40, scratch_entries=4, max_batch=1)
    beyond.cache.long_rope[0] = True
    beyond.forward(torch.zeros(1, 44, dtype=torch.long))  # it needs none


def test_every_sequence_stands_behind_what_its_own_slot_holds() -> None:
    together, texts = made(), [text(9, 1), text(4, 2), text(12, 3)]
    for slot, tokens in enumerate(texts, start=1):
        together.prefill(slot, tokens)
    nodes = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    found = together.forward(nodes, first_slot=1).logits
    for b, tokens in enumerate(texts):
        expected = together.model(torch.tensor([tokens + nodes[b].tolist()])).logits
        assert_close(found[b], expected[0, -3:])


def test_nodes_behind_those_of_earlier_forwards() -> None:
    runner, tokens = made(), text(9)
    runner.prefill(0, tokens[:4])
    expected = runner.forward(torch.tensor([tokens[4:]])).logits
    runner.forward(torch.tensor([tokens[4:6]]))
    assert_close(runner.forward(torch.tensor([tokens[6:]]), offset=2).logits, expected[:, 2:])


def test_only_context_may_be_stored_when_it_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is context; of a draft the root, and with some of the layers nothing."""
    runner, counts = made(), list[Any]()
    view = runners.CacheView

    def noting(*args: Any) -> Any:
        counts.append(args[-1])
        return view(*args)

    monkeypatch.setattr(runners, "CacheView", noting)
    nodes = torch.tensor([[1, 2, 3]])
    runner.forward(nodes)
    runner.forward(nodes, num_context_tokens=3)
    runner.forward(nodes, layers=LayerSubset(runner.model, (0, 1)))
    runner.prefill_slots(0, [text(3), text(2)])
    assert counts == [1, 3, 0, [3, 2]]


def test_as_many_kv_entries_are_read_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or as are written, which a dummy token is too."""
    runner, read = made("phi3_longrope"), list[int]()
    view = runners.CacheView

    def noting(*args: Any) -> Any:
        read.append(args[3])
        return view(*args)

    monkeypatch.setattr(runners, "CacheView", noting)
    nodes = torch.tensor([[1, 2, 3]])
    for is_long in (False, True):
        runner.cache.long_rope[0] = is_long
        runner.forward(nodes)
        runner.forward(nodes, kv_len=20)
    assert read == [3, 20, 4, 20]


def test_a_model_without_an_attention_interface_keeps_its_setting() -> None:
    model = zoo.tiny("falcon")
    runner = ModelRunner(model, max_batch=1, max_context=None, scratch_entries=8)
    before, seen = model.config._attn_implementation, list[str]()
    model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
    runner.forward(torch.tensor([[1, 2, 3]]))
    assert seen == [before]


def test_no_backend_gets_a_dummy_token() -> None:
    runner: Any = made("phi3_longrope")
    fake = runner._backend = NotingBackend()
    for is_long, calls in ((False, 1), (True, 1)):
        runner.cache.long_rope[0] = is_long
        runner.forward(torch.tensor([[1, 2, 3]]))
        assert len(fake.calls) == calls


def test_a_forward_without_logits_computes_those_of_one_token_at_most() -> None:
    for name in ("llama", "gpt2"):
        runner = made(name)
        nodes = torch.tensor([[1, 2, 3]])
        assert runner.forward(nodes, with_logits=False).logits.shape[1] == 1
        assert runner.forward(nodes).logits.shape[1] == 3


def test_a_model_that_always_computes_all_logits() -> None:
    model = zoo.tiny("llama")
    forward = model.forward

    def without_the_option(
        input_ids: Any, position_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: Any
    ) -> Any:
        return forward(
            input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache
        )

    model.forward = without_the_option
    runner = ModelRunner(model, max_batch=1, max_context=None, scratch_entries=8)
    runner.prefill(0, text(5))
    assert runner.cache.tokens_in[0] == text(5)


def test_a_forward_first_moves_what_was_accepted() -> None:
    runner, tokens = made(), text(4)
    runner.prefill(0, tokens)
    tree = torch.tensor([[-1, 0, 0, 2]])
    runner.cache.graphed_copy = lambda moves: False  # on a GPU moves are deferred
    runner.forward(torch.tensor([[1, 2, 3, 4]]), parents=tree)
    runner.cache.commit([[0, 2, 3]], [[1, 3, 4]])
    found = runner.forward(torch.tensor([[5]])).logits
    expected = runner.model(torch.tensor([[*tokens, 1, 3, 4, 5]])).logits
    assert_close(found[0, -1], expected[0, -1])


def test_a_graphed_prefill_finds_what_was_accepted_in_place() -> None:
    runner, calls = made("phi3_longrope"), list[Any]()

    def run(*args: Any) -> bool:
        calls.append((*args, dict(runner.cache._pending)))
        return True

    runner._prefill = SimpleNamespace(run=run)  # type: ignore[assignment]
    runner.cache.graphed_copy = lambda moves: False
    runner.forward(torch.tensor([[1, 2, 3]]), parents=torch.tensor([[-1, 0, 0]]))
    runner.cache.commit([[0, 2]], [[1, 3]])
    assert runner.cache._pending
    assert runner.prefill(0, [1, 3, 4, 5]) == 2
    assert calls == [(0, [4, 5], 2, THRESHOLD - 1, {})]
    runner.prefill(0, [1, 3, 4, 5], chunk=4)  # of a fixed shape: not by a graph
    assert len(calls) == 1


def test_trees_on_a_device_are_read_where_no_backend_takes_them() -> None:
    """Tokens outside the vocabulary become some token within; those within stay."""
    runner = made()
    runner.prefill(1, text(4))
    last = zoo.VOCABULARY - 1
    tokens = torch.tensor([[1, last, 0, 5], [2, 10**9, -(10**9), last]])
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0]])
    trees = DeviceTree((1, 2), torch.stack([tokens, parents, parents], 1))
    found = runner.forward(tokens, parents=trees).logits
    expected = runner.forward(tokens.clamp(0, last), parents=parents).logits
    assert_close(found, expected)


# ---------------------------------------------------------------------------- hidden states


def test_layers_that_are_stored_already_keep_what_is_stored() -> None:
    runner = made()
    fake: Any = NotingBackend(most=(0, 0))
    runner._backend, graphs = fake, list[str]()
    runner._prefill = SimpleNamespace(  # type: ignore[assignment]
        graphs=SimpleNamespace(forget=lambda: graphs.append("forgotten")), run=lambda *_: False
    )
    runner.add_aux_layers([3, 1])
    assert fake.aux_layers == (1, 3) and graphs == ["forgotten"]
    runner.prefill(0, text(4))
    stored = runner.cache.hidden
    for layers in ((1,), (3, 1), [1, 3]):
        runner.add_aux_layers(layers)
    assert runner.cache.hidden is stored and graphs == ["forgotten"]
    assert runner.aux_indices((3, 1)) == (1, 0)
    assert runner.aux_indices([1]) == (0,)
    with pytest.raises(ConfigError, match="layers 1 to 3, not"):
        runner.add_aux_layers((1, 4))
    with pytest.raises(ConfigError, match="layers 1 to 3, not"):
        runner.add_aux_layers((0, 1))


@needs_kernels
@torch.no_grad()
def test_hidden_states_are_kept_in_the_order_of_layers() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_hidden_layers": 9}))).eval()
    runner = runner_of(model)
    runner.add_aux_layers((8, 1))
    assert runner.aux_indices((1, 8)) == (0, 1)


def test_hidden_states_of_accepted_nodes_are_moved_before_they_are_read() -> None:
    runner = made()
    runner.add_aux_layers((1,))
    runner.cache.graphed_copy = lambda moves: False
    runner.forward(torch.tensor([[1, 2, 3]]), parents=torch.tensor([[-1, 0, 0]]))
    runner.cache.commit([[0, 2]], [[1, 3]])
    found = runner.hidden_states((1,), torch.tensor([0]), torch.tensor([[0, 1]]))
    other = made()
    other.add_aux_layers((1,))
    other.prefill(0, [1, 3])
    expected = other.hidden_states((1,), torch.tensor([0]), torch.tensor([[0, 1]]))
    assert_close(found, expected)


# -------------------------------------------------------------------------------- refused models


def test_a_model_is_refused_before_it_is_run() -> None:
    for name in zoo.REFUSED:
        model = zoo.tiny(name)
        model.forward = lambda **_: pytest.fail("it was run")
        with pytest.raises(UnsupportedModelError, match=type(model).__name__):
            ModelRunner(model, max_batch=1, max_context=16, scratch_entries=8)


def test_a_model_that_does_not_use_our_cache_is_refused() -> None:
    model = zoo.tiny("llama")

    def broken(past_key_values: Any = None, **_: Any) -> Any:
        if past_key_values is not None:
            raise TypeError("past_key_values")

    def broken_by_itself(**_: Any) -> Any:
        raise TypeError("broken")

    def without_cache(input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, zoo.VOCABULARY))

    for forward, reason in (
        (broken, "does not run with a cache that can be rolled back .past_key_values."),
        (broken_by_itself, "does not run, without a cache either: broken"),
        (without_cache, "stores no keys in the cache it is given"),
    ):
        model.forward = forward
        with pytest.raises(UnsupportedModelError, match=reason):
            ModelRunner(model, max_batch=1, max_context=16, scratch_entries=8)


def test_tested_architectures_are_not_compared_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(runners.support, "check_against_plain_forward", checked.append)
    made()
    assert not checked
    monkeypatch.setattr(runners.support, "TESTED", frozenset())
    runner = made()
    assert checked == [runner]
