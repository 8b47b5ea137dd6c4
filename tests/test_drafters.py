"""The drafters themselves: what they propose, and what they refuse."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from draftahead import (
    LLM,
    Batch,
    Draft,
    Drafter,
    DrafterFaultWarning,
    SamplingParams,
    errors,
)
from draftahead.drafters.lookup import NgramIndex

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def slow_lookup(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The definition: longest n-gram first, newest occurrence, copied past its own end."""
    for size in range(longest, shortest - 1, -1):
        tail = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tail) == size and tokens[end - size : end] == tail:
                known = list(tokens)
                for offset in range(count):
                    known.append(known[end + offset])
                return known[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    shortest=st.integers(1, 2),
    extra=st.integers(0, 2),
    count=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 40)),
)
def test_lookup_finds_what_its_definition_says(
    tokens: list[int], shortest: int, extra: int, count: int, cuts: list[int]
) -> None:
    """Also when the index grows piece by piece."""
    index = NgramIndex(shortest, shortest + extra)
    for cut in sorted(cuts):
        index.extend(tokens[:cut]) if cut <= len(tokens) else None
    index.extend(tokens)
    expected = slow_lookup(tokens, shortest, shortest + extra, count)
    assert index.continuation(tokens, count) == expected


def test_lookup_forgets_ended_texts() -> None:
    llm = LLM(zoo.tiny("llama"), drafter="lookup")
    llm.generate(zoo.ragged_prompts(4), GREEDY)
    assert not llm.engine.drafter._indexes  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["lookup", "ngram"])
def test_vllms_keys_are_understood(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    drafter: Any = LLM(zoo.tiny("llama"), drafter=config).engine.drafter
    assert (drafter.count, drafter.longest) == (3, 4)


@pytest.mark.parametrize("kind", [str, Path])
def test_draft_model_by_path(tmp_path: Path, kind: Any) -> None:
    """As users give it: a folder, without a method; it knows the target's own tokenizer."""
    words = [f"w{i}" for i in range(zoo.VOCABULARY)]
    target = zoo.tiny("llama", dtype=torch.float32)
    target.save_pretrained(tmp_path)
    tokenizer_of(words).save_pretrained(tmp_path)
    config = {"model": kind(tmp_path), "num_speculative_tokens": 3}
    out = LLM(target, drafter=config, tokenizer=tokenizer_of(words)).generate([1, 2, 3], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, [1, 2, 3], 30)
    assert out.stats.acceptance_rate == 1
    assert len(out.stats.accepted_at) == 3


def test_draft_model_catches_up_after_steps_without_it() -> None:
    target = zoo.tiny("llama")
    config = {"method": "draft_model", "model": zoo.tiny("llama"), "num_speculative_tokens": 5}
    llm = LLM(target, drafter=config)
    drafter: Any = llm.engine.drafter
    real, calls = drafter.propose, []

    def lazy(batch: Any) -> Any:
        calls.append(len(batch.sequences[0].tokens))
        return real(batch) if len(calls) % 3 == 0 else None

    drafter.propose = lazy
    out = llm.generate(zoo.ragged_prompts(3)[2], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, zoo.ragged_prompts(3)[2], 30)
    assert out.stats.acceptance_rate == 1


def test_draft_model_with_a_shorter_context_than_the_target() -> None:
    """Rows that have outgrown it are not drafted for; the others are."""
    target, draft = zoo.tiny("llama"), zoo.tiny("llama")
    draft.config.max_position_embeddings = 32
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 5}
    llm = LLM(target, drafter=config)
    long, short = zoo.ragged_prompts(1)[0] * 12, zoo.ragged_prompts(2)[1]
    outs = llm.generate([long, short], SamplingParams(temperature=0, max_tokens=16))
    assert [out.token_ids for out in outs] == [zoo.reference(target, p, 16) for p in (long, short)]
    assert outs[0].stats.drafted == 0
    assert outs[1].stats.accepted > 0


def test_a_draft_model_needs_the_same_vocabulary() -> None:
    small = zoo.tiny("llama")
    small.resize_token_embeddings(80)
    with pytest.raises(errors.VocabularyMismatchError, match=r"80 tokens and the target 97"):
        LLM(zoo.tiny("llama"), drafter={"method": "draft_model", "model": small})


def tokenizer_of(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_vocabularies_are_compared_token_by_token() -> None:
    from draftahead.drafters.base import DrafterContext
    from draftahead.drafters.draft_model import check_vocabulary

    words = [f"w{i}" for i in range(90)]
    swapped = [*words[:40], "w41", "w40", *words[42:]]

    def setting(tokenizer: Any) -> DrafterContext:
        model = zoo.tiny("llama")
        return DrafterContext(
            model.device, model.dtype, 97, tokenizer, 1, 64, lambda name: (None, None)
        )

    # Embeddings may be padded to another size behind the same 90 tokens.
    check_vocabulary(setting(tokenizer_of(words)), tokenizer_of(words), 128)
    with pytest.raises(errors.VocabularyMismatchError, match=r"differs .* in 2 tokens .*'w40'"):
        check_vocabulary(setting(tokenizer_of(words)), tokenizer_of(swapped), 97)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 5}], ids=["tree", "chain"])
def test_padded_draft_vocabulary_is_cut_to_the_targets(options: dict[str, int]) -> None:
    """A larger embedding behind the same tokens: its extra ids never reach the target."""
    target, draft = zoo.tiny("llama"), zoo.tiny("llama")
    tokenizer = tokenizer_of([f"w{i}" for i in range(90)])
    draft.resize_token_embeddings(128)
    llm = LLM(target, drafter="none", tokenizer=tokenizer)
    from draftahead.drafters.base import DrafterContext
    from draftahead.drafters.registry import build

    setting = DrafterContext(
        target.device, target.dtype, 97, tokenizer, 8, 128, lambda name: (draft, tokenizer)
    )
    config = {"method": "draft_model", "model": "by-name", **options}
    llm.engine.drafter = build(config, setting)
    out = llm.generate([1, 2, 3], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, [1, 2, 3], 30)
    assert out.stats.accepted > 10


def tree_of(llm: LLM, prompt: list[int], sampling: SamplingParams) -> tuple[Draft, Any]:
    """What the drafter proposes after a prompt, and the sequence it is for."""
    (sequence,) = llm.engine.add(llm._request(prompt, sampling))
    llm.engine._admit()
    batch = dataclasses.replace(llm.engine._batch(), step_cost=None)
    draft = llm.engine.drafter.propose(batch)
    assert draft is not None
    return draft, sequence


def test_a_draft_models_tree_follows_its_own_probabilities() -> None:
    """Every claim is the product along its path; what was gone on from is likelier than what was
    not, but for the levels it had to go through."""
    draft_model = zoo.tiny("llama", seed=1)
    llm = LLM(zoo.tiny("llama"), {"method": "draft_model", "model": draft_model})
    prompt = zoo.ragged_prompts(3)[2]
    draft, _ = tree_of(llm, prompt, GREEDY)
    assert draft.confidence is not None
    tokens, parents, confidence = (
        draft.tokens[0],
        draft.parents[0],
        [1.0, *draft.confidence[0]],
    )
    assert len(tokens) > 5 and not draft.is_chain
    paths: list[list[int]] = [[]]
    for node in range(1, draft.num_nodes[0]):
        paths.append([*paths[parents[node]], tokens[node]])
        before = torch.tensor([prompt + paths[node][:-1]])
        law = draft_model(before).logits[0, -1].softmax(-1)
        expected = confidence[parents[node]] * float(law[tokens[node]])
        assert confidence[node] == pytest.approx(expected, rel=1e-5)
        assert int((law > law[tokens[node]]).sum()) < 4  # one of the best four there
    assert len({tuple(path) for path in paths}) == len(paths)


def test_a_guided_draft_model_knows_the_noise() -> None:
    """With the target's own law its first guess at every level is what the target draws."""
    target = zoo.tiny("llama")
    warm = SamplingParams(temperature=0.9, top_k=30, max_tokens=30, seed=3)
    text = LLM(target, "none").generate([[1, 2, 3]], warm)[0].token_ids
    llm = LLM(target, {"method": "draft_model", "model": target})
    draft, _ = tree_of(llm, [1, 2, 3], warm)
    at, trunk = 0, []
    while children := [n for n in range(1, draft.num_nodes[0]) if draft.parents[0][n] == at]:
        at = children[0]  # the heaviest
        trunk.append(draft.tokens[0][at])
    assert trunk and trunk == text[: len(trunk)]


@pytest.mark.usefixtures("generous_policy")
def test_a_guided_draft_model_with_a_shorter_context() -> None:
    """One row has no room left and the other has outgrown it: nothing to draft for, no fault."""
    target, draft = zoo.tiny("llama"), zoo.tiny("llama", seed=1)
    draft.config.max_position_embeddings = 32
    llm = LLM(target, {"method": "draft_model", "model": draft})
    long, short = zoo.ragged_prompts(1)[0] * 12, zoo.ragged_prompts(2)[1]
    samplings = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (16, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = llm.generate([long, short], samplings)
    assert outs[0].token_ids == zoo.reference(target, long, 16)
    assert outs[0].stats.drafted == 0


def test_a_level_that_took_long_once_is_tried_again() -> None:
    llm = LLM(zoo.tiny("llama"), {"method": "draft_model", "model": zoo.tiny("llama", seed=1)})
    drafter: Any = llm.engine.drafter
    drafter.grower.level_seconds, drafter.grower.levels = 30.0, 9
    llm.generate([[1, 2, 3]] * 40, SamplingParams(temperature=0, max_tokens=40))
    assert drafter.grower.level_seconds < 30.0


class Peeper(Drafter):
    """Looks at the target's noise and draws only where it likes what it sees."""

    def propose(self, batch: Batch) -> Draft | None:
        flat = torch.zeros(len(batch.sequences), zoo.VOCABULARY)
        rows = list(range(len(batch.sequences)))
        batch.draft_sampler.noise_coupled_topk(flat, rows, [()] * len(rows), 1)
        batch.draft_sampler.draw(flat)
        return None


def test_who_knows_the_noise_may_not_draw() -> None:
    """Not in that step, and in no later one: chosen with that knowledge, draws are biased."""
    target = zoo.tiny("llama")
    warm = SamplingParams(temperature=0.9, max_tokens=20, seed=3)
    llm = LLM(target, Peeper())
    with pytest.warns(DrafterFaultWarning, match="knows too much to draw"):
        out = llm.generate([[1, 2, 3]], warm)[0]
    assert out.stats.drafted == 0
    assert out.token_ids == LLM(target, "none").generate([[1, 2, 3]], warm)[0].token_ids


@pytest.mark.parametrize("method", ["auto", "suffix", "recycle", "draft_model"])
def test_no_number_is_none_and_zero_is_refused(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 0}
    with pytest.raises(errors.ConfigError, match="whole number from 1"):
        LLM(zoo.tiny("llama"), config)
