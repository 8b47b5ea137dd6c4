"""Keys of the random numbers that drafting, acceptance tests and the target's own tokens use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batched_worlds import chain, identical_drafts
from draftahead.core.types import Batch, ForwardOutput
from draftahead.sampling import accept, noise
from draftahead.sampling.noise import NodeContext, rng_key, target_rng_key
from toy import PLAIN, VOCAB_SIZE, World, sampler_for


@pytest.mark.parametrize("rule", ["block", "token"])
def test_no_two_uses_of_noise_share_a_key(
    rule: accept.AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting, tests and the target's own tokens of two steps, the second of which drafts some
    positions again. A key that is used twice correlates what must be independent; only the
    target's noise at a position is the same in every step, and used once: when its token is
    emitted."""
    used: list[tuple[str, int]] = []
    stage = ""
    real = noise.uniforms_at

    def noted(keys: Tensor | list[int], ids: Tensor) -> Tensor:
        found = keys.tolist() if isinstance(keys, Tensor) else list(keys)
        used.extend((stage, key) for key in found)
        return real(keys, ids)

    monkeypatch.setattr(noise, "uniforms_at", noted)
    sequences = [World(0, PLAIN).sequence() for _ in range(2)]
    for number, sequence in enumerate(sequences):
        sequence.rng_key = rng_key(number)
    for _ in range(2):
        sampler = sampler_for(sequences, [2, 2])
        stage = "draft"
        for _ in range(2):
            sampler.draw(torch.zeros(2, VOCAB_SIZE))
        draft = sampler.draft()
        assert draft is not None
        batch = Batch(tuple(sequences), (2, 2), sampler)
        stage = "accept"
        output = ForwardOutput(torch.zeros(2, 3, VOCAB_SIZE))
        verdict, _ = accept.accept(draft, output, batch, rule)
        assert all(len(tokens) == 3 for tokens in verdict.tokens)  # identical: all is accepted
        for sequence in sequences:
            sequence.tokens.append(2)  # one token on: the next step drafts a position again
    contexts = [NodeContext(s, (0,) * depth) for s in sequences for depth in range(4)]
    target_keys = {target_rng_key(context) for context in contexts}
    keys = [key for _, key in used]
    assert len(set(keys)) == len(keys)
    assert not target_keys & {key for stage, key in used if stage == "draft"}
    # Block verification has a test for each node, token rejection one for each drafted token.
    assert len(keys) == 2 * 2 * (2 + (3 if rule == "block" else 2) + 1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_own_token_is_sampled_with_the_noise_of_its_position(
    rule: accept.AcceptanceRule, seed: int
) -> None:
    """Not with that of the root, and not with that of a test: what plain decoding would sample
    there."""
    worlds = identical_drafts([chain(1, 2), chain(0)], seed=seed)
    verdict = worlds.accept(rule)
    for b, path in enumerate([(1, 2), (0,)]):
        own = worlds.own_token(torch.full((VOCAB_SIZE,), 0.25), b, path)
        assert verdict.tokens[b] == [*path, own]
