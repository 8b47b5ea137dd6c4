"""The Medusa drafter: its options, the drafts of its heads at their positions, conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from command_line import run
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cpu.linear import quantize_model
from draftahead.drafters.medusa import io
from draftahead.drafters.medusa.heads import MedusaHeads
from drafted import random_heads

NUM_HEADS = 3
VOCAB_SIZE, HIDDEN_SIZE = 61, 64
GREEDY = SamplingParams(temperature=0, max_tokens=41)


def test_wrong_options_are_refused() -> None:
    target = zoo.tiny("llama")
    heads = random_heads(target)
    for options, message in (
        ({}, "needs 'model'"),
        ({"model": 5}, "no Medusa heads"),
        ({"model": MedusaHeads(64, 2)}, "hidden size of 64"),
        ({"model": heads, "num_speculative_tokens": 4}, "from 1 to 3"),
        ({"model": heads, "num_speculative_tokens": 2, "tree": [[0]]}, "not both"),
        ({"model": heads, "tree": []}, "a list of"),
        ({"model": heads, "tree": 0}, "from 1 to"),
        ({"model": heads, "tree": [[]]}, "a list of"),
        ({"model": heads, "tree": [[0], [True]]}, "a list of"),
        ({"model": heads, "tree": [[-1]]}, "a list of"),
        ({"model": heads, "tree": "[[0]]"}, "a list of"),
        ({"model": heads, "tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "4 deep"),
        ({"model": heads, "tree": [[0], [1, 0]]}, r"\[1, 0\] without \[1\]"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            LLM(target, {"method": "medusa", **options})


def permutation(dtype: torch.dtype) -> tuple[Any, MedusaHeads]:
    """A model that continues every token with one certain token, and heads that know which."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    follows = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    step = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)  # a token's one-hot vector -> its follower's
    step[follows, torch.arange(VOCAB_SIZE)] = 1.0
    for layer in model.model.layers:  # a hidden state holds its token alone
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE, HIDDEN_SIZE))
    model.lm_head.weight.copy_(5 * step[:VOCAB_SIZE])
    heads = MedusaHeads(HIDDEN_SIZE, NUM_HEADS)
    with torch.no_grad():
        for index in range(NUM_HEADS):
            weight = heads.published_tensors()[f"{index}.0.linear.weight"]
            weight.copy_(3 * torch.linalg.matrix_power(step, index + 1))
    return model, heads


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "forward"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_speculative_tokens": 3}, {"tree": [[0], [1], [0, 0], [0, 0, 0]]}],
    ids=["adaptive", "sampled", "tree"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_heads_that_know_the_output_are_accepted_at_every_position(
    dtype: torch.dtype, options: dict[str, Any], temperature: float
) -> None:
    """Every step but the first accepts all three tokens: one position off, and none would be.
    Meanwhile slots change owners: texts end one by one, and samples start from copied slots."""
    model, heads = permutation(dtype)
    llm = LLM(model, {"method": "medusa", "model": heads, **options}, max_batch=3)
    prompts = [[1], [5, 9, 2, 7], [30, 4], [8] * 11]
    lengths = (21, 41, 13, 9)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=1, n=2)
        for length in lengths
    ]
    outs = llm.generate(prompts, params)
    plain = LLM(model, "none").generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    for out, length in zip(outs, [n for n in lengths for _ in range(2)], strict=True):
        assert out.stats.steps == 1 + (length - 1) // (1 + NUM_HEADS)
        assert out.stats.accepted_at == [out.stats.steps - 1] * NUM_HEADS


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize(
    "options", [{}, {"num_speculative_tokens": 3}], ids=["adaptive", "sampled"]
)
@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
def test_a_draft_vocabulary_uses_those_rows_of_the_targets_lm_head(
    quantized: bool, options: dict[str, Any]
) -> None:
    model, heads = permutation(torch.float32)
    if quantized:
        quantize_model(model)
    heads.draft_to_target = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[
        :-6
    ]
    out = LLM(model, {"method": "medusa", "model": heads, **options}).generate([1, 2], GREEDY)[0]
    assert out.token_ids == LLM(model, "none").generate([1, 2], GREEDY)[0].token_ids
    known = set(heads.draft_to_target.tolist())
    assert not known.issuperset(out.token_ids)  # the output has other tokens as well
    drafted = [token for token, flag in zip(out.token_ids, out.drafted, strict=True) if flag]
    assert known.issuperset(drafted)
    assert out.stats.mean_acceptance_length > 2.5


def test_heads_draft_from_the_command_line(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    io.save(random_heads(zoo.tiny("llama")), tmp_path, vocab_size=zoo.VOCABULARY)
    common = ("generate", "w5 w6", "--model", model_folder, "--max-tokens", "9", "--json")
    medusa = ("--drafter", "medusa", "--draft-model", str(tmp_path), "-k", "2")
    reports = []
    for extra in (("--drafter", "none"), medusa):
        assert run(*common, *extra) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["token_ids"] == reports[1]["token_ids"]
    assert reports[1]["stats"]["drafted"] > 8
    assert run(*common, "--drafter", "medusa") == 1
    assert "needs --draft-model" in capsys.readouterr().err


def test_a_conversation_reuses_hidden_states_with_its_kv_entries() -> None:
    """Those of the new part of a prompt are not stored: prefill does not compute the last ones."""
    model, heads = permutation(torch.float32)
    llm = LLM(model, {"method": "medusa", "model": heads, "num_speculative_tokens": 3}, max_batch=2)
    text = [1, 2, 3]
    for _ in range(3):
        stream = llm.stream(text, SamplingParams(temperature=0, max_tokens=9), reuse=True)
        chunks = list(stream)
        assert sum(flag for chunk in chunks for flag in chunk.drafted) == 6
        text += [*(token for chunk in chunks for token in chunk.token_ids), 7]


@pytest.mark.usefixtures("generous_policy")
def test_a_tree_that_comes_with_the_heads_is_the_default(tmp_path: Path) -> None:
    model, heads = permutation(torch.float32)
    heads.choices = ((0,), (0, 0), (1,))
    io.save(heads, tmp_path, vocab_size=VOCAB_SIZE)
    llm = LLM(model, {"method": "medusa", "model": str(tmp_path)})
    assert llm.engine.drafter.choices == [(0,), (1,), (0, 0)]  # type: ignore[attr-defined]
    assert llm.engine.drafter.adaptive  # type: ignore[attr-defined]
    out = llm.generate([1, 2], GREEDY)[0]
    assert len(out.stats.drafted_at) == 2  # no deeper than the tree
    assert out.stats.mean_acceptance_length > 2.5
    assert max(n for n, steps in enumerate(out.stats.steps_by_nodes, start=1) if steps) <= 4
