"""Attention and its mask against the same sums written as loops."""

from __future__ import annotations

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig

import zoo
from draftahead.kv import attention

BATCH, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, KV_LEN = 3, 6, 2, 5, 7, 9
CACHED = [2, 0, 4]
DEPTHS = [[0, 1, 1, 2], [0, 1, 0, 1], [0, 1, 2, 3]]
PARENTS = [[-1, 0, 0, 1], [-1, 0, -1, 2], [-1, 0, 1, 2]]  # a tree, two roots, a chain
MASKED = -1


def ancestors_of(parents: list[int]) -> Tensor:
    """[N, N]: a node's ancestors, and the node itself."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found


def expected_distances(trees: bool) -> Tensor:
    found = torch.full((BATCH, 1, 4, KV_LEN), MASKED)
    for b, cached in enumerate(CACHED):
        depths = DEPTHS[b] if trees else range(4)
        seen = ancestors_of(PARENTS[b] if trees else [-1, 0, 1, 2])
        for node, depth in enumerate(depths):
            for entry in range(cached):
                found[b, 0, node, entry] = cached + depth - entry
            for other in range(4):
                if seen[node, other]:
                    found[b, 0, node, cached + other] = depth - depths[other]
    return found


@pytest.mark.parametrize("trees", [True, False])
def test_distances_of_nodes_to_the_cached_tokens_and_to_their_ancestors(trees: bool) -> None:
    """Other nodes, and entries behind those of this forward, are masked."""
    depths = torch.tensor(DEPTHS if trees else [[0, 1, 2, 3]] * BATCH)
    ancestors = torch.stack([ancestors_of(parents) for parents in PARENTS]) if trees else None
    found = attention.distances(torch.tensor(CACHED), depths, ancestors, KV_LEN)
    assert torch.equal(found.clamp(min=MASKED), expected_distances(trees))


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (BATCH, HEADS, 4, KEY_DIM), (BATCH, KV_HEADS, KV_LEN, KEY_DIM)
    query, key = (3 * torch.randn(shape, dtype=torch.float64) for shape in shapes)
    value = torch.randn(BATCH, KV_HEADS, KV_LEN, VALUE_DIM, dtype=torch.float64)
    return query.to(dtype), key.to(dtype), value.to(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "scaling": {"scaling": 0.3},
    "a sliding window": {"sliding_window": 2},
    "a soft cap": {"softcap": 2.5},
    "sinks": {"s_aux": torch.linspace(-2, 3, HEADS, dtype=torch.float64)},
    "all": {
        "scaling": 0.7,
        "sliding_window": 3,
        "softcap": 4.0,
        "s_aux": torch.linspace(3, -1, HEADS, dtype=torch.float64),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_grouped_attention_is_attention_of_each_head_by_itself(option: str) -> None:
    options, distance = OPTIONS[option], expected_distances(trees=True)
    query, key, value = inputs(torch.float64)
    scaling = options.get("scaling", 1 / math.sqrt(KEY_DIM))
    window = options.get("sliding_window", KV_LEN)
    expected = torch.zeros(BATCH, 4, HEADS, VALUE_DIM, dtype=torch.float64)
    for b in range(BATCH):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            for node in range(4):
                seen = [e for e in range(KV_LEN) if 0 <= distance[b, 0, node, e] < window]
                scores = key[b, shared, seen] @ query[b, head, node] * scaling
                if "softcap" in options:
                    scores = (scores / options["softcap"]).tanh() * options["softcap"]
                total = scores.exp().sum()
                if "s_aux" in options:
                    total += options["s_aux"][head].exp()
                expected[b, node, head] = scores.exp() / total @ value[b, shared, seen]
    # dropout: transformers passes it on, and it is nothing outside of training.
    found, weights = attention.grouped_attention(
        nn.Identity(), query, key, value, distance, dropout=0.5, **options
    )
    assert weights is None
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    """A sink is not rounded to half precision."""
    query, key = torch.zeros(1, 1, 1, 4, dtype=dtype), torch.zeros(1, 1, 1, 4, dtype=dtype)
    value, mask = torch.ones(1, 1, 1, 1, dtype=dtype), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    logit = 8.0 + 2**-5 - 2**-9  # bfloat16 has steps of 2^-4 here
    logit = 2048.9 if dtype == torch.float16 else logit
    query[..., 0], key[..., 0] = logit // 1 / 4, 4.0
    found, _ = attention.grouped_attention(
        nn.Identity(), query, key, value, mask, scaling=1.0, s_aux=torch.tensor([logit])
    )
    assert found.dtype == dtype
    expected = 1 / (1 + math.exp(logit - logit // 1))
    assert abs(float(found) - expected) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_additive_mask_is_zero_where_a_distance_is_not_negative(dtype: torch.dtype) -> None:
    found = attention.additive(torch.tensor([[-3, -1, 0, 1, 5]]), dtype)
    lowest = torch.finfo(dtype).min
    assert torch.equal(found, torch.tensor([[lowest, lowest, 0, 0, 0]], dtype=dtype))


def test_calls_of_a_model_are_recorded_with_their_options() -> None:
    calls: dict[int, dict[str, Any]] = {}
    query, key, value = inputs(torch.float32)
    distance = expected_distances(trees=True)
    numbered, other = nn.Identity(), nn.Identity()
    numbered.layer_idx = 3  # type: ignore[assignment]
    with attention.in_configs([], calls):
        for module, window in ((numbered, 2), (other, 4)):
            found, _ = AttentionInterface()[attention.NAME](
                module, query, key, value, distance, sliding_window=window
            )
            wanted, _ = attention.grouped_attention(
                module, query, key, value, distance, sliding_window=window
            )
            assert torch.equal(found, wanted)
    assert calls == {3: {"sliding_window": 2}, -1: {"sliding_window": 4}}


def test_a_model_that_builds_its_own_mask_is_noticed() -> None:
    with (
        attention.in_configs([]),
        pytest.raises(AssertionError, match="built its own mask"),
    ):
        AttentionMaskInterface()[attention.NAME](batch_size=1)


def test_configs_are_restored() -> None:
    """Also after an error, and with what their owner has chosen meanwhile."""
    config = LlamaConfig(attn_implementation="eager")
    for name in ("eager", "sdpa"):
        config._attn_implementation = name
        with pytest.raises(ZeroDivisionError), attention.in_configs([config]):
            assert config._attn_implementation == attention.NAME
            raise ZeroDivisionError
        assert config._attn_implementation == name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_threads_run_a_model_as_its_owner_chose(implementation: str) -> None:
    """While a thread of ours runs it, and with what the owner chooses later."""
    model = zoo.tiny("mistral", dtype=torch.float32)  # its window needs a mask of its own
    model.set_attn_implementation(implementation)
    ids = torch.arange(30)[None]
    padded = torch.ones_like(ids)
    padded[0, :3] = 0

    def run() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [model(ids).logits, model(ids, attention_mask=padded).logits]

    alone = run()
    with ThreadPoolExecutor(1) as pool, attention.in_configs([model.config]):
        together = pool.submit(run).result(60)
        assert all(map(torch.equal, alone, together))
        with pytest.raises(AssertionError, match="built its own mask"):
            run()
    assert all(map(torch.equal, alone, run()))


def test_a_configuration_that_is_gone_is_forgotten() -> None:
    config = LlamaConfig()
    key = id(config)
    for _ in range(2):
        with attention.in_configs([config]):
            assert key in attention._owners_choice
    del config
    gc.collect()
    assert key not in attention._owners_choice


def test_calls_of_a_later_forward_are_not_recorded() -> None:
    calls: dict[int, dict[str, Any]] = {}
    for recorded in (calls, None):
        with attention.in_configs([], recorded):
            assert attention._this_thread.is_ours
            assert attention._this_thread.calls is recorded
        assert not attention._this_thread.is_ours
        assert attention._this_thread.calls is None
