"""No drafter changes the output: every registered one, wrong ones, greedy and sampled, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

import zoo
from draftahead import LLM, Batch, Completion, Draft, Drafter, SamplingParams
from drafted import ADAPTIVE, ALL, REGISTERED, SAMPLES, KnowsOutput, registered_names

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=40, seed=11)
PROCESSED = SamplingParams(
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
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "processed": PROCESSED}
POINT_MASS = [name for name in ALL if name not in SAMPLES]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, LLM]:
    return {
        exact: LLM(target, drafter="none", exact=exact, max_batch=3)
        for exact in ("distribution", "replay")
    }


def tokens_of(llm: LLM, params: SamplingParams, prompts: list[list[int]]) -> list[list[int]]:
    return [c.token_ids for c in llm.generate(prompts, params)]


def test_matrix_holds_every_registered_drafter() -> None:
    assert sorted(REGISTERED) == registered_names()


# ------------------------------------------------------------ everything proposed is verified


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_greedy_output_is_that_of_plain_decoding(
    name: str, batch: int, target: Any, plain: dict[str, LLM]
) -> None:
    prompts = zoo.ragged_prompts(batch)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    assert tokens_of(llm, GREEDY, prompts) == tokens_of(plain["distribution"], GREEDY, prompts)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_replay_output_is_that_of_plain_decoding(
    name: str, batch: int, params: str, target: Any, plain: dict[str, LLM]
) -> None:
    prompts = zoo.ragged_prompts(batch)
    llm = LLM(target, drafter=ALL[name](target), exact="replay", max_batch=3)
    expected = tokens_of(plain["replay"], PARAMS[params], prompts)
    assert tokens_of(llm, PARAMS[params], prompts) == expected


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", POINT_MASS)
@pytest.mark.parametrize("params", ["sampled", "processed"])
def test_sampled_output_with_point_mass_drafts_is_that_of_plain_decoding(
    name: str, params: str, target: Any, plain: dict[str, LLM]
) -> None:
    """The target's own noise decides. All adaptive drafters make such drafts: so what the policy
    decides by measured times never changes the output."""
    prompts = zoo.ragged_prompts(3)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    expected = tokens_of(plain["distribution"], PARAMS[params], prompts)
    assert tokens_of(llm, PARAMS[params], prompts) == expected


# ----------------------------------------------------- processors of the generation_config


@pytest.fixture(scope="module")
def configured() -> Any:
    """A target whose generation_config processes logits in every way that is followed."""
    model = zoo.tiny("llama")
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 3],
        sequence_bias={(11,): 2.0, (12, 13): -50.0, (40, 41): 4.0},
        encoder_repetition_penalty=0.8,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        encoder_no_repeat_ngram_size=3,
        min_length=20,
        forced_eos_token_id=3,
        remove_invalid_values=True,
        exponential_decay_length_penalty=(30, 1.05),
        suppress_tokens=[20, 21, 22],
        begin_suppress_tokens=[30, 31],
        top_h=0.9,
        top_k=30,
        typical_p=0.9,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
        watermarking_config=WatermarkingConfig(bias=2.5, context_width=2),
    )
    return model


@pytest.fixture(scope="module")
def plain_configured(configured: Any) -> list[list[int]]:
    llm = LLM(configured, drafter="none", exact="replay", max_batch=3)
    outputs = [c.token_ids for c in llm.generate(zoo.ragged_prompts(3), CONFIGURED)]
    assert all(output[-1] in (2, 3) for output in outputs)  # the first one's is forced
    assert len(outputs[0]) == 40
    return outputs


# Of one batch: greedy, and sampled.
CONFIGURED = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=1.0, max_tokens=40, seed=7),
    SamplingParams(temperature=0.7, max_tokens=40, seed=8, presence_penalty=0.3),
]


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", ALL)
def test_output_after_processors_of_the_generation_config_is_that_of_plain_decoding(
    name: str, configured: Any, plain_configured: list[list[int]]
) -> None:
    llm = LLM(configured, drafter=ALL[name](configured), exact="replay", max_batch=3)
    outs = llm.generate(zoo.ragged_prompts(3), CONFIGURED)
    assert [out.token_ids for out in outs] == plain_configured


def test_drafts_are_accepted_after_processors_of_the_generation_config(
    configured: Any, plain_configured: list[list[int]]
) -> None:
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): output for p, output in zip(prompts, plain_configured, strict=True)}
    llm = LLM(configured, drafter=KnowsOutput(answers), max_batch=3)
    outs = llm.generate(prompts, CONFIGURED)
    assert [out.token_ids for out in outs] == plain_configured
    assert all(out.stats.mean_acceptance_length > 3.5 for out in outs)


# --------------------------------------------------------------------- the policy as shipped


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", POINT_MASS)
def test_output_with_the_shipped_policy_is_that_of_plain_decoding(
    name: str, params: str, target: Any, plain: dict[str, LLM]
) -> None:
    """Whatever the policy leaves out, by the times of this machine at this moment."""
    prompts = zoo.ragged_prompts(3)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    expected = tokens_of(plain["distribution"], PARAMS[params], prompts)
    assert tokens_of(llm, PARAMS[params], prompts) == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_greedy_output_of_sampling_drafters_with_the_shipped_policy(
    name: str, target: Any, plain: dict[str, LLM]
) -> None:
    prompts = zoo.ragged_prompts(3)
    llm = LLM(target, drafter=ALL[name](target), max_batch=3)
    assert tokens_of(llm, GREEDY, prompts) == tokens_of(plain["distribution"], GREEDY, prompts)


@pytest.mark.parametrize("params", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_replay_output_with_the_shipped_policy_is_that_of_plain_decoding(
    name: str, params: str, target: Any, plain: dict[str, LLM]
) -> None:
    prompts = zoo.ragged_prompts(3)
    llm = LLM(target, drafter=ALL[name](target), exact="replay", max_batch=3)
    expected = tokens_of(plain["replay"], PARAMS[params], prompts)
    assert tokens_of(llm, PARAMS[params], prompts) == expected


# ------------------------------------------------------------------------ particular hazards


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "deepseek_v3", "falcon"])
def test_kv_entries_of_accepted_branches_are_kept(name: str) -> None:
    """Deep paths out of wide trees: their entries must be moved to where they belong."""
    model = zoo.tiny(name)
    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): zoo.reference(model, p, 40) for p in prompts}
    llm = LLM(model, drafter=KnowsOutput(answers), max_batch=3)
    outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3.5 for out in outs)


def test_a_draft_model_that_is_the_target_is_always_accepted(target: Any) -> None:
    for params in (GREEDY, SAMPLED):
        llm = LLM(target, drafter=ALL["draft_model_self"](target))
        stats = llm.generate(zoo.ragged_prompts(1), params)[0].stats
        assert stats.acceptance_rate > 0.99, params


def test_output_does_not_depend_on_the_rest_of_the_batch(target: Any) -> None:
    prompts = zoo.ragged_prompts(4)
    params = [SAMPLED, GREEDY, PROCESSED, SAMPLED]
    llm = LLM(target, drafter=ALL["draft_model"](target), max_batch=4)

    def outputs(outs: list[Completion]) -> list[list[int]]:
        return [out.token_ids for out in outs]

    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    assert outputs(llm.generate(prompts, params)) == outputs(alone)
    queued = LLM(target, drafter=ALL["draft_model"](target), max_batch=2)
    assert outputs(queued.generate(prompts, params)) == outputs(alone)


def test_nan_activations_of_a_drafted_token_do_not_reach_the_output() -> None:
    """They lie behind the attention mask, where 0 * NaN would still be NaN."""
    model = zoo.tiny("llama", dtype=torch.float32)
    clean = LLM(model, drafter="none").generate(zoo.ragged_prompts(3), GREEDY)
    used = {token for out in clean for token in out.prompt_token_ids + out.token_ids}
    nan_token = next(token for token in range(zoo.VOCABULARY) if token not in used)
    with torch.no_grad():
        model.get_input_embeddings().weight[nan_token] = torch.nan

    class ProposesNanToken(Drafter):
        def propose(self, batch: Batch) -> Draft:
            return Draft.chains(batch.roots, [[nan_token, nan_token]] * len(batch.sequences))

    outs = LLM(model, drafter=ProposesNanToken()).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in clean]
    assert all(out.stats.drafted for out in outs)
