"""What a drafter, a seed or a row that failed must not be able to do to a text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, SamplingParams, errors
from draftahead.core.detokenizer import Detokenizer
from draftahead.core.types import SequenceState
from draftahead.engine import engine
from draftahead.sampling.noise import NodeContext
from draftahead.sampling.processors import probs_of
from drafted import ALL, Clairvoyant

GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=0.9, max_tokens=24, seed=4)
PROMPTS = zoo.ragged_prompts(3)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def answers(target: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): zoo.reference(target, prompt, 24) for prompt in PROMPTS}


def texts(llm: LLM, sampling: SamplingParams = GREEDY, prompts: Any = PROMPTS) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts, sampling)]


# ------------------------------------------------------------------------------ the draft


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("deeper", [True, False])
def test_what_was_drawn_is_the_draft_whatever_is_returned(
    deeper: bool, sampling: SamplingParams, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that draws one token and returns another would bend the distribution."""
    drawn: list[list[int]] = []
    real = engine.verify

    class TwoFaced(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            tokens = batch.draft_sampler.draw(torch.zeros(len(batch.sequences), zoo.VOCABULARY))
            drawn.append(tokens.tolist())
            others = [[(token + 1) % zoo.VOCABULARY] * (1 + deeper) for token in drawn[-1]]
            return Draft.chains(batch.roots, others)

    def noted(draft: Draft, *given: Any, **options: Any) -> Any:
        max_depths = given[1].max_depths
        for row, tokens in enumerate(draft.host_tokens):
            assert tokens[1 : draft.num_nodes[row]] == drawn[-1][row : row + 1] * (
                max_depths[row] > 0
            )
        if any(max_depths):
            assert (draft.probs is not None) == (not sampling.greedy)
        return real(draft, *given, **options)

    monkeypatch.setattr(engine, "verify", noted)
    outs = LLM(target, TwoFaced()).generate(PROMPTS, sampling)
    assert [len(out.token_ids) for out in outs] == [24] * 3
    assert all(out.stats.drafted for out in outs)


class Vandal(Clairvoyant):
    """Guesses well, and spoils all that it is told afterwards."""

    def learn(self, batch: Batch, verdict: Any, scores: Any) -> None:
        for row in (*verdict.paths, *verdict.tokens):
            row[:] = [0] * 9
        verdict.errors[0] = errors.NonFiniteLogitsError("a lie")
        for rows in (scores.draft.host_tokens, scores.draft.host_parents):
            for row in rows:
                row[:] = [1] * len(row)
        scores.draft.num_nodes[:] = [1] * len(scores.draft.num_nodes)
        scores.logits.fill_(float("nan"))


def test_learn_may_spoil_what_it_is_given(target: Any, answers: Any) -> None:
    """Paths, tokens, errors, the draft, the logits: texts, counts and log-probabilities stay."""
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    expected = LLM(target, Clairvoyant(answers)).generate(PROMPTS, sampling)
    found = LLM(target, Vandal(answers)).generate(PROMPTS, sampling)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.drafted == other.drafted
        assert one.logprobs == other.logprobs
        for name in ("steps", "drafted", "accepted", "drafted_at", "accepted_at"):
            assert getattr(one.stats, name) == getattr(other.stats, name), name
    assert sum(out.stats.accepted for out in found) > 20


def test_a_copy_of_a_draft_shares_nothing_that_can_be_changed() -> None:
    draft = Draft.trees([7, 8], [[(1, 0), (2, 0)], [(3, 0)]])
    copy = draft.copied()
    assert (copy.rows, copy.host_parents, copy.num_nodes) == (
        draft.host_tokens,
        draft.host_parents,
        draft.num_nodes,
    )
    assert copy.probs is None
    assert not copy.is_chain
    for mine, theirs in ((copy.rows, draft.host_tokens), (copy.host_parents, draft.host_parents)):
        for one, other in zip(mine, theirs, strict=True):
            assert one is not other
        assert mine is not theirs
    assert copy.num_nodes is not draft.num_nodes
    assert Draft.chains([7], [[1]]).copied().is_chain


# ---------------------------------------------------------------------------- the noise


def test_samples_of_one_seed_are_not_those_of_the_next(target: Any) -> None:
    """Sample 1 of seed 1 and sample 0 of seed 2, and so on: all different."""
    llm = LLM(target, "none", max_batch=3)
    found = []
    for seed in (1, 2, 3):
        sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=seed, n=3)
        found += texts(llm, sampling, [PROMPTS[0]])
    assert len({tuple(ids) for ids in found}) == 9


# ------------------------------------------------------------------------ log-probabilities

RULED = SamplingParams(
    temperature=0.8,
    top_k=30,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    logit_bias={5: 1.0},
    max_tokens=24,
    seed=6,
    logprobs=3,
)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("raw", [False, True])
def test_logprobs_with_penalties_on_an_accepted_sampled_run(target: Any, raw: bool) -> None:
    """Every token's log-probability is that behind the text before it, accepted guesses and all:
    computed here anew, one token at a time."""
    sampling = dataclasses.replace(RULED, raw_logprobs=raw)
    llm = LLM(target, ALL["draft_model_self"](target), max_batch=3)
    outs = llm.generate(PROMPTS, sampling)
    assert all(out.stats.acceptance_rate > 0.9 for out in outs)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.logprobs is not None
        assert [told.token_id for told in out.logprobs] == out.token_ids
        logits = target(torch.tensor([prompt + out.token_ids])).logits[0]
        request = llm._request(prompt, sampling)
        for at, told in enumerate(out.logprobs):
            tokens = prompt + out.token_ids[:at]
            here = SequenceState(request, 0, 0, 0, tokens, Detokenizer(lambda ids: ""))
            row = logits[len(tokens) - 1]
            logs = probs_of(row[None], [NodeContext(here)])[0].log()
            if raw:
                logs = row.float().log_softmax(-1)
            values, ids = logs.topk(3)
            assert told.logprob == pytest.approx(float(logs[told.token_id]), abs=1e-4)
            assert list(told.top) == ids.tolist()
            assert list(told.top.values()) == pytest.approx(values.tolist(), abs=1e-4)


# ------------------------------------------------------------------- what a row leaves behind


@pytest.mark.parametrize(
    ("drafter", "kernels"), [("none", True), ("none", False), ("lookup", False)]
)
def test_a_short_text_beside_a_longer_one_where_a_nan_text_was(drafter: str, kernels: bool) -> None:
    """A pass reads as many slots of every row as its longest text has. Behind a mask a NaN that
    an earlier text left there would still reach the short one: 0 * NaN."""
    model = zoo.tiny("llama", dtype=torch.float32)
    poison, short = 50, [3, 5, 7]
    long = [token for token in PROMPTS[1] if token != poison] * 2
    expected = texts(LLM(model, "none", max_batch=2), GREEDY, [short, long])
    assert poison not in expected[0] + expected[1] + long
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    llm = LLM(model, drafter, max_batch=2)
    if not kernels:
        llm.engine.target.runner._decoder = None
    # Longer than both prompts: what a fill does not overwrite, only the clearing takes away.
    sick = [9, 8, 7, 6, poison, *[5, 4, 3, 2, 1, 2, 3] * 5]
    assert len(short) < len(long) < len(sick) < len(long) + 24
    pairs = [([short, long], expected), ([long, short], expected[::-1])]
    for sick_ones in ([sick], [short, sick]):
        for prompts, wanted in pairs:
            outs = llm.generate(sick_ones, GREEDY, errors="return")
            assert isinstance(outs[-1].error, errors.NonFiniteLogitsError)
            assert len(outs) == 1 or outs[0].token_ids == expected[0]
            assert texts(llm, GREEDY, prompts) == wanted


# --------------------------------------------------------------- what an earlier text leaves


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3_longrope"])
def test_a_prompt_that_parts_from_an_earlier_one_midway(name: str) -> None:
    """Reused is what both begin with, and not a token more."""
    model = zoo.tiny(name)
    base = PROMPTS[1]
    llm = LLM(model, "lookup", max_batch=2)
    fresh = LLM(model, "none", max_batch=1)
    short = SamplingParams(temperature=0, max_tokens=10)

    def streamed(prompt: list[int]) -> Any:
        stream = llm.stream(prompt, short, reuse=True)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value

    first = streamed(base)
    whole = base + first.token_ids
    for at in (len(base) + 6, len(base) - 1, 5, 0):
        other = (whole[at] + 1) % zoo.VOCABULARY
        for rest in ([], [4, 9, 11]):
            prompt = [*whole[:at], other, *rest]
            if len(prompt) < 2:
                continue
            streamed(base)  # so that there is one to part from
            out = streamed(prompt)
            assert out.token_ids == texts(fresh, short, [prompt])[0]
            if name != "phi3_longrope":
                assert out.stats.reused_tokens == min(at, len(prompt) - 1)


def test_a_longrope_batch_whose_slots_swap() -> None:
    """One text past the switch, one before it, one that crosses it: as each ends, the last moves
    into its place, with its keys and with what frequencies rotated them."""
    model = zoo.tiny("phi3_longrope")  # switches at 24
    prompts = [[3, 5, 7], PROMPTS[1] * 3, PROMPTS[1], [8, 9]]
    lengths = [4, 18, 30, 9]
    settings = [SamplingParams(temperature=0, max_tokens=most) for most in lengths]
    alone = LLM(model, "none", max_batch=1)
    expected = [texts(alone, one, [p])[0] for p, one in zip(prompts, settings, strict=True)]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]):
        for drafter in ("none", "lookup"):
            llm = LLM(model, drafter, max_batch=3)
            passes = llm.engine.target.runner
            prefills: list[int] = []
            real = passes.prefill

            def noted(
                row: int, tokens: Any, real: Any = real, seen: Any = prefills, **options: Any
            ) -> int:
                seen.append(len(tokens))
                return int(real(row, tokens, **options))

            passes.prefill = noted  # type: ignore[method-assign]
            outs = llm.generate([prompts[i] for i in order], [settings[i] for i in order])
            assert [out.token_ids for out in outs] == [expected[i] for i in order]
            # One fill each, and one more where a text outgrows the switch: a row that has moved
            # knows how it was rotated.
            assert sorted(prefills) == sorted([len(p) - 1 for p in prompts] + [24])
