"""The Medusa drafter: its options, the trees it makes, and that guesses stand where heads mean."""

from __future__ import annotations

import itertools
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
from draftahead.core.detokenizer import Detokenizer
from draftahead.core.types import Request, SequenceState
from draftahead.drafters.medusa.heads import MedusaHeads, likeliest_tree
from draftahead.drafters.medusa.io import save_heads
from draftahead.sampling.draft_sampler import RecordedDraftSampler, scatter_to_vocab
from drafted import random_heads

HEADS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=41)


def test_options() -> None:
    target = zoo.tiny("llama")
    heads = random_heads(target)
    for options, says in (
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
        with pytest.raises(errors.ConfigError, match=says):
            LLM(target, {"method": "medusa", **options})


# --------------------------------------------------------------------------------- the tree


def closed_trees(nodes: list[tuple[int, ...]], count: int) -> list[tuple[tuple[int, ...], ...]]:
    return [
        tree
        for tree in itertools.combinations(nodes, count)
        if all(not branch[:-1] or branch[:-1] in tree for branch in tree)
    ]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_tree_is_the_best_of_all_trees(count: int) -> None:
    """Candidates out of order and hopeless ones too, as rates on little data are."""
    chances = [[0.5, 0.2, 0.3], [0.4, 0.0, 0.35], [0.9, 0.05, 0.1]]
    nodes = [b for depth in (1, 2, 3) for b in itertools.product(range(3), repeat=depth)]

    def worth(tree: Any) -> float:
        def reached(branch: tuple[int, ...]) -> float:
            found = 1.0
            for row, i in zip(chances, branch, strict=False):
                found *= row[i]
            return found

        return sum(map(reached, tree))

    found = likeliest_tree(chances, count)
    best = max(worth(tree) for tree in closed_trees(nodes[:21], count))
    assert abs(worth([branch for branch, _ in found]) - best) < 1e-12
    assert abs(sum(chance for _, chance in found) - best) < 1e-12
    for at, (branch, _) in enumerate(found):
        assert not branch[:-1] or branch[:-1] in [b for b, _ in found[:at]]


def test_a_tree_ends_where_nothing_is_likely() -> None:
    assert likeliest_tree([[0.5, 0.0], [0.1]], 9) == [((0,), 0.5), ((0, 0), 0.05)]
    assert likeliest_tree([[0.5, 0.0], [0.1]], 9, least=0.06) == [((0,), 0.5)]
    assert likeliest_tree([], 9) == []


# ------------------------------------------------------------------------------ the drafter


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_an_outlook_over_a_draft_vocabulary(penalty: float) -> None:
    """Noise and penalties go by the target's ids, whatever the place in the draft vocabulary."""
    request = Request((3, 50), SamplingParams(temperature=0.9, repetition_penalty=penalty), seed=1)
    sequence = SequenceState(request, 0, 0, 7, [3, 50], Detokenizer(lambda ids: ""))
    dice = RecordedDraftSampler([sequence], [4], zoo.VOCABULARY, "distribution")
    tokens = torch.randperm(zoo.VOCABULARY, generator=torch.Generator().manual_seed(0))[:30]
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    paths = [(), (9,)]
    whole = dice.noise_coupled_topk(
        scatter_to_vocab(logits, tokens, zoo.VOCABULARY), [0, 0], paths, 5
    )
    torch.testing.assert_close(dice.noise_coupled_topk(logits, [0, 0], paths, 5, tokens), whole)
    assert set(whole[1].flatten().tolist()) <= set(tokens.tolist())


TOKENS, WIDTH = 61, 64


def orbit(dtype: torch.dtype) -> tuple[Any, MedusaHeads]:
    """A model in which each token is followed by one and the same, and heads that know it."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    follows = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    step = torch.zeros(WIDTH, WIDTH)  # a token's place to that of its follower
    step[follows, torch.arange(TOKENS)] = 1.0
    for layer in model.model.layers:  # all that a state tells is the token
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(TOKENS, WIDTH))
    model.lm_head.weight.copy_(5 * step[:TOKENS])
    heads = MedusaHeads(WIDTH, HEADS)
    with torch.no_grad():
        for index in range(HEADS):
            weight = heads.parts()[f"{index}.0.linear.weight"]
            weight.copy_(3 * torch.linalg.matrix_power(step, index + 1))
    return model, heads


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "forward"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_speculative_tokens": 3}, {"tree": [[0], [1], [0, 0], [0, 0, 0]]}],
    ids=["adaptive", "drawn", "tree"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_heads_that_know_are_believed(
    dtype: torch.dtype, options: dict[str, Any], temperature: float
) -> None:
    """Every step but the first takes all three guesses: one position off, and none would be. Rows
    change hands meanwhile: texts end one by one, sisters start from copies."""
    model, heads = orbit(dtype)
    llm = LLM(model, {"method": "medusa", "model": heads, **options}, max_batch=3)
    prompts = [[1], [5, 9, 2, 7], [30, 4], [8] * 11]
    lengths = (21, 41, 13, 9)
    samplings = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=1, n=2)
        for length in lengths
    ]
    outs = llm.generate(prompts, samplings)
    plain = LLM(model, "none").generate(prompts, samplings)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    for out, length in zip(outs, [n for n in lengths for _ in range(2)], strict=True):
        assert out.stats.steps == 1 + (length - 1) // (1 + HEADS)
        assert out.stats.accepted_at == [out.stats.steps - 1] * HEADS


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 3}], ids=["adaptive", "drawn"])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "int8"])
def test_a_draft_vocabulary_takes_rows_of_the_targets_head(
    rounded: bool, options: dict[str, Any]
) -> None:
    model, heads = orbit(torch.float32)
    if rounded:
        quantize_model(model)
    heads.tokens = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))[:-6]
    out = LLM(model, {"method": "medusa", "model": heads, **options}).generate([1, 2], GREEDY)[0]
    assert out.token_ids == LLM(model, "none").generate([1, 2], GREEDY)[0].token_ids
    known = set(heads.tokens.tolist())
    assert not known.issuperset(out.token_ids)  # what it lacks is said all the same
    drafted = [token for token, flag in zip(out.token_ids, out.drafted, strict=True) if flag]
    assert known.issuperset(drafted)
    assert out.stats.mean_acceptance_length > 2.5


def test_heads_from_the_command_line(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_heads(random_heads(zoo.tiny("llama")), tmp_path, vocabulary=zoo.VOCABULARY)
    common = ("generate", "w5 w6", "--model", model_folder, "--max-tokens", "9", "--json")
    medusa = ("--drafter", "medusa", "--draft-model", str(tmp_path), "-k", "2")
    said = []
    for extra in (("--drafter", "none"), medusa):
        assert run(*common, *extra) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["token_ids"] == said[1]["token_ids"]
    assert said[1]["stats"]["drafted"] > 8
    assert run(*common, "--drafter", "medusa") == 1
    assert "needs 'model'" in capsys.readouterr().err


def test_a_conversation_goes_on_from_what_it_holds() -> None:
    """Keys are reused, and with them states: the prompt's own were not scored for these heads."""
    model, heads = orbit(torch.float32)
    llm = LLM(model, {"method": "medusa", "model": heads, "num_speculative_tokens": 3}, max_batch=2)
    text = [1, 2, 3]
    for _ in range(3):
        stream = llm.stream(text, SamplingParams(temperature=0, max_tokens=9), reuse=True)
        pieces = list(stream)
        said = [token for piece in pieces for token in piece.token_ids]
        assert sum(flag for piece in pieces for flag in piece.drafted) == 6
        text += [*said, 7]


@pytest.mark.usefixtures("generous_policy")
def test_a_tree_that_came_along_is_the_default(tmp_path: Path) -> None:
    model, heads = orbit(torch.float32)
    heads.choices = ((0,), (0, 0), (1,))
    save_heads(heads, tmp_path, vocabulary=TOKENS)
    llm = LLM(model, {"method": "medusa", "model": str(tmp_path)})
    assert llm.engine.drafter.tree == [(0,), (1,), (0, 0)]  # type: ignore[attr-defined]
    assert llm.engine.drafter.adaptive  # type: ignore[attr-defined]
    out = llm.generate([1, 2], GREEDY)[0]
    assert len(out.stats.drafted_at) == 2  # no deeper than the tree
    assert out.stats.mean_acceptance_length > 2.5
    assert max(n for n, steps in enumerate(out.stats.steps_by_nodes, start=1) if steps) <= 4
