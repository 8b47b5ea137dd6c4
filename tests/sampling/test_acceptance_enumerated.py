"""Every acceptance rule by enumeration: the output has exactly the target's distribution."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from transformers import (
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopHLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from draftahead.core.draft import Draft
from draftahead.core.types import ForwardOutput, ModelProcessors
from draftahead.sampling import accept
from draftahead.sampling.noise import NodeContext
from toy import (
    END,
    PARAMS,
    PLAIN,
    VOCAB_SIZE,
    World,
    drafted_distribution,
    sampled_drafts,
    total_variation,
    verdicts,
)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_sampled_chain_keeps_the_distribution(
    rule: accept.AcceptanceRule, params: str, seed: int
) -> None:
    world = World(seed, PARAMS[params])
    plain = world.output_distribution(4)
    assert abs(sum(plain.values()) - 1) < 1e-12
    assert any(text[-1] == END and len(text) < 4 for text in plain)  # some outputs end early
    assert total_variation(drafted_distribution(world, 3, rule), plain) < 1e-12


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("seed", [1, 3])
def test_sampled_chain_keeps_the_distribution_after_processors_of_the_model(
    rule: accept.AcceptanceRule, seed: int
) -> None:
    """They look back along the path, before the penalties, after them, and behind truncation."""
    params = dataclasses.replace(PARAMS["truncated"], processors=(NoRepeatNGramLogitsProcessor(2),))
    processors = ModelProcessors(
        (SequenceBiasLogitsProcessor({(0, 1): -2.0, (2, 2): 3.0}),),
        (TopHLogitsWarper(0.9),),
        (TypicalLogitsWarper(0.95), WatermarkLogitsProcessor(VOCAB_SIZE, "cpu", 0.5)),
    )
    world = World(seed, params, model_processors=processors)
    plain = world.output_distribution(4)
    assert total_variation(World(seed, params).output_distribution(4), plain) > 0.1
    assert total_variation(drafted_distribution(world, 3, rule), plain) < 1e-12


@pytest.mark.parametrize("rule", ["block", "token"])
def test_drafter_equal_to_the_target_keeps_the_distribution(rule: accept.AcceptanceRule) -> None:
    world = World(3, PLAIN, drafter_equals_target=True)
    found = drafted_distribution(world, 2, rule)
    assert total_variation(found, world.output_distribution(3)) < 1e-12


@pytest.mark.parametrize("rule", ["block", "token"])
def test_drafter_equal_to_the_target_is_always_accepted(rule: accept.AcceptanceRule) -> None:
    world = World(3, PLAIN, drafter_equals_target=True)
    for _, draft, sequence in sampled_drafts(world, 2):
        for probability, accepted, _ in verdicts(draft, world, sequence, rule):
            assert len(accepted) == draft.num_nodes[0] - 1 or probability < 1e-12


def test_block_verification_accepts_at_least_as_much_as_token_rejection() -> None:
    better = 0
    for seed in range(6):
        world, mean = World(seed, PLAIN), {}
        for rule in ("block", "token"):
            mean[rule] = sum(
                probability * chance * len(accepted)
                for probability, draft, sequence in sampled_drafts(world, 3)
                for chance, accepted, _ in verdicts(draft, world, sequence, rule)
            )
        assert mean["block"] >= mean["token"] - 1e-12
        better += mean["block"] > mean["token"] + 1e-3
    assert better  # and in some cases strictly more


@pytest.mark.parametrize("seed", range(4))
def test_point_mass_tree_emits_the_targets_own_samples(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the target samples, the verdict emits exactly that, as deep as the tree agrees."""
    world = World(seed, PLAIN)
    generator = torch.Generator().manual_seed(seed)
    pairs: list[tuple[int, int]] = []
    for node in range(1, 8):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        pairs.append((int(torch.randint(0, VOCAB_SIZE, (1,), generator=generator)), parent))
    draft = Draft.trees([world.prompt[-1]], [pairs])
    nodes = {(): 0}
    paths: list[tuple[int, ...]] = [()]
    for node, (token, parent) in enumerate(pairs, start=1):
        paths.append((*paths[parent], token))
        nodes.setdefault(paths[-1], node)
    batch = world.batch(world.sequence())
    output = ForwardOutput(torch.zeros(1, 8, VOCAB_SIZE))
    for text in itertools.product(range(VOCAB_SIZE), repeat=5):
        whole = (*text, 0, 0, 0, 0)

        def scripted_samples(
            logits: torch.Tensor,
            contexts: list[NodeContext],
            whole: tuple[int, ...] = whole,
            one_by_one: bool = False,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([whole[len(contexts[0].path)]]), torch.tensor([True])

        monkeypatch.setattr(accept, "sample_target", scripted_samples)
        verdict, _ = accept.accept(draft, output, batch)
        agreeing = next(depth for depth in range(9) if whole[: depth + 1] not in nodes)
        assert verdict.tokens[0] == list(whole[: agreeing + 1])
        assert paths[verdict.paths[0][-1]] == whole[:agreeing]
