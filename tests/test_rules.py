"""Every acceptance rule, enumerated: the probs of the text is the target's own, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, ForwardOutput
from draftahead.sampling import accept
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext
from toy import END, VOCABULARY, World, add_step, distance, drafted_distribution

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
SETTINGS = {
    "plain": PLAIN,
    "penalties": SamplingParams(
        temperature=0.8,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.7,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=2,
    ),
    "truncated": SamplingParams(
        temperature=1.3, top_k=3, top_p=0.9, min_p=0.02, repetition_penalty=1.2
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_sampled_chain_keeps_the_law(rule: accept.AcceptanceRule, setting: str, seed: int) -> None:
    world = World(seed, SETTINGS[setting])
    plain = world.output_distribution(4)
    assert abs(sum(plain.values()) - 1) < 1e-12
    assert any(text[-1] == END and len(text) < 4 for text in plain)  # END is in play
    assert distance(drafted_distribution(world, 3, rule), plain) < 1e-12


@pytest.mark.parametrize("rule", ["block", "token"])
def test_equal_laws_accept_everything(rule: accept.AcceptanceRule) -> None:
    world = World(3, PLAIN, drafter_equals_target=True)
    assert distance(drafted_distribution(world, 2, rule), world.output_distribution(3)) < 1e-12


def test_block_keeps_at_least_as_much_as_token() -> None:
    from toy import drafts, verdicts

    better = 0
    for seed in range(6):
        world, mean = World(seed, PLAIN), {}
        for rule in ("block", "token"):
            mean[rule] = sum(
                probability * chance * len(accepted)
                for probability, draft, sequence in drafts(world, 3)
                for chance, accepted, _ in verdicts(draft, world, sequence, rule)
            )
        assert mean["block"] >= mean["token"] - 1e-12
        better += mean["block"] > mean["token"] + 1e-3
    assert better  # and somewhere really more


def sibling_trees(world: World) -> list[tuple[float, Draft]]:
    """Two children of the root drawn without replacement, two below the first, and one below the
    first of those: as deep as three."""
    prompt, found = world.prompt, []

    def probs(path: tuple[int, ...]) -> torch.Tensor:
        return world.logits("drafter", prompt + path).softmax(-1)

    def pairs(path: tuple[int, ...]) -> Iterator[tuple[float, int, int]]:
        """Two different tokens, and the chance that they come in this order."""
        q = probs(path)
        for one, other in itertools.permutations(range(VOCABULARY), 2):
            if q[one] > 0 and q[other] > 0 and q[one] < 1:
                yield float(q[one] * q[other] / (1 - q[one])), one, other

    for at_root, a, b in pairs(()):
        for below_a, c, d in pairs((a,)):
            for e in range(VOCABULARY):
                chance = at_root * below_a * float(probs((a, c))[e])
                if chance > 0:
                    guesses = [(a, 0), (b, 0), (c, 1), (d, 1), (e, 3)]
                    none = torch.zeros(VOCABULARY, dtype=torch.float64)
                    probs = torch.stack([probs(()), probs((a,)), none, probs((a, c)), none, none])[
                        None
                    ]
                    tree = Draft.trees([prompt[-1]], [guesses])
                    found.append((chance, Draft(tree.tokens, tree.parents, tree.num_nodes, probs)))
    return found


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_sampled_siblings_keep_the_law(seed: int) -> None:
    world = World(seed, PLAIN)
    trees = sibling_trees(world)
    assert abs(sum(p for p, _ in trees) - 1) < 1e-12
    found: dict[tuple[int, ...], float] = {}
    for probability, draft in trees:
        add_step(found, probability, draft, world, world.sequence(), "block", 4)
    assert distance(found, world.output_distribution(4)) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_point_mass_tree_follows_the_targets_own_draws(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the target says next, the verdict says just that, as deep as the tree agrees."""
    world = World(seed, PLAIN)
    sequence = world.sequence()
    generator = torch.Generator().manual_seed(seed)
    pairs: list[tuple[int, int]] = []
    for node in range(1, 8):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        pairs.append((int(torch.randint(0, VOCABULARY, (1,), generator=generator)), parent))
    draft = Draft.trees([world.prompt[-1]], [pairs])
    nodes = {(): 0}
    paths: list[tuple[int, ...]] = [()]
    for node, (token, parent) in enumerate(pairs, start=1):
        paths.append((*paths[parent], token))
        nodes.setdefault(paths[-1], node)
    batch = Batch(
        (sequence,), (8,), RecordedDraftSampler([sequence], [0], VOCABULARY, "distribution")
    )
    scores = ForwardOutput(torch.zeros(1, 8, VOCABULARY))
    for text in itertools.product(range(VOCABULARY), repeat=5):

        def emits(
            logits: torch.Tensor,
            contexts: list[NodeContext],
            text: tuple[int, ...] = text,
            one_by_one: bool = False,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            said = (*text, 0, 0, 0, 0)[len(contexts[0].path)]
            return torch.tensor([said]), torch.tensor([True])

        monkeypatch.setattr(accept, "sample_target", emits)
        verdict, _ = accept.accept(draft, scores, batch)
        whole = (*text, 0, 0, 0, 0)
        agreeing = next(d for d in range(9) if whole[: d + 1] not in nodes)
        assert verdict.tokens[0] == list(whole[: agreeing + 1])
        assert paths[verdict.paths[0][-1]] == whole[:agreeing]
