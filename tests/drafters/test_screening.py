"""Logits from a fraction of the vocabulary's bytes: rough but for those that count."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.drafters.eagle import io, screening
from draftahead.drafters.eagle.cpu import STRETCHES, CpuEagleHead
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.eagle.spec import shape_of
from draftahead.kv.cache import KVCache, LayerKVShape
from draftahead.train.eagle import Moments

WORDS, WIDTH = 9_001, 256


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    torch.manual_seed(4)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def head(model: Any) -> EagleHead:
    torch.manual_seed(5)
    return new_head(model, torch.arange(WORDS), depths=(1, 2), inner=128).requires_grad_(False)


def outputs(count: int, directions: int = 24) -> torch.Tensor:
    """Vectors that fill few of the directions they could."""
    torch.manual_seed(6)
    filled = torch.randn(directions, WIDTH)
    return torch.randn(count, directions) @ filled


def moments_of(vectors: torch.Tensor) -> torch.Tensor:
    moments = Moments()
    for part in vectors.split(100):
        moments.add(part[None])
    found = moments.mean()
    assert found is not None
    with torch.autocast("cpu", enabled=False):
        assert torch.allclose(found.float(), vectors.T @ vectors / len(vectors), atol=1e-4)
    return found


def test_outputs_are_seen_through_the_directions_they_fill(head: EagleHead) -> None:
    """And not through as many others; nor by those in which rows alone differ most."""
    rows, known, new = head.lm_head.weight, *outputs(600).split(300)
    found = screening.fitted(moments_of(known), rows)
    assert found is not None
    assert found.sight.shape == found.span.shape == (64, WIDTH)
    exact, rough = new @ rows.T, new @ found.sight.T @ found.span @ rows.T
    assert (exact - rough).norm() < 0.05 * exact.norm()
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][:, :64]
    assert (exact - new @ turn @ turn.T @ rows.T).norm() > 0.5 * exact.norm()
    assert screening.fitted(torch.eye(64), torch.randn(9, 64)) is None
    for odd in (0.0, torch.nan):
        assert screening.fitted(odd * moments_of(known), rows) is None


def test_what_is_trained_in_half_precision_is_counted_in_full() -> None:
    """Rounded sums of products would have directions of less than no size."""
    sizes = torch.arange(1, WIDTH + 1) ** -1.5
    torch.manual_seed(7)
    vectors = torch.randn(4000, WIDTH) * sizes
    with torch.autocast("cpu", torch.bfloat16):
        found = moments_of(vectors)
    assert torch.linalg.eigvalsh(found.double()).min() > 0
    assert screening.fitted(-found, torch.randn(99, WIDTH)) is None


def test_the_likeliest_are_computed_as_they_are(head: EagleHead) -> None:
    """The same logits as without, for all that come near the best; the others are near enough."""
    if build.library() is None:
        pytest.skip("no compiler")
    quantize_linears(head)
    shape, states = shape_of(head), 3 * outputs(4)
    found = screening.fitted(moments_of(outputs(600)), head.lm_head.dequantized())
    assert found is not None
    both, after = [], []
    for directions in (None, found):
        cache = KVCache([LayerKVShape(2, 64, 2, 64)], 1, 32, torch.float32, torch.device("cpu"))
        kernels = CpuEagleHead(shape, cache, directions)
        x, seen = states[None].clone(), torch.zeros(1, 4, 2 * WIDTH)
        turns = torch.ones(1, 4, 64), torch.zeros(1, 4, 64)
        chain = {"depths": [[0, 1, 2, 3]], "ancestors": [[1, 3, 7, 15]]}
        both.append(kernels.run(x, seen, turns, first=0, lengths=[0], **chain)[0])  # type: ignore[arg-type]
        after.append(x)
    assert torch.equal(*after)
    whole, short = both
    assert torch.equal(whole.topk(4).indices, short.topk(4).indices)
    right = (whole - short).abs() < 1e-4 * whole.abs().max()
    for row in range(4):
        assert STRETCHES <= int(right[row].sum()) < WORDS // 3
        assert right[row][whole[row].topk(40).indices].all()
    assert (whole - short).norm() < 0.2 * whole.norm()


def test_a_head_keeps_its_shortlist(model: Any, head: EagleHead, tmp_path: Path) -> None:
    """In a file of its own: the head's is as before. Texts are the target's, as always."""
    io.save(head, tmp_path / "without", with_vocabulary=False)
    assert io.load(tmp_path / "without", model).screening is None
    head.screening = screening.fitted(moments_of(outputs(600)), head.lm_head.weight)
    io.save(head, tmp_path / "with", with_vocabulary=False)
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert same[0] == same[1]
    again = io.load(tmp_path / "with", model).screening
    assert again is not None and head.screening is not None
    assert all(torch.equal(one, other) for one, other in zip(again, head.screening, strict=True))
    head.screening = None
    io.save(head, tmp_path / "again", with_vocabulary=False)
    screening.save(again, tmp_path / "again")
    io.save(head, tmp_path / "again", with_vocabulary=False)  # another head's is none
    assert io.load(tmp_path / "again", model).screening is None
    prompts, sampling = zoo.ragged_prompts(3), SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(model, "none").generate(prompts, sampling)
    for options in ({}, {"num_speculative_tokens": 3}, {"tree": 9}):
        config = {"method": "eagle", "model": str(tmp_path / "with"), **options}
        drafted = LLM(model, config, max_batch=2).generate(prompts, sampling)
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


def test_a_shortlist_of_something_else_is_left_out(head: EagleHead, tmp_path: Path) -> None:
    """The head does without; a user is told."""
    assert screening.load(tmp_path, WIDTH) is None
    found = screening.fitted(moments_of(outputs(600)), head.lm_head.weight)
    assert found is not None
    file = tmp_path / screening.FILE
    none = found._replace(sight=found.sight[:0], span=found.span[:0])
    screening.save(found, tmp_path)
    with pytest.warns(UserWarning, match="not of a head of width 64.: remove it"):
        assert screening.load(tmp_path, 64) is None
    for odd, said in ((found._replace(span=found.span * torch.nan), "are none"), (none, "width")):
        screening.save(odd, tmp_path)
        with pytest.warns(UserWarning, match=said):
            assert screening.load(tmp_path, WIDTH) is None
    screening.write_tensors({"sight": found.sight}, file)
    with pytest.warns(UserWarning, match="missing 1 required"):
        assert screening.load(tmp_path, WIDTH) is None
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match="damaged"):
        assert screening.load(tmp_path, WIDTH) is None


def test_states_in_half_precision_are_not_for_the_kernels(model: Any, tmp_path: Path) -> None:
    """Not even where the head brings its own embedding, in full."""
    small = copy.deepcopy(model).bfloat16()
    own = EagleHead(new_head(model, torch.arange(WORDS), depths=(1, 2)).config, own_embedding=True)
    llm = LLM(small, {"method": "eagle", "model": own}, max_batch=1)
    llm.engine.add(llm._request([1, 2, 3], SamplingParams(temperature=0)))
    llm.engine._admit()
    drafter: Any = llm.engine.drafter
    assert not drafter.runner.grows(llm.engine._batch(), drafter.grower)
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0]
    plain = LLM(small, "none").generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0]
    assert out.token_ids == plain.token_ids
