"""Low-rank screening of the LM head: approximate logits, exact for the tokens that count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import drafted
import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu.kernels import CpuAttentionMetadata
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.drafters.eagle import io, screening
from draftahead.drafters.eagle.cpu_head import MIN_BLOCKS, CpuEagleHead
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.eagle.screening import Screening
from draftahead.drafters.eagle.spec import head_spec
from draftahead.drafters.tree_builder import TreeBuilder
from draftahead.kv.cache import KVCache, LayerKVShape
from draftahead.train.eagle import Moments
from llama_shaped import needs_kernels

VOCAB_SIZE, HIDDEN_SIZE = 9_001, 256
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
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
    found = new_head(model, torch.arange(VOCAB_SIZE), aux_layers=(1, 2), intermediate_size=128)
    return found.requires_grad_(False)


def outputs(count: int, directions: int = 24) -> Tensor:
    """Vectors that fill few of the directions they could."""
    torch.manual_seed(6)
    filled = torch.randn(directions, HIDDEN_SIZE)
    return torch.randn(count, directions) @ filled


def moments_of(vectors: Tensor) -> Tensor:
    """The mean of h h', added up in parts."""
    moments = Moments()
    for part in vectors.split(100):
        moments.add(part[None])
    found = moments.mean()
    assert found is not None
    with torch.autocast("cpu", enabled=False):
        assert torch.allclose(found.float(), vectors.T @ vectors / len(vectors), atol=1e-4)
    return found


def fitted(head: EagleHead, vocab_rows: Tensor | None = None) -> Screening:
    vocab_rows = head.lm_head.weight if vocab_rows is None else vocab_rows
    found = screening.fit(moments_of(outputs(600)), vocab_rows)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------- the fit


def test_the_basis_is_of_the_directions_that_outputs_fill(head: EagleHead) -> None:
    """Where as many random directions fail; and so would those in which the LM head's weights alone
    differ most."""
    vocab_rows, known, new = head.lm_head.weight, *outputs(600).split(300)
    found = screening.fit(moments_of(known), vocab_rows)
    assert found is not None
    assert found.projection.shape == found.basis.shape == (64, HIDDEN_SIZE)
    exact = new @ vocab_rows.T
    screened = new @ found.projection.T @ found.basis @ vocab_rows.T
    assert (exact - screened).norm() < 0.05 * exact.norm()
    random = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE))[0][:, :64]
    assert (exact - new @ random @ random.T @ vocab_rows.T).norm() > 0.5 * exact.norm()


def test_there_is_no_screening_of_small_heads_or_broken_moments(head: EagleHead) -> None:
    assert screening.fit(torch.eye(64), torch.randn(9, 64)) is None
    for factor in (0.0, torch.nan):
        broken = factor * moments_of(outputs(600))
        assert screening.fit(broken, head.lm_head.weight) is None


def test_moments_of_a_training_in_bfloat16_are_summed_in_full_precision() -> None:
    """Rounded sums of products would have negative eigenvalues."""
    scales = torch.arange(1, HIDDEN_SIZE + 1) ** -1.5
    torch.manual_seed(7)
    vectors = torch.randn(4000, HIDDEN_SIZE) * scales
    with torch.autocast("cpu", torch.bfloat16):
        found = moments_of(vectors)
    assert torch.linalg.eigvalsh(found.double()).min() > 0
    assert screening.fit(-found, torch.randn(99, HIDDEN_SIZE)) is None


# ---------------------------------------------------------------------------------- the kernels


@needs_kernels
def test_logits_of_the_most_likely_tokens_are_exact(head: EagleHead) -> None:
    """The others are near enough; the hidden states are the same."""
    quantize_linears(head)
    hidden = 3 * outputs(4)
    screened = fitted(head, head.lm_head.dequantized())
    logits, states = [], []
    for one in (None, screened):
        cache = KVCache([LayerKVShape(2, 64, 2, 64)], 1, 32, torch.float32, torch.device("cpu"))
        kernels = CpuEagleHead(head_spec(head), cache, one)
        residuals, first_input = hidden[None].clone(), torch.zeros(1, 4, 2 * HIDDEN_SIZE)
        chain = CpuAttentionMetadata(
            first_slot=0,
            num_context_tokens=0,
            num_cached=torch.tensor([0]),
            depths=torch.tensor([[0, 1, 2, 3]], dtype=torch.int32),
            ancestors=torch.tensor([[1, 3, 7, 15]]),
            cos=torch.ones(1, 4, 64),
            sin=torch.zeros(1, 4, 64),
        )
        found = kernels.forward(residuals, first_input, chain)
        logits.append(found[0])
        states.append(residuals)
    assert torch.equal(*states)
    exact, approximate = logits
    assert torch.equal(exact.topk(4).indices, approximate.topk(4).indices)
    is_exact = (exact - approximate).abs() < 1e-4 * exact.abs().max()
    for node in range(4):
        assert MIN_BLOCKS <= int(is_exact[node].sum()) < VOCAB_SIZE // 3
        assert is_exact[node][exact[node].topk(40).indices].all()
    assert (exact - approximate).norm() < 0.2 * exact.norm()


def test_the_kernels_build_no_trees_from_hidden_states_in_bfloat16(model: Any) -> None:
    """Not even where the head brings its own embedding, in float32."""
    small = copy.deepcopy(model).bfloat16()
    config = new_head(model, torch.arange(VOCAB_SIZE), aux_layers=(1, 2)).config
    eagle = {"method": "eagle", "model": EagleHead(config, own_embedding=True)}
    params = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(small, eagle, max_batch=1)
    out, plain = (one.generate(PROMPT, params)[0] for one in (llm, LLM(small, "none")))
    assert out.token_ids == plain.token_ids
    builder: Any = llm.engine.drafter
    assert builder.cpu_builder is not None
    batch = drafted.next_batch(llm, [PROMPT], params)
    assert not builder.cpu_builder.supports(batch, TreeBuilder(5))


# ------------------------------------------------------------------------------------- the file


def test_the_screening_of_a_head_is_saved_in_a_file_of_its_own(
    model: Any, head: EagleHead, tmp_path: Path
) -> None:
    """The head's own file is the same with it and without; the output is the target's."""
    io.save(head, tmp_path / "without", with_lm_head=False)
    assert io.load(tmp_path / "without", model).screening is None
    head.screening = fitted(head)
    io.save(head, tmp_path / "with", with_lm_head=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert files[0] == files[1]
    loaded = io.load(tmp_path / "with", model).screening
    assert loaded is not None
    assert all(map(torch.equal, loaded, head.screening))
    prompts, params = zoo.ragged_prompts(3), SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(model, "none").generate(prompts, params)
    for options in ({}, {"num_speculative_tokens": 3}, {"tree": 9}):
        config = {"method": "eagle", "model": str(tmp_path / "with"), **options}
        outs = LLM(model, config, max_batch=2).generate(prompts, params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


def test_saving_a_head_removes_the_screening_of_another(
    model: Any, head: EagleHead, tmp_path: Path
) -> None:
    io.save(head, tmp_path, with_lm_head=False)
    screening.save(fitted(head), tmp_path)
    assert io.load(tmp_path, model).screening is not None
    io.save(head, tmp_path, with_lm_head=False)
    assert io.load(tmp_path, model).screening is None


def without_a_rank(found: Screening, file: Path) -> None:
    none = Screening(found.projection[:0], found.basis[:0])
    screening.save(none, file.parent)


def with_nan(found: Screening, file: Path) -> None:
    screening.save(found._replace(basis=found.basis * torch.nan), file.parent)


def without_a_tensor(found: Screening, file: Path) -> None:
    screening.write_tensors({"projection": found.projection}, file)


def truncated(found: Screening, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


BROKEN: dict[str, tuple[Callable[[Screening, Path], None], int, str]] = {
    "another hidden size": (lambda *_: None, 64, "not belong to a head of hidden size 64.: remove"),
    "no rank": (without_a_rank, HIDDEN_SIZE, "hidden size"),
    "NaN": (with_nan, HIDDEN_SIZE, "not finite"),
    "a tensor less": (without_a_tensor, HIDDEN_SIZE, "missing 1 required"),
    "a damaged file": (truncated, HIDDEN_SIZE, "damaged"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_or_foreign_screening_is_left_out_with_a_warning(
    kind: str, head: EagleHead, tmp_path: Path
) -> None:
    assert screening.load(tmp_path, HIDDEN_SIZE) is None
    found = fitted(head)
    screening.save(found, tmp_path)
    assert screening.load(tmp_path, HIDDEN_SIZE) is not None
    spoil, hidden_size, message = BROKEN[kind]
    spoil(found, tmp_path / screening.FILE)
    with pytest.warns(UserWarning, match=message):
        assert screening.load(tmp_path, hidden_size) is None
