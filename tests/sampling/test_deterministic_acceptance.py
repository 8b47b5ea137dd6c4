"""Point-mass drafts: the target's own token, sampled level by level or for all nodes at once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from batched_worlds import BatchedWorlds, random_trees
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import Exact, ForwardOutput
from draftahead.sampling import accept, processors, sample
from drafted import ZeroTimer
from toy import PARAMS, PLAIN

GREEDY = dataclasses.replace(PLAIN, temperature=0)
TRUNCATED = dataclasses.replace(PLAIN, temperature=0.7, top_k=3, top_p=0.9, min_p=0.01)
BATCHES = {
    "sampled": [PLAIN, TRUNCATED],
    "mixed": [PLAIN, GREEDY],
    "greedy": [GREEDY, GREEDY],
    "penalties": [PLAIN, PARAMS["penalties"]],
    # The argmax of a forward is that of the logits before the penalties.
    "greedy, penalties": [GREEDY, dataclasses.replace(PARAMS["penalties"], temperature=0)],
}


class OnDevice:
    """Logits that say they lie on a device, where the host would have to wait for every level."""

    device = torch.device("meta")

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logits, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._logits[index]


def output_of(worlds: BatchedWorlds, *, on_device: bool, argmax_known: bool) -> ForwardOutput:
    logits: Any = OnDevice(worlds.logits) if on_device else worlds.logits
    argmax = worlds.logits.argmax(-1).where(worlds.logits.isfinite().any(-1), -1)
    return ForwardOutput(logits, argmax if argmax_known else None)


@pytest.mark.parametrize("argmax_known", [True, False])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("exact", ["distribution", "replay"])
def test_samples_of_all_nodes_at_once_are_those_along_the_path(
    exact: Exact, name: str, argmax_known: bool
) -> None:
    longest = 0
    for seed in range(12):
        worlds = BatchedWorlds(random_trees(seed, 2), BATCHES[name], seed=seed, exact=exact)
        if seed % 3 == 0:
            worlds.logits[0, seed // 3] = math.nan
        by_level = worlds.accept()
        for on_device in (False, True):
            output = output_of(worlds, on_device=on_device, argmax_known=argmax_known)
            verdict = worlds.accept(output=output)
            assert verdict.tokens == by_level.tokens
            assert verdict.paths == by_level.paths
            assert verdict.errors.keys() == by_level.errors.keys()
        longest = max(longest, *map(len, by_level.paths))
    assert longest >= 3


def test_all_nodes_are_sampled_at_once_only_where_that_saves_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device, or where the argmax is known; never where a sample must be computed by itself
    (replay) or depends on the path (processors)."""
    sampled: list[int] = []
    real = accept.sample_target

    def noted(logits: Tensor, contexts: Any, **options: Any) -> Any:
        sampled.append(len(contexts))
        return real(logits, contexts, **options)

    monkeypatch.setattr(accept, "sample_target", noted)

    def at_once(worlds: BatchedWorlds, **where: bool) -> bool:
        """No level of at most one node for each sequence was sampled."""
        sampled.clear()
        worlds.accept(output=output_of(worlds, **where))
        return sampled in ([], [2 * worlds.draft.width])

    for exact in ("distribution", "replay"):
        for name, params in BATCHES.items():
            worlds = BatchedWorlds(random_trees(1, 2), params, exact=exact)
            expected = name == "greedy"
            assert at_once(worlds, on_device=False, argmax_known=True) == expected
            assert not at_once(worlds, on_device=False, argmax_known=False)
            on_device = expected or (exact == "distribution" and "penalties" not in name)
            assert at_once(worlds, on_device=True, argmax_known=True) == on_device
            assert at_once(worlds, on_device=True, argmax_known=False) == on_device


@pytest.mark.parametrize("name", BATCHES)
def test_trees_built_on_a_device_get_the_verdict_of_the_same_trees_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one copy to the host: every other one would be another synchronisation."""
    longest, copies = 0, 0
    real = DeviceDraft.to_host

    def counted(draft: DeviceDraft, extra: Tensor | None = None) -> Any:
        nonlocal copies
        copies += 1
        return real(draft, extra)

    monkeypatch.setattr(DeviceDraft, "to_host", counted)
    for seed in range(12):
        trees = [*random_trees(seed, 1), *random_trees(100 + seed, 1)]
        worlds = BatchedWorlds(trees, BATCHES[name], seed=seed)
        expected, host = worlds.accept(), worlds.draft
        parts = [host.token_tensor, host.parent_tensor, torch.zeros_like(host.token_tensor)]
        worlds.draft = DeviceDraft.of_trees(
            [tokens[0] for tokens in host.tokens], torch.stack(parts, 1), ZeroTimer()
        )
        verdict = worlds.accept(output=output_of(worlds, on_device=True, argmax_known=False))
        assert (verdict.tokens, verdict.paths) == (expected.tokens, expected.paths)
        longest = max(longest, *map(len, expected.paths))
        assert copies == seed + 1
    assert longest >= 3


def test_an_invalid_tree_built_on_a_device_emits_the_token_of_its_root() -> None:
    worlds = BatchedWorlds(random_trees(1, 2), [PLAIN] * 2)
    parents = torch.tensor([[99, 3, -7, 2, 1, 99, 6, 2], worlds.draft.parents[1]])
    expected = worlds.accept()
    parts = [worlds.draft.token_tensor, parents, torch.zeros_like(parents)]
    worlds.draft = DeviceDraft.of_trees(worlds.batch.roots, torch.stack(parts, 1), ZeroTimer())
    verdict = worlds.accept(output=output_of(worlds, on_device=True, argmax_known=False))
    assert verdict.paths == [[0], expected.paths[1]]
    assert verdict.tokens == [expected.tokens[0][:1], expected.tokens[1]]


@pytest.mark.parametrize("on_device", [True, False])
def test_replay_computes_every_distribution_by_itself(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A softmax over several rows need not round as over one: so the rest of the batch and the
    draft cannot change a bit of it."""
    real, sizes = processors.probs_of, []

    def noted(logits: Tensor, contexts: Any) -> Tensor:
        sizes.append(len(contexts))
        return real(logits, contexts)

    monkeypatch.setattr(sample, "probs_of", noted)
    monkeypatch.setattr(accept, "probs_of", noted)
    for exact, largest in (("replay", 1), ("distribution", 24 if on_device else 3)):
        sizes.clear()
        worlds = BatchedWorlds(random_trees(2, 3), [PLAIN, TRUNCATED, PLAIN], exact=exact)
        worlds.accept(output=output_of(worlds, on_device=on_device, argmax_known=False))
        assert max(sizes) == largest


def test_of_two_children_with_one_token_the_first_is_accepted() -> None:
    """It is the one that has children."""
    worlds = BatchedWorlds([[(1, 0), (1, 0), (2, 1)]], [GREEDY])
    worlds.logits[:] = -math.inf
    for node, token in enumerate((1, 2, 3, 0)):
        worlds.logits[0, node, token] = 0.0
    verdict = worlds.accept()
    assert verdict.paths == [[0, 1, 3]]
    assert verdict.tokens == [[1, 2, 0]]
