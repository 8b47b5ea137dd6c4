"""The EAGLE drafter: what it feeds its head, and that this is what the head was trained on."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import drafted
import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cpu import build
from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.drafters.eagle.drafter import LOOK_AGAIN, Eagle
from draftahead.drafters.eagle.head import EagleConfig, EagleHead, RMSNorm, new_head

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TREE = [[-1, 0, 0, 1, 1, 2, 3]]
KERNELS = [True, False]


def wide() -> Any:
    """A target whose widths int8 takes."""
    config = LlamaConfig(
        vocab_size=zoo.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.25 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def outputs_along(head: EagleHead, model: Any, text: list[int], path: list[int]) -> torch.Tensor:
    """What the head makes of guesses behind a text, one by one, as the paper has it. Returns the
    logits after the root and after each guess, [1 + guesses, D]."""
    ids = torch.tensor([text])
    told = model(ids, output_hidden_states=True).hidden_states
    states = torch.stack([told[depth] for depth in head.config.depths], 2)
    embed = model.get_input_embeddings()
    hidden = head.feature(states[:, :-1])
    tokens = ids[:, 1:]
    found = []
    for guess in [*path, 0]:
        places = torch.arange(tokens.shape[1])[None]
        out = head(embed(tokens), hidden, places, causal)
        found.append(head.logits(out[0, -1]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        tokens = torch.cat([tokens, torch.tensor([[guess]])], 1)
    return torch.stack(found)


def made(
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
    rows: int = 3,
    sure: float = 1.0,
    **flags: bool,
) -> tuple[Any, LLM, Eagle]:
    """With a head that is not rounded, by our kernels or by torch; the surer it is, the deeper are
    its trees."""
    if kernels and build.library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr("draftahead.drafters.eagle.runner.quantize_linears", lambda head: 0)
    if not kernels:
        monkeypatch.setattr("draftahead.drafters.eagle.runner.cpu_kernels", lambda *_: None)
    model = wide()
    torch.manual_seed(1)
    head = new_head(model, torch.arange(0, zoo.VOCABULARY, 2), depths=(1, 2), layers=2)
    for name, value in flags.items():
        setattr(head.config, name, value)
    head.layers[0]._norms_residual = head.config.norm_before_residual  # the only one that asks
    if head.config.norm_before_fuse:
        head.input_norm = RMSNorm(2 * 64, 1e-6)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:  # no norm is like another
                weight.mul_(1 + 0.3 * torch.randn_like(weight))
        head.lm_head.weight.mul_(sure)
    llm = LLM(model, {"method": "eagle", "model": head}, max_batch=rows)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Eagle)
    assert (drafter.runner._kernels is not None) == kernels
    return model, llm, drafter


@pytest.mark.parametrize("kernels", KERNELS)
@torch.no_grad()
def test_nodes_of_a_tree_are_what_the_head_says_along_their_paths(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, trees that grow, a node at a time or more."""
    model, llm, drafter = made(kernels, monkeypatch)
    prompts = zoo.ragged_prompts(3)
    for prompt in prompts:
        llm.engine.add(llm._request(prompt, GREEDY))
    llm.engine._admit()
    batch = llm.engine._batch()
    with torch.inference_mode():
        drafter.runner.catch_up(batch.sequences, [True] * 3)
        guesses = torch.tensor([[0, 9, 4, 7, 2, 5, 8]]) + torch.arange(3)[:, None]
        for count in (2, 3, 6, 7):
            drafter.runner.go_on(guesses[:, :count], torch.tensor(TREE * 3)[:, :count])
        found = drafter.runner.logits
    for row, prompt in enumerate(prompts):
        for node in range(7):
            path: list[int] = []
            at = node
            while at > 0:
                path.insert(0, int(guesses[row, at]))
                at = TREE[0][at]
            expected = outputs_along(drafter.head, model, prompt, path)[-1]
            assert torch.allclose(found[row, node], expected, atol=1e-4), (row, node)


@torch.inference_mode()
def test_a_row_of_another_text_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its last text left there; and what both begin with is kept."""
    _, llm, drafter = made(False, monkeypatch, rows=2)
    cache = drafter.runner.cache
    for prompt in ([5, 6, 7, 8, 9], [5, 6, 7, 1, 2, 3, 4], [2, 2, 2], [2, 2, 2, 2, 2, 9, 9]):
        llm.engine.add(llm._request(prompt, GREEDY))
        llm.engine._admit()
        drafter.runner.catch_up(llm.engine._batch().sequences, [True])
        assert cache.tokens_in[0] == prompt[1:]
        states = cache.keys[0][0, :, : len(prompt) - 1].clone()
        cache.tokens_in[0].clear()
        drafter.runner.catch_up(llm.engine._batch().sequences, [True])
        assert torch.allclose(cache.keys[0][0, :, : len(prompt) - 1], states, atol=1e-5)
        llm.engine.release(llm.engine.scheduler.running[0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_missed_is_made_up_for(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at every step, or not for a while: after the same text it says the same."""
    _, llm, drafter = made(kernels, monkeypatch)
    fresh = copy.copy(drafter)
    for prompt in (zoo.ragged_prompts(1)[0] * 3, zoo.ragged_prompts(2)[1]):
        llm.engine.add(llm._request(prompt, SamplingParams(temperature=0, max_tokens=40)))
    steps = 0
    while llm.engine.scheduler.waiting or llm.engine.scheduler.running:
        llm.engine.step()
        steps += 1
        if steps % 4 == 0 and llm.engine.scheduler.running:
            batch = llm.engine._batch()
            able = [True] * len(batch.sequences)
            fresh.runner = type(drafter.runner)(drafter.head, llm.engine.verifier.runner, 3, 17)
            with torch.inference_mode():
                for one in (drafter, fresh):
                    one.runner.catch_up(batch.sequences, able)
            assert torch.allclose(drafter.runner.logits, fresh.runner.logits, atol=1e-4)
    assert steps > 8


def test_a_rounded_head_says_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 on the CPU: other guesses now and then, the same text always."""
    if build.library() is None:
        pytest.skip("no compiler")
    model = wide()
    head = new_head(model, torch.arange(zoo.VOCABULARY), depths=(1, 2))
    llm = LLM(model, {"method": "eagle", "model": head, "num_speculative_tokens": 3})
    rounded = llm.engine.drafter.head  # type: ignore[attr-defined]
    hidden = torch.randn(4, 64)
    with torch.no_grad():
        gap = (rounded.logits(hidden) - head.logits(hidden)).norm() / head.logits(hidden).norm()
    assert 0 < gap < 0.03
    prompt = zoo.ragged_prompts(1)[0]
    assert llm.generate(prompt, GREEDY)[0].token_ids == zoo.reference(model, prompt, 12)
    assert type(head.fc) is torch.nn.Linear  # the caller's own head stays as it was


def test_a_text_of_one_token_has_no_state_to_start_from() -> None:
    model = zoo.tiny("llama")
    llm = LLM(model, {"method": "eagle", "model": drafted.random_head(model)}, max_batch=2)
    outs = llm.generate([[5], [1, 2, 3]], GREEDY)
    for out, prompt in zip(outs, ([5], [1, 2, 3]), strict=True):
        assert out.token_ids == zoo.reference(model, prompt, 12)


def test_wrong_heads_are_refused() -> None:
    model = zoo.tiny("llama")
    with pytest.raises(errors.ConfigError, match="needs 'model'"):
        LLM(model, "eagle")
    with pytest.raises(errors.ConfigError, match="no EAGLE head and no path"):
        LLM(model, {"method": "eagle", "model": 3})
    other = wide()
    with pytest.raises(errors.HeadMismatchError, match="trained for another model"):
        LLM(model, {"method": "eagle", "model": drafted.random_head(other)})
    with pytest.raises(errors.ConfigError, match="not both"):
        head = drafted.random_head(model)
        LLM(model, {"method": "auto", "model": model, "head": head})


@pytest.mark.model
def test_the_head_that_comes_with_smollm2_is_good() -> None:
    """Well above one guess a step, on a prompt of ours; and the text is plain decoding's."""
    prompt = [{"role": "user", "content": "What is the capital of France, and why is it known?"}]
    sampling = SamplingParams(temperature=0, max_tokens=48)
    plain = LLM("smollm2", "none").chat(prompt, sampling)
    out = LLM("smollm2", {"method": "eagle", "num_speculative_tokens": 5}).chat(prompt, sampling)
    assert out.token_ids == plain.token_ids
    assert out.stats.mean_acceptance_length > 2


@pytest.mark.parametrize("norms_residual", [False, True])
@torch.no_grad()
def test_the_head_computes_what_published_heads_do(norms_residual: bool) -> None:
    """Written out from the papers' code, tensor by tensor, with nothing of ours in it."""
    torch.manual_seed(4)
    layer = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config = EagleConfig(
        layer, draft_vocabulary=20, depths=(1, 2, 3), norm_before_residual=norms_residual
    )
    head = EagleHead(config)
    w = {name: value.normal_(0, 0.3) for name, value in head.named_parameters()}
    states, embedded = torch.randn(1, 9, 3, 32), torch.randn(1, 9, 32)
    at = torch.arange(9)[None]
    ours = head.logits(head(embedded, head.feature(states), at, causal))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(9, -1, 8).transpose(0, 1)

    angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :4], x[..., 4:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    feature = torch.cat([states[0, :, i] for i in range(3)], -1) @ w["fc.weight"].T
    normed = norm(feature, "layers.0.hidden_norm.weight")
    seen = torch.cat([norm(embedded[0], "layers.0.input_layernorm.weight"), normed], -1)
    query, key, value = heads(seen, "q"), heads(seen, "k"), heads(seen, "v")
    key, value = (x.repeat_interleave(2, 0) for x in (turned(key), value))
    scores = turned(query) @ key.transpose(1, 2) / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1) == 1, -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(9, 32)
    x = normed if norms_residual else feature
    x = x + mixed @ w["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, "layers.0.post_attention_layernorm.weight")
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    theirs = norm(x, "norm.weight") @ w["lm_head.weight"].T
    assert torch.allclose(ours[0], theirs, atol=1e-4)


@pytest.mark.parametrize("max_depths", [[9, 9, 9], [9, 1, 0], [2, 9, 3]])
@pytest.mark.parametrize(
    ("sure", "flags"),
    [
        (1.0, {"norm_each": False}),
        (3.0, {"norm_output": True}),
        (6.0, {"norm_before_residual": False, "norm_each": False, "norm_before_fuse": True}),
    ],
    ids=["wide", "deep", "deeper"],
)
@torch.inference_mode()
def test_trees_grown_by_the_kernels_are_the_growers(
    sure: float, flags: dict[str, bool], max_depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node by node, behind as many pairs as each text lacks, which are read as well."""
    _, llm, drafter = made(True, monkeypatch, sure=sure, **flags)
    for prompt in zoo.ragged_prompts(3):
        llm.engine.add(llm._request(prompt, GREEDY))
    llm.engine._admit()
    batch = dataclasses.replace(llm.engine._batch(), step_cost=None)
    assert drafter.runner.grows(batch, drafter.grower)
    drafter.runner.catch_up(batch.sequences, [True] * 3)
    roots = drafter.runner._roots
    cache = drafter.runner.cache
    before = [cache.keys[0][row, :, : root + 1].clone() for row, root in enumerate(roots)]
    for row, lacking in enumerate((3, 1, 2)):
        del cache.tokens_in[row][-lacking:]
        cache.keys[0][row, :, len(cache.tokens_in[row]) :] = 0
    kernels, told = drafter.runner._kernels, list[Any]()
    grow = kernels.grow
    monkeypatch.setattr(kernels, "grow", lambda *a, **k: told.append(grow(*a, **k)) or told[0])
    ours = drafter.runner.grown(batch, [True] * 3, drafter.grower, max_depths)
    assert [len(held) - 1 for held in cache.tokens_in] == roots
    for row, root in enumerate(roots):
        assert torch.allclose(cache.keys[0][row, :, : root + 1], before[row], atol=1e-5)
    logits, levels = drafter.runner.logits[:, 0], drafter.grower.levels
    theirs = drafter.grower.grow(batch, logits, drafter._expand, max_depths, drafter._spoken)
    assert told[0].levels == drafter.grower.levels - levels
    assert ours is not None and theirs is not None and sum(ours.num_nodes) > 12
    if max_depths == [9, 9, 9]:  # as deep as trees may be, or not
        assert (max(max(tree.depths(row)) for row in ours.parents) == 8) == (sure > 1)
    assert (ours.num_nodes, ours.tokens, ours.parents) == (
        theirs.num_nodes,
        theirs.tokens,
        theirs.parents,
    )
    for one, other in zip(ours.confidence or [], theirs.confidence or [], strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@torch.inference_mode()
def test_logits_that_are_no_numbers_make_no_guesses(
    odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, llm, drafter = made(True, monkeypatch, rows=1)
    llm.engine.add(llm._request(zoo.ragged_prompts(1)[0], GREEDY))
    llm.engine._admit()
    batch = llm.engine._batch()
    drafter.head.norm.weight[5] = odd
    assert drafter.runner.grown(batch, [True], drafter.grower, [9]) is None


@torch.inference_mode()
def test_a_tree_ends_where_a_level_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm, drafter = made(True, monkeypatch, rows=1)
    llm.engine.add(llm._request(zoo.ragged_prompts(1)[0], GREEDY))
    llm.engine._admit()
    batch = llm.engine._batch()
    sizes = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(drafter.grower, "level_seconds", seconds)
        draft = drafter.runner.grown(batch, [True], drafter.grower, [9])
        assert draft is not None
        sizes.append(draft.num_nodes[0])
    assert sizes[0] > sizes[1] == 1 + 4  # the root's children cost nothing more


def test_trees_are_as_large_as_pays_and_the_largest_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what the largest had to offer, the head's time included; for each number of texts."""
    _, _, drafter = made(False, monkeypatch, rows=1)

    class Rows:
        def of(self, rows: int) -> float:
            return 1.0 + 0.04 * rows

    class Times:
        def laps(self) -> list[float]:
            return [2.0, 1.0]

    def batch(texts: int) -> Any:
        return SimpleNamespace(sequences=(None,) * texts, step_cost=Rows())

    def grown(texts: int, size: int) -> None:
        tokens = torch.zeros(texts, size, dtype=torch.long)
        likely = [0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1] + [0.01] * 99
        growing: Any = SimpleNamespace(clock=Times())
        confidence = [likely[: size - 1]] * texts
        sizes = [size] * texts
        drafter.note_grown(Draft(tokens, tokens, sizes, confidence=confidence, on_device=growing))

    assert [drafter._size(batch(texts)) for texts in (1, 5, 40)] == [32, 16, 2]
    grown(40, 2)  # as large as it gets for forty, and no word about one
    assert drafter._size(batch(1)) == 32
    grown(1, 32)
    assert drafter._size(batch(1)) == 8  # 4.5 tokens in 3.32; of 4 nodes 3.4 in 3.16
    for _ in range(LOOK_AGAIN):
        grown(1, 8)
    assert drafter._size(batch(1)) == 32
    grown(1, 32)
    assert drafter._size(batch(1)) == 8


def test_processors_and_sampling_grow_by_the_dice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on more than the logits is not for the kernels."""
    model, llm, drafter = made(True, monkeypatch, rows=1)
    for sampling in (
        SamplingParams(temperature=0.8, max_tokens=8, seed=1),
        SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.5),
    ):
        llm.engine.add(llm._request([1, 2, 3, 4], sampling))
        llm.engine._admit()
        assert not drafter.runner.grows(llm.engine._batch(), drafter.grower)
        llm.engine.release(llm.engine.scheduler.running[0])
        plain = LLM(model, "none").generate([1, 2, 3, 4], sampling)[0]
        assert llm.generate([1, 2, 3, 4], sampling)[0].token_ids == plain.token_ids
