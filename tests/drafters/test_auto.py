"""Several drafters behind one: their trees merged, one that fails left out, an expensive one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from draftahead import LLM, Draft, DrafterFaultWarning, SamplingParams
from draftahead.core.types import Batch
from draftahead.drafters.auto import Auto, Guess, paths, union
from draftahead.drafters.base import validated
from toy import sampler_for

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SIDES = ("suffix", "recycle", "draft_model")


def auto_of(llm: LLM) -> Auto:
    assert isinstance(llm.engine.drafter, Auto)
    return llm.engine.drafter


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.tiny("llama"), "auto")


trees = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.floats(0, 1)), max_size=12)


@given(st.lists(trees, min_size=1, max_size=3))
def test_trees_are_laid_over_each_other(
    llm: LLM, sides: list[list[tuple[int, int, float]]]
) -> None:
    """Every path of every side is there once, and what is proposed is a sound tree whose claims
    could be those of one world: no child likelier than its parent, nor siblings together."""
    drafts = {}
    for name, nodes in zip(SIDES, sides, strict=False):
        pairs = [(token, parent % (at + 1)) for at, (token, parent, _) in enumerate(nodes)]
        drafts[name] = Draft.trees([9], [pairs], [[claim for *_, claim in nodes]])
    merged = union(drafts, 0)
    walked: list[tuple[int, ...]] = [()]
    for guess in merged:
        walked.append((*walked[guess.parent], guess.token))
        assert guess.depth == len(walked[-1])
    assert len(walked) == len(set(walked))
    assert set(walked) == set().union(*(paths(draft, 0) for draft in drafts.values()))
    for guess, path in zip(merged, walked[1:], strict=True):
        assert set(guess.names) == {n for n, draft in drafts.items() if path in paths(draft, 0)}
    chosen = auto_of(llm)._chosen(merged)
    assert len(chosen) <= 15
    confidence = [1.0, *(guess.worth for guess in chosen)]
    for node in range(len(confidence)):
        below = sum(guess.worth for guess in chosen if guess.parent == node)
        assert below <= confidence[node] + 1e-9
    draft = Draft.trees([9], [[(g.token, g.parent) for g in chosen]], [confidence[1:]])
    (sequence,) = LLM(zoo.tiny("llama"), "none").engine.add(llm._inputs.request([9], GREEDY))
    batch = Batch((sequence,), (99,), sampler_for([sequence], [99], zoo.VOCABULARY))
    assert validated(draft, batch, zoo.VOCABULARY).confidence is not None


def test_both_saying_so_counts_for_more_than_one() -> None:
    one, other = Draft.chains([9], [[1, 2]], [[0.6, 0.5]]), Draft.chains([9], [[1]], [[0.5]])
    both, below = union({"suffix": one, "recycle": other}, 0)
    assert both.names == ("suffix", "recycle")
    assert both.claim == pytest.approx(1 - 0.4 * 0.5)
    assert (below.names, below.claim) == (("suffix",), 0.5)


def test_what_lies_beyond_the_targets_own_token_is_not_held_against_it() -> None:
    auto = auto_of(LLM(zoo.tiny("llama"), "auto"))
    tree = [
        Guess(1, 0, 1, ("a",), 0.95),  # right
        Guess(2, 1, 2, ("b",), 0.95),  # right, by the target's own token
        Guess(3, 2, 3, ("c",), 0.95),  # nobody knows
        Guess(4, 1, 2, ("d",), 0.95),  # wrong
        Guess(5, 4, 3, ("e",), 0.95),  # wrong with its parent
    ]
    auto._note(tree, [1, 2], 1, None, 0)
    noted = {names[0]: c.rates.seen() for names, c in auto._calibrations.items()}
    assert set(noted) == {"a", "b", "d", "e"}
    shares = {name: next(iter(seen.values()))[0] for name, seen in noted.items()}
    assert shares["a"] == shares["b"] > 0.95 > shares["d"] == shares["e"]


def test_one_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = zoo.tiny("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    def nonsense(batch: Batch) -> Draft:
        return Draft.chains(batch.roots, [[10**9]] * len(batch.roots))

    for verb, fault in (("propose", fail), ("propose", nonsense), ("learn", fail)):
        llm = LLM(target, {"method": "auto", "num_speculative_tokens": 6})
        monkeypatch.setattr(auto_of(llm).cheap["recycle"], verb, fault)
        with pytest.warns(DrafterFaultWarning, match="recycle failed and is left out"):
            out = llm.generate([zoo.ragged_prompts(1)[0] * 3], GREEDY)[0]
        assert out.token_ids == zoo.reference(target, zoo.ragged_prompts(1)[0] * 3, 40)
        assert list(auto_of(llm).cheap) == ["suffix"]
        assert out.stats.accepted > 0  # the other goes on


@pytest.mark.usefixtures("generous_policy")
def test_a_draft_model_joins_in() -> None:
    """One that is the target itself is right about everything it is asked."""
    target = zoo.tiny("llama")
    llm = LLM(target, {"method": "auto", "model": target})
    out = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, [1, 2, 3], 40)
    alone = LLM(target, "auto").generate([[1, 2, 3]], GREEDY)[0]
    assert out.stats.steps < 0.7 * alone.stats.steps
    said = " ".join(llm.explain())
    assert "draft_model" in said and "draft_model drafted" in said


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.9, max_tokens=40, seed=4)]
)
def test_a_fixed_number_of_guesses_is_no_matter_of_the_clock(sampling: SamplingParams) -> None:
    """With a draft model too: for a seed, the text of plain decoding."""
    target = zoo.tiny("llama")
    config = {"method": "auto", "model": zoo.tiny("llama", seed=1), "num_speculative_tokens": 7}
    outs = [
        LLM(target, drafter).generate(zoo.ragged_prompts(3), sampling)
        for drafter in ("none", config)
    ]
    assert [o.token_ids for o in outs[0]] == [o.token_ids for o in outs[1]]
    assert all(o.stats.drafted for o in outs[1])
