"""Which forwards a backend gets, when it is taken, and when it is chosen again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead.backends.base import CacheSlice, DeviceTree
from draftahead.core.types import ForwardOutput
from draftahead.models.layer_subset import LayerSubset
from emulated_gpu import emulated_gpu
from llama_shaped import llama_shaped, needs_kernels, runner_of
from runner_checks import NotingBackend, made, text

# ----------------------------------------------------------------------------------- backends


def test_a_cpu_backend_gets_the_forward_as_it_is() -> None:
    runner: Any = made()
    fake = runner._backend = NotingBackend(most=(2, 3))
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


def on_a_gpu(fake: NotingBackend, max_batch: int = 20) -> Any:
    runner: Any = made(max_batch=max_batch, max_context=40)
    runner._is_gpu, runner._backend = True, fake
    return runner


def test_a_gpu_backend_gets_padded_forwards_whose_padding_is_cut_off() -> None:
    fake = NotingBackend()
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
    fake = NotingBackend(most=(9, 3))
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
    fake = NotingBackend(most=(16, 5))
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


class Scaled(NotingBackend):
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


def test_a_model_that_transformers_runs_is_bound_anew_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old KV entries are another model's; and a backend may support the model as it is now."""
    runner = made()
    chosen = list[int]()
    monkeypatch.setattr(runner, "_choose_backend", chosen.append)
    runner.cache.tokens_in[2] = [1, 2, 3]
    runner.prefill(0, text(3))
    assert not chosen and runner.cache.tokens_in[2] == [1, 2, 3]
    runner.model.lm_head.weight = torch.nn.Parameter(runner.model.lm_head.weight.clone())
    runner.prefill(0, text(3))
    assert chosen == [0] and runner.cache.tokens_in[2] == []


def test_several_prompts_notice_a_changed_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = made()
    runner._backend, chosen = NotingBackend(most=(0, 0)), list[int]()
    monkeypatch.setattr(runner, "_choose_backend", chosen.append)
    runner.prefill_slots(1, [text(3), text(4)])
    runner._backend = NotingBackend(most=(0, 0))
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
