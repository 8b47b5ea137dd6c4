"""No drafter changes the text: every registered one, broken ones, greedy and sampled, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Completion, SamplingParams
from drafted import ALL, DRAWN, REGISTERED, Clairvoyant, registered_names

GREEDY = SamplingParams(temperature=0, max_tokens=40)
WARM = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=40, seed=11)
RULED = SamplingParams(
    temperature=0.8,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    logit_bias={5: 1.5, 7: -3.0},
    bad_words=[[9], [12, 13]],
    max_tokens=40,
    seed=5,
)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, LLM]:
    return {
        exact: LLM(target, drafter="none", exact=exact, max_batch=3)
        for exact in ("distribution", "replay")
    }


def texts(llm: LLM, sampling: SamplingParams, prompts: list[list[int]]) -> list[list[int]]:
    return [c.token_ids for c in llm.generate(prompts, sampling)]


def test_the_matrix_knows_every_registered_drafter() -> None:
    assert sorted(REGISTERED) == registered_names()


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_greedy(name: str, batch: int, target: Any, plain: dict[str, LLM]) -> None:
    prompts = zoo.ragged_prompts(batch)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    assert texts(llm, GREEDY, prompts) == texts(plain["distribution"], GREEDY, prompts)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("sampling", [GREEDY, WARM, RULED], ids=["greedy", "warm", "ruled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_replay(
    name: str, batch: int, sampling: SamplingParams, target: Any, plain: dict[str, LLM]
) -> None:
    prompts = zoo.ragged_prompts(batch)
    llm = LLM(target, drafter=ALL[name](target), exact="replay", max_batch=3)
    assert texts(llm, sampling, prompts) == texts(plain["replay"], sampling, prompts)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", [name for name in ALL if name not in DRAWN])
@pytest.mark.parametrize("sampling", [WARM, RULED], ids=["warm", "ruled"])
def test_sampled_guesses_that_are_certain(
    name: str, sampling: SamplingParams, target: Any, plain: dict[str, LLM]
) -> None:
    """Point-mass drafts: the target's own noise decides, so the text is the same one. All that
    the policy guides are such: what it decides by the clock never decides what the text is."""
    prompts = zoo.ragged_prompts(3)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    assert texts(llm, sampling, prompts) == texts(plain["distribution"], sampling, prompts)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "deepseek_v3", "falcon"])
def test_accepted_branches_leave_the_right_keys(name: str) -> None:
    """Deep paths out of bushy trees: what is kept must be moved to where it belongs."""
    model = zoo.tiny(name)
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(model, p, 40) for p in prompts}
    llm = LLM(model, drafter=Clairvoyant(answers), max_batch=3)
    outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3.5 for out in outs)


def test_drafting_with_the_target_itself_accepts_everything(target: Any) -> None:
    for sampling in (GREEDY, WARM):
        llm = LLM(target, drafter=ALL["draft_model_self"](target))
        stats = llm.generate(zoo.ragged_prompts(1), sampling)[0].stats
        assert stats.acceptance_rate > 0.99, sampling


def test_batch_mates_change_nothing(target: Any) -> None:
    prompts = zoo.ragged_prompts(4)
    samplings = [WARM, GREEDY, RULED, WARM]
    llm = LLM(target, drafter=ALL["draft_model"](target), max_batch=4)

    def outputs(outs: list[Completion]) -> list[list[int]]:
        return [out.token_ids for out in outs]

    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert outputs(llm.generate(prompts, samplings)) == outputs(alone)
    waiting = LLM(target, drafter=ALL["draft_model"](target), max_batch=2)
    assert outputs(waiting.generate(prompts, samplings)) == outputs(alone)


def test_a_poisonous_guess_stays_outside() -> None:
    """A drafted token whose activations are not finite must not reach the row it was guessed
    for: behind the mask, 0 * NaN would."""
    model = zoo.tiny("llama", dtype=torch.float32)
    clean = LLM(model, drafter="none").generate(zoo.ragged_prompts(3), GREEDY)
    used = {token for out in clean for token in out.prompt_token_ids + out.token_ids}
    poison = next(token for token in range(zoo.VOCABULARY) if token not in used)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan

    class Poisoner(Clairvoyant):
        def propose(self, batch: Any) -> Any:
            from draftahead import Draft

            return Draft.chains(batch.roots, [[poison, poison]] * len(batch.sequences))

    outs = LLM(model, drafter=Poisoner({})).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in clean]
