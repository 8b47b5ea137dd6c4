"""Drafts by a small model: its vocabulary and context, its KV cache, its trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.core import tree
from draftahead.drafters.base import DrafterContext
from draftahead.drafters.draft_model import check_vocabulary
from draftahead.drafters.registry import build
from drafted import first_children, proposed_tree

GREEDY = SamplingParams(temperature=0, max_tokens=30)
WORDS = [f"w{i}" for i in range(zoo.VOCABULARY)]


def tokenizer_of(words: list[str]) -> Any:
    vocabulary = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def context_of(tokenizer: Any, model: Any = None) -> DrafterContext:
    """Of a tiny target; every name loads `model`, which has the same tokenizer."""
    return DrafterContext(
        device=torch.device("cpu"),
        dtype=torch.float64,
        vocab_size=zoo.VOCABULARY,
        tokenizer=tokenizer,
        max_batch=8,
        max_context=128,
        load=lambda name: (model, tokenizer),
    )


# -------------------------------------------------------------------- which models can draft


@pytest.mark.parametrize("kind", [str, Path])
def test_a_draft_model_is_given_by_its_folder(tmp_path: Path, kind: Any) -> None:
    """As users give it, without a method; its tokenizer is compared with the target's."""
    target = zoo.tiny("llama", dtype=torch.float32)
    target.save_pretrained(tmp_path)
    tokenizer_of(WORDS).save_pretrained(tmp_path)
    config = {"model": kind(tmp_path), "num_speculative_tokens": 3}
    out = LLM(target, drafter=config, tokenizer=tokenizer_of(WORDS)).generate([1, 2, 3], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, [1, 2, 3], 30)
    assert out.stats.acceptance_rate == 1
    assert len(out.stats.accepted_at) == 3


def test_a_draft_model_needs_the_same_vocabulary() -> None:
    small = zoo.tiny("llama")
    small.resize_token_embeddings(80)
    with pytest.raises(errors.VocabularyMismatchError, match=r"80 tokens and the target 97"):
        LLM(zoo.tiny("llama"), drafter={"method": "draft_model", "model": small})


def test_vocabularies_are_compared_token_by_token() -> None:
    words = WORDS[:90]
    swapped = [*words[:40], "w41", "w40", *words[42:]]
    # Embeddings may be padded to another size behind the same 90 tokens.
    check_vocabulary(context_of(tokenizer_of(words)), tokenizer_of(words), 128)
    with pytest.raises(errors.VocabularyMismatchError, match=r"differs .* in 2 tokens .*'w40'"):
        check_vocabulary(context_of(tokenizer_of(words)), tokenizer_of(swapped), 97)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 5}], ids=["tree", "chain"])
def test_padded_draft_vocabulary_is_cut_to_the_targets(options: dict[str, int]) -> None:
    """A larger embedding for the same tokens: its extra ids never reach the target."""
    target, draft, tokenizer = zoo.tiny("llama"), zoo.tiny("llama"), tokenizer_of(WORDS[:90])
    draft.resize_token_embeddings(128)
    config = {"method": "draft_model", "model": "by-name", **options}
    drafter = build(config, context_of(tokenizer, draft))
    out = LLM(target, drafter, tokenizer=tokenizer).generate([1, 2, 3], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, [1, 2, 3], 30)
    assert out.stats.accepted > 10


# ------------------------------------------------------------------------------ KV cache


def test_a_draft_model_catches_up_after_steps_without_it() -> None:
    target, prompt = zoo.tiny("llama"), zoo.ragged_prompts(3)[2]
    config = {"method": "draft_model", "model": zoo.tiny("llama"), "num_speculative_tokens": 5}
    llm = LLM(target, drafter=config)
    drafter: Any = llm.engine.drafter
    propose, calls = drafter.propose, []

    def propose_every_third_step(batch: Any) -> Any:
        calls.append(len(batch.sequences[0].tokens))
        return propose(batch) if len(calls) % 3 == 0 else None

    drafter.propose = propose_every_third_step
    out = llm.generate(prompt, GREEDY)[0]
    assert out.token_ids == zoo.reference(target, prompt, 30)
    assert out.stats.acceptance_rate == 1


def test_a_draft_model_with_a_shorter_context_than_the_target() -> None:
    """Sequences that do not fit are not drafted for; the others are."""
    target, draft = zoo.tiny("llama"), zoo.tiny("llama")
    draft.config.max_position_embeddings = 32
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 5}
    llm = LLM(target, drafter=config)
    long, short = zoo.ragged_prompts(1)[0] * 12, zoo.ragged_prompts(2)[1]
    outs = llm.generate([long, short], SamplingParams(temperature=0, max_tokens=16))
    assert [out.token_ids for out in outs] == [zoo.reference(target, p, 16) for p in (long, short)]
    assert outs[0].stats.drafted == 0
    assert outs[1].stats.accepted > 0


@pytest.mark.usefixtures("generous_policy")
def test_an_adaptive_draft_model_with_a_shorter_context() -> None:
    """One sequence may draft no deeper, the other does not fit: no draft, and no fault."""
    target, draft = zoo.tiny("llama"), zoo.tiny("llama", seed=1)
    draft.config.max_position_embeddings = 32
    llm = LLM(target, {"method": "draft_model", "model": draft})
    long, short = zoo.ragged_prompts(1)[0] * 12, zoo.ragged_prompts(2)[1]
    params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (16, 3)]
    outs = llm.generate([long, short], params)
    assert outs[0].token_ids == zoo.reference(target, long, 16)
    assert outs[0].stats.drafted == 0


# --------------------------------------------------------------------------------- trees


def test_a_tree_follows_the_draft_models_probabilities() -> None:
    """The confidence of every node is the product along its path, and every node is among the best
    four there."""
    draft_model = zoo.tiny("llama", seed=1)
    llm = LLM(zoo.tiny("llama"), {"method": "draft_model", "model": draft_model})
    prompt = zoo.ragged_prompts(3)[2]
    draft = proposed_tree(llm, prompt, GREEDY)
    assert draft.confidence is not None
    tokens, parents = draft.tokens[0], draft.parents[0]
    confidence = [1.0, *draft.confidence[0]]
    assert len(tokens) > 5 and not draft.is_chain
    paths = tree.paths(tokens, parents)
    for node in range(1, draft.num_nodes[0]):
        before = torch.tensor([prompt + list(paths[node][:-1])])
        probs = draft_model(before).logits[0, -1].softmax(-1)
        expected = confidence[parents[node]] * float(probs[tokens[node]])
        assert confidence[node] == pytest.approx(expected, rel=1e-5)
        assert int((probs > probs[tokens[node]]).sum()) < 4
    assert len(set(paths)) == len(paths)


def test_an_adaptive_draft_model_drafts_with_the_targets_noise() -> None:
    """With the target's own distribution its first child at every level is what the target will
    sample."""
    target = zoo.tiny("llama")
    params = SamplingParams(temperature=0.9, top_k=30, max_tokens=30, seed=3)
    output = LLM(target, "none").generate([[1, 2, 3]], params)[0].token_ids
    llm = LLM(target, {"method": "draft_model", "model": target})
    path = first_children(proposed_tree(llm, [1, 2, 3], params))
    assert path and path == output[: len(path)]


def test_a_level_that_took_long_once_is_tried_again() -> None:
    llm = LLM(zoo.tiny("llama"), {"method": "draft_model", "model": zoo.tiny("llama", seed=1)})
    drafter: Any = llm.engine.drafter
    for _ in range(9):
        drafter.builder.note_level(30.0)
    assert drafter.builder.level_seconds == 30.0
    llm.generate([[1, 2, 3]] * 40, SamplingParams(temperature=0, max_tokens=40))
    assert drafter.builder.level_seconds < 30.0
