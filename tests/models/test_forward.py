"""A runner's forwards by the model and by a backend, its prompts, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from draftahead.backends.base import CacheSlice, DeviceTree
from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.core.types import ForwardOutput
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.models import runner as runners
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from emulated_gpu import emulated_gpu
from llama_shaped import SIZES, llama_shaped, needs_kernels, runner_of

THRESHOLD = 24  # of phi3_longrope


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, zoo.VOCABULARY, (length,), generator=generator).tolist()


def made(name: str = "llama", **options: Any) -> ModelRunner:
    options = {"max_batch": 4, "max_context": None, "scratch_entries": 16} | options
    return ModelRunner(zoo.tiny(name), **options)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def assert_same_entries(one: ModelRunner, other: ModelRunner, slot: int) -> None:
    assert one.cache.tokens_in[slot] == other.cache.tokens_in[slot]
    length = len(one.cache.tokens_in[slot])
    for here, there in zip(one.cache.tensors(), other.cache.tensors(), strict=True):
        assert_close(here[:, slot, :, :length], there[:, slot, :, :length])


@dataclasses.dataclass
class Call:
    tokens: list[list[int]]
    options: dict[str, Any]


def noted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The forwards of a runner from now on."""
    forward, calls = runner.forward, list[Call]()

    def note(tokens: Tensor, **options: Any) -> ForwardOutput:
        calls.append(Call(tokens.tolist(), options))
        return forward(tokens, **options)

    monkeypatch.setattr(runner, "forward", note)
    return calls


# ------------------------------------------------------------------------------------ prompts


def test_a_prompt_is_filled_in_chunks_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, whole = made(), made()
    tokens = text(10)
    whole.prefill(1, tokens)
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 4)
    calls = noted(runner, monkeypatch)
    assert runner.prefill(1, tuple(tokens)) == 0
    assert [call.tokens for call in calls] == [[tokens[:4]], [tokens[4:8]], [tokens[8:]]]
    for call, count in zip(calls, (4, 4, 2), strict=True):
        assert call.options == {
            "first_slot": 1, "kv_len": None, "with_logits": False, "num_context_tokens": count,
        }  # fmt: skip
    assert_same_entries(runner, whole, 1)
    calls.clear()
    assert runner.prefill(1, [*tokens[:7], 3, 4]) == 7
    assert [call.tokens for call in calls] == [[[3, 4]]]
    assert runner.cache.tokens_in[1] == [*tokens[:7], 3, 4]


def test_chunks_cut_by_position_reuse_nothing_and_are_padded_by_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, plain, tokens = made(), made(), text(10)
    plain.prefill(0, tokens)
    for _ in range(2):
        with monkeypatch.context() as patch:
            calls = noted(runner, patch)
            assert runner.prefill(0, tokens, chunk=4, kv_len=32) == 0
        last = [*tokens[8:], 0, 0]
        assert [call.tokens for call in calls] == [[tokens[:4]], [tokens[4:8]], [last]]
        assert [call.options["kv_len"] for call in calls] == [32] * 3
        assert [call.options["num_context_tokens"] for call in calls] == [4, 4, 2]
    assert_same_entries(runner, plain, 0)


@pytest.mark.parametrize(
    ("limit", "lengths", "widths"),
    [
        (8, (3, 9, 5), [2, 2, 2, 2, 1]),
        (2, (3, 2, 1), [1, 1, 1]),
        (99, (3, 9, 5), [4, 4, 1]),
        (8, (4, 4), [4]),
    ],
)
def test_several_prompts_are_filled_in_one_forward(
    limit: int, lengths: tuple[int, ...], widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk at most, and of so many tokens in all; padding is no context."""
    runner, alone = made(), made()
    prompts = [text(length, seed) for seed, length in enumerate(lengths)]
    for slot, prompt in enumerate(prompts, start=1):
        alone.prefill(slot, prompt)
        runner.cache.tokens_in[slot] = [5, 5, 5]
    runner.cache.tokens_in[0] = [7]
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(runners, "PREFILL_TOKENS", limit)
    calls = noted(runner, monkeypatch)
    runner.prefill_slots(1, [tuple(prompt) for prompt in prompts])
    assert runner.cache.tokens_in[0] == [7]
    start = 0
    for call, width in zip(calls, widths, strict=True):
        parts = [prompt[start : start + width] for prompt in prompts]
        assert call.tokens == [part + [0] * (width - len(part)) for part in parts]
        assert call.options["num_context_tokens"] == list(map(len, parts))
        assert call.options["first_slot"] == 1 and call.options["with_logits"] is False
        start += width
    for slot in range(1, 1 + len(prompts)):
        assert_same_entries(runner, alone, slot)


@pytest.mark.parametrize("name", ["llama", "phi3_longrope", "kernels"])
def test_prompts_that_are_filled_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single one, several with longrope, and where that costs nothing."""
    runner = runner_of(llama_shaped("llama"), 4) if name == "kernels" else made(name)
    prompts = [text(7, 1)] if name == "llama" else [text(7, 1), text(3, 2)]
    calls = noted(runner, monkeypatch)
    if name == "kernels" and not runner.batch_invariant:
        pytest.skip("no compiler")
    for _ in range(2):  # reusing nothing
        calls.clear()
        runner.prefill_slots(1, prompts)
        assert [call.tokens for call in calls] == [[prompt] for prompt in prompts]
        counts = [call.options["num_context_tokens"] for call in calls]
        assert counts == list(map(len, prompts))  # one number each, as backends take it
        assert runner.cache.tokens_in[1 : 1 + len(prompts)] == prompts


@needs_kernels
def test_the_kernels_fill_a_prompt_by_their_own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(llama_shaped("llama"), max_batch=1, max_context=None, scratch_entries=16)
    calls = noted(runner, monkeypatch)
    runner.prefill(0, text(NODES_PER_CALL + 3))
    assert [len(call.tokens[0]) for call in calls] == [NODES_PER_CALL, 3]


# ------------------------------------------------------------------------------------ longrope


def test_a_slots_frequencies_follow_the_length_with_its_root() -> None:
    runner = made("phi3_longrope")
    assert runner.long_rope_threshold == THRESHOLD
    tokens = text(40)
    for length, is_long, reused in ((22, False, 0), (23, False, 22), (24, True, 0), (30, True, 24)):
        assert runner.prefill(1, tokens[:length]) == reused
        assert runner.cache.long_rope == [False, is_long, False, False]
        assert runner.is_long_rope(length + 1) == is_long
    assert not made().is_long_rope(10**6)


@torch.no_grad()
def test_the_beginning_of_a_long_sequence_is_rotated_like_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, whole, tokens = made("phi3_longrope"), made("phi3_longrope"), text(40)
    whole.prefill(0, tokens)
    monkeypatch.setattr(runners, "PREFILL_CHUNK", 8)
    runner.prefill(0, tokens)
    assert_same_entries(runner, whole, 0)
    # Logits, of chains and trees, and that of the dummy token is not among them.
    expected = whole.model(torch.tensor([tokens])).logits
    for count in (1, 10, 23, 24, 25, 40):
        fresh = made("phi3_longrope", max_batch=1)
        fresh.cache.long_rope[0] = True
        nodes = torch.tensor([tokens[:count]])
        chain = torch.arange(count)[None] - 1
        for parents in (None, chain):
            for kv_len in (None, 60):
                found = fresh.forward(nodes, parents=parents, kv_len=kv_len).logits
                assert_close(found, expected[:, :count])
        found = fresh.forward(
            torch.tensor([[tokens[0], 9, tokens[1]]]), parents=torch.tensor([[-1, 0, 0]])
        ).logits
        assert_close(found[:, [0, 2]], expected[:, :2])


@torch.no_grad()
def test_padding_does_not_change_the_frequencies_of_a_short_sequence() -> None:
    runner, tokens = made("phi3_longrope", max_batch=1), text(THRESHOLD)
    expected = runner.model(torch.tensor([tokens])).logits
    runner.prefill(0, tokens[:20])
    found = runner.forward(torch.tensor([tokens[20:] + [0] * 5])).logits
    assert_close(found[:, :4], expected[:, 20:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "phi3_longrope"])
def test_the_last_position_of_a_model_is_used_and_none_behind(name: str) -> None:
    runner = made(name, max_batch=1)
    tokens = text(zoo.POSITIONS)
    expected = runner.model(torch.tensor([tokens])).logits
    runner.prefill(0, tokens[:-3])
    found = runner.forward(torch.tensor([tokens[-3:] + [0] * 5])).logits
    assert_close(found[:, :3], expected[:, -3:])


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
    fake = runner._backend = Fake()
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


# ----------------------------------------------------------------------------------- backends


class Fake:
    """A backend that notes what it is asked, and answers what it is told."""

    batch_invariant, supports_device_drafts, tolerance = False, True, 0.1

    def __init__(self, most: tuple[int, int] = (99, 99)) -> None:
        self.most = most
        self.asked: list[tuple[int, int, bool]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.aux_layers: tuple[int, ...] = ()
        self.answers, self.more = True, True

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        self.aux_layers = aux_layers

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        self.asked.append((num_sequences, num_nodes, with_logits))
        return num_sequences <= self.most[0] and num_nodes <= self.most[1]

    def forward(
        self, tokens: Tensor, num_cached: Any, parents: Any, *, cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:  # fmt: skip
        self.calls.append((tokens.tolist(), num_cached, parents, cache_slice, with_logits))
        if not self.answers:
            return None
        batch, nodes = tokens.shape
        logits = torch.arange(batch * nodes * 5.0).view(batch, nodes, 5)
        if not self.more:
            return ForwardOutput(logits)
        return ForwardOutput(logits, logits[:, :, 0] + 1, logits[:, :, :4] + 2)


def test_a_cpu_backend_gets_the_forward_as_it_is() -> None:
    runner: Any = made()
    fake = runner._backend = Fake(most=(2, 3))
    runner.cache.tokens_in[1:3] = [[1] * 5, [1] * 2]
    nodes, parents = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[-1, 0, 0], [-1, 0, 1]])
    found = runner.forward(nodes, first_slot=1, parents=parents, num_context_tokens=2)
    assert found.logits.shape == (2, 3, 5)
    runner.forward(nodes, first_slot=1, kv_len=20, with_logits=False)
    lists = [[-1, 0, 0], [-1, 0, 1]]
    assert fake.calls == [
        (nodes.tolist(), [5, 2], lists, CacheSlice(1, 8, zoo.POSITIONS - 1, 2), True),
        (nodes.tolist(), [5, 2], None, CacheSlice(1, 20, zoo.POSITIONS - 1, 1), False),
    ]
    assert fake.asked == [(2, 3, True), (2, 3, False)]
    # Larger forwards, and prompts of several lengths, are the model's own.
    assert runner.forward(torch.zeros(1, 4, dtype=torch.long)).logits.shape[-1] == zoo.VOCABULARY
    runner.forward(nodes, num_context_tokens=[1, 2])
    assert len(fake.calls) == 2
    assert runner.forward(nodes, layers=LayerSubset(runner.model, (0,))).logits.shape[-1] != 5


def on_a_gpu(fake: Fake, max_batch: int = 20) -> Any:
    runner: Any = made(max_batch=max_batch, max_context=40)
    runner._is_gpu, runner._backend = True, fake
    return runner


def test_a_gpu_backend_gets_padded_forwards_whose_padding_is_cut_off() -> None:
    fake = Fake()
    runner = on_a_gpu(fake)
    for slot, length in enumerate(range(20)):
        runner.cache.tokens_in[slot] = [1] * length
    nodes = torch.arange(27).view(9, 3)
    for fake.more in (True, False):
        found = runner.forward(nodes, first_slot=2)
        assert found.logits.shape == (9, 3, 5)
        assert found.logits[1, 2, 0] == (1 * 4 + 2) * 5
        if fake.more:
            assert torch.equal(found.argmax, found.logits[:, :, 0] + 1)
            assert torch.equal(found.topk, found.logits[:, :, :4] + 2)
        else:
            assert found.argmax is None and found.topk is None
    tokens, num_cached, parents, cache_slice, _ = fake.calls[0]
    assert tokens == [*[[*row, 0] for row in nodes.tolist()], *[[0] * 4] * 7]
    assert num_cached == list(range(2, 18))
    assert parents is None
    assert cache_slice == CacheSlice(2, 10 + 3 + 1, zoo.POSITIONS - 1, 1)
    runner.forward(nodes, first_slot=2, kv_len=30)
    assert fake.calls[-1][3].kv_len == 31
    assert set(fake.asked) == {(16, 4, True)}
    trees = DeviceTree([0] * 9, torch.zeros(9, 3, 3, dtype=torch.int64))
    runner.forward(nodes, parents=trees)
    assert fake.asked[-1] == (16, 3, True)  # a device draft has the nodes that it has


def test_a_gpu_backend_that_does_not_take_a_forward() -> None:
    """Without padding it may; or its graph could not be captured; otherwise the model runs."""
    fake = Fake(most=(9, 3))
    runner = on_a_gpu(fake)
    nodes = torch.zeros(9, 3, dtype=torch.long)
    assert runner.forward(nodes, with_logits=True).logits.shape[-1] == 5
    assert fake.asked == [(16, 4, True), (9, 3, True)]
    assert fake.calls[0][0] == nodes.tolist()
    fake.answers = False
    assert runner.forward(nodes).logits.shape == (9, 3, zoo.VOCABULARY)
    assert len(fake.calls) == 2
    fake.most = (9, 2)
    assert runner.forward(nodes).logits.shape == (9, 3, zoo.VOCABULARY)
    assert len(fake.calls) == 2


def test_device_drafts_are_taken_where_their_padded_forward_is() -> None:
    fake = Fake(most=(16, 5))
    runner = on_a_gpu(fake)
    entries = runner.cache.num_entries
    assert runner.supports_device_drafts(9, 5)
    assert fake.asked == [(16, 5, True)]
    assert not runner.supports_device_drafts(9, 6)
    assert not runner.supports_device_drafts(17, 5)
    fake.asked.clear()
    runner.cache.tokens_in[15] = [1] * (entries - 5)  # beside it the padding fits
    assert runner.supports_device_drafts(9, 5)
    assert runner.supports_device_drafts(8, 5)
    runner.cache.tokens_in[15] = [1] * (entries - 4)
    assert runner.supports_device_drafts(9, 5)
    runner.cache.tokens_in[15], runner.cache.tokens_in[9] = [], [1] * (entries - 4)
    assert runner.supports_device_drafts(9, 5)
    assert fake.asked == [(16, 5, True), (8, 5, True), (9, 5, True), (9, 5, True)]
    fake.supports_device_drafts = False
    assert not runner.supports_device_drafts(1, 1)
    runner._backend, fake.supports_device_drafts = None, True
    assert not runner.supports_device_drafts(1, 1)
    longrope: Any = made("phi3_longrope")
    longrope._backend = fake
    assert not longrope.supports_device_drafts(1, 1)


class Scaled(Fake):
    """The runner's own logits, scaled."""

    def __init__(self, runner: Any, factor: float, tolerance: float = 0.1) -> None:
        super().__init__()
        self.runner, self.factor, self.tolerance = runner, factor, tolerance
        self.linears: list[bool] = []

    def forward(self, tokens: Tensor, *args: Any, **_: Any) -> ForwardOutput:  # type: ignore[override]
        self.linears.append(self.runner._linears.enabled)
        self.calls.append((tokens.tolist(), *args))
        self.runner._backend = None
        slot = _["cache_slice"].first_slot
        output = self.runner.forward(tokens, first_slot=slot, parents=torch.tensor(args[1]))
        return ForwardOutput(output.logits * self.factor)


@pytest.mark.parametrize(
    ("factor", "tolerance", "gap"),
    [
        (1.0, 0.1, None),
        (1.05, 0.1, None),
        (1.2, 0.1, "2.0e-01"),
        (-1.0, 0.5, "2.0e[+]00"),
        (0.0, 1.0, "1.0e[+]00"),
        (0.0, 1.1, None),
        (float("nan"), 9.0, "nan"),
    ],
)
def test_a_backend_must_agree_with_the_models_own_forward(
    factor: float, tolerance: float, gap: str | None
) -> None:
    runner: Any = made()
    backend = Scaled(runner, factor, tolerance)
    problem = runner._disagreement(1, backend)
    if gap is None:
        assert problem is None
        assert backend.asked[-1] == (1, 6, True)
    else:
        assert problem is not None and re.search(f"differ from the model's own by {gap} ", problem)
    assert backend.linears == [True]
    assert runner._linears.enabled and runner._backend is None
    assert runner.cache.tokens_in == [[], [], [], []]


def test_a_model_whose_logits_are_all_zero_agrees() -> None:
    runner: Any = made()
    with torch.no_grad():
        runner.model.lm_head.weight.zero_()
    assert runner._disagreement(0, Scaled(runner, 1.0)) is None


def test_the_comparison_of_a_backend_takes_what_the_context_allows() -> None:
    for max_context, prompt in ((96, 24), (30, 24), (29, 23), (7, 1)):
        runner: Any = made(max_context=max_context)
        backend = Scaled(runner, 1.0)
        assert runner._disagreement(0, backend) is None
        ((nodes, num_cached, _),) = backend.calls
        assert num_cached == [prompt] and len(nodes) == 1
        assert prompt + len(nodes[0]) <= max_context
    short: Any = made(max_context=6)
    assert "max_context 6 is too short" in short._disagreement(0, Scaled(short, 1.0))


def test_a_backend_whose_first_forward_fails_is_not_taken() -> None:
    runner: Any = made()
    backend = Scaled(runner, 1.0)
    backend.most = (0, 0)
    runner._is_gpu = False
    backend.supports = lambda *size: len(backend.calls) == 0  # type: ignore[method-assign]
    assert runner._disagreement(0, backend) == "its first forward failed"


@needs_kernels
def test_the_models_own_side_of_the_comparison_has_its_own_linear_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner: Any = runner_of(llama_shaped("llama"))
    backend, runner._backend = runner._backend, None
    seen: list[tuple[bool, bool]] = []
    forward = runner.forward

    def note(tokens: Tensor, **options: Any) -> ForwardOutput:
        if options.get("with_logits", True):
            seen.append((runner._linears.enabled, runner._backend is backend))
        return forward(tokens, **options)

    monkeypatch.setattr(runner, "forward", note)
    assert runner._disagreement(0, backend) is None
    assert seen == [(False, False), (True, True)]


# -------------------------------------------------------------------------------- changed models


@needs_kernels
@torch.no_grad()
def test_a_backend_is_made_anew_after_weights_were_replaced() -> None:
    """With the auxiliary layers it had; and all prompts notice."""
    for fill in ("prefill", "prefill_slots"):
        model = llama_shaped("llama")
        runner = runner_of(model, max_batch=2)
        runner.add_aux_layers((2,))
        before = runner._backend
        prompt = text(6)
        runner.prefill(0, prompt)
        assert runner._backend is before
        weight = model.model.layers[0].mlp.down_proj.weight
        model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(3 * weight.flip(0))
        runner.cache.tokens_in[0].clear()
        if fill == "prefill":
            runner.prefill(0, prompt)
        else:
            runner.prefill_slots(0, [prompt, prompt])
        assert runner.batch_invariant and runner._backend is not before
        runner.forward(torch.tensor([[5]]))
        theirs = model(torch.tensor([[*prompt, 5]]), output_hidden_states=True).hidden_states
        found = runner.hidden_states((2,), torch.tensor([0]), torch.arange(7)[None])
        torch.testing.assert_close(found[0, :, 0], theirs[2][0], rtol=1e-3, atol=1e-3)


@needs_kernels
def test_auxiliary_layers_stay_where_no_backend_runs_the_model_any_more() -> None:
    model = llama_shaped("llama")
    runner = runner_of(model)
    runner.add_aux_layers((2,))
    model.model.layers[1].register_forward_hook(lambda *_: None)
    runner.prefill(0, [1, 2, 3])
    assert runner._backend is None
    assert runner.cache.hidden is not None and runner.cache.hidden[0, 0, :3].any()


def test_graphs_of_prompts_go_with_the_backend() -> None:
    with emulated_gpu():
        runner = made()
        assert runner._prefill is not None
        assert runner.cache.graphed_copy is not None  # of entries that are moved
        runner.model.model.layers[1].register_forward_hook(lambda *_: None)
        runner.prefill(0, [1, 2, 3])
        assert runner._backend is None and runner._prefill is None


def test_where_transformers_runs_a_model_no_backend_is_chosen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = made()
    monkeypatch.setattr(runner, "_choose_backend", lambda slot: pytest.fail("chosen again"))
    runner.model.lm_head.weight = torch.nn.Parameter(runner.model.lm_head.weight.clone())
    runner.prefill(0, text(3))


def test_several_prompts_notice_a_changed_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = made()
    runner._backend, chosen = Fake(most=(0, 0)), list[int]()
    monkeypatch.setattr(runner, "_choose_backend", chosen.append)
    runner.prefill_slots(1, [text(3), text(4)])
    runner._backend = Fake(most=(0, 0))
    assert not chosen
    runner.model.lm_head.weight = torch.nn.Parameter(runner.model.lm_head.weight.clone())
    runner.prefill_slots(1, [text(3), text(4)])
    assert chosen == [1]
    assert runner._backend is None


def test_synchronize_waits_for_the_device() -> None:
    with emulated_gpu() as gpu:
        runner = made()
        waits = gpu.waits
        runner.synchronize()
        assert gpu.waits == waits + 1


# ---------------------------------------------------------------------------- hidden states


def test_layers_that_are_stored_already_keep_what_is_stored() -> None:
    runner = made()
    fake: Any = Fake(most=(0, 0))
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

    def broken(**_: Any) -> Any:
        raise TypeError("past_key_values")

    def without_cache(input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, zoo.VOCABULARY))

    for forward, reason in (
        (broken, "does not run with a cache that can be rolled back .past_key_values."),
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
