"""A world of four tokens in which every distribution can be enumerated.

The real draft sampler and the real acceptance rules run here; only randomness is taken out of their
hands. A draw is replaced by all its outcomes, each with its probability, and so is an acceptance
test. The result is the exact distribution of whole outputs, to be compared with the target's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from draftahead.core.detokenizer import Detokenizer
from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, ForwardOutput, Request, SequenceState
from draftahead.sampling import accept, draft_sampler, noise, processors
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext

VOCABULARY = 4
END = 3
Distribution = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class World:
    """A target and a drafter whose logits depend on the whole prefix, zeros included."""

    seed: int
    params: SamplingParams
    prompt: tuple[int, ...] = (0, 1)
    drafter_equals_target: bool = False

    @functools.cache  # noqa: B019
    def logits(self, who: str, prefix: tuple[int, ...]) -> torch.Tensor:
        if self.drafter_equals_target:
            who = "target"
        key = noise.rng_key(self.seed, len(who), *prefix)
        generator = torch.Generator().manual_seed(key)
        values = 2.0 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        # One or two impossible tokens, others for the drafter than for the target.
        banned = torch.randperm(VOCABULARY, generator=generator)[: 1 + key % 2]
        return values.index_fill(0, banned, -torch.inf)

    def sequence(self) -> SequenceState:
        request = Request(self.prompt, self.params, seed=0, eos_token_ids=frozenset({END}))
        tail = Detokenizer(lambda ids: "")
        return SequenceState(request, 0, 0, 0, list(self.prompt), tail)

    @functools.cache  # noqa: B019
    def probs(self, path: tuple[int, ...]) -> torch.Tensor:
        """The target's own probs after the prompt and a path."""
        context = NodeContext(self.sequence(), path)
        return processors.probs_of(self.logits("target", self.prompt + path)[None], [context])[0]

    def output_distribution(self, length: int) -> Distribution:
        """Of plain decoding: all texts of `length` tokens, shorter ones where END comes."""
        found: Distribution = {}
        for text in itertools.product(range(VOCABULARY), repeat=length):
            probability, said = 1.0, 0
            for said, token in enumerate(text, start=1):
                probability *= float(self.probs(text[: said - 1])[token])
                if token == END:
                    break
            found[text[:said]] = probability  # the same for all that continue an ended text
        return {text: p for text, p in found.items() if p > 0}


@contextmanager
def scripted(script: list[Any], record: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Acceptance tests pass as the script says; the probability of each is recorded, and the
    distribution of the final draw."""
    bits = iter(script)

    def accepts(probability: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        record.append(("test", probability.detach().clone()))
        flat = [next(bits) for _ in range(probability.numel())]
        return torch.tensor(flat).view(probability.shape)

    def sample_gumbel(probs: torch.Tensor, keys: list[int]) -> torch.Tensor:
        record.append(("draw", probs.detach().clone()))
        return torch.zeros(len(probs), dtype=torch.long)

    with (
        mock.patch.object(accept, "accepts", accepts),
        mock.patch.object(accept, "sample_gumbel", sample_gumbel),
    ):
        yield


def verdicts(
    draft: Draft, world: World, sequence: SequenceState, rule: accept.AcceptanceRule
) -> Iterator[tuple[float, list[int], torch.Tensor]]:
    """Every outcome of the acceptance tests: probability, accepted tokens, distribution of the own
    token."""
    known, _ = draft.read(torch.empty(1, 0, dtype=torch.long))
    tokens, parents = known.tokens[0], known.parents[0]
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    logits = torch.stack([world.logits("target", world.prompt + path) for path in paths])[None]
    batch = Batch(
        (sequence,),
        (len(tokens),),
        RecordedDraftSampler([sequence], [0], VOCABULARY, "distribution"),
    )
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        record: list[tuple[str, torch.Tensor]] = []
        try:
            with scripted(script, record):
                verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, rule)
        except (StopIteration, RuntimeError) as more:
            if not isinstance(more, StopIteration) and "StopIteration" not in str(more):
                raise
            pending += [[*script, False], [*script, True]]
            continue
        probability = 1.0
        chances = [c for kind, t in record if kind == "test" for c in t.flatten().tolist()]
        for bit, chance in zip(script, chances, strict=True):
            probability *= chance if bit else 1 - chance
        own = [probs for kind, probs in record if kind == "draw"][-1][0]
        if probability:
            yield probability, verdict.tokens[0][:-1], own


Mangle = Callable[[Draft], Draft]


def drafts(
    world: World, depth: int, chooser: str = "sampled"
) -> Iterator[tuple[float, Draft, SequenceState]]:
    """Every chain the real dice can draw, with its probability. A chain ends with END."""
    for forced in itertools.product(range(VOCABULARY), repeat=depth):
        sequence = world.sequence()
        dice = RecordedDraftSampler([sequence], [depth], VOCABULARY, "distribution")
        probability = 1.0
        for index in range(depth):
            path = tuple(dice.chains[0])
            going = torch.tensor([END not in path])
            logits = world.logits("drafter", world.prompt + path)[None]
            with mock.patch.object(
                draft_sampler,
                "sample_gumbel",
                lambda probs, keys, t=forced[index]: torch.tensor([t]),
            ):
                dice.draw(logits, going)
            if not going:
                # The rest of the chain was never drawn: count this draft once only.
                probability *= float(forced[index] == 0)
                continue
            probs = dice.probs[-1][0]
            if chooser == "argmax":
                probability *= float(int(probs.argmax()) == forced[index])
            else:
                probability *= float(probs[forced[index]])
        if probability:
            draft = dice.draft()
            assert draft is not None
            yield probability, draft, sequence


def drafted_distribution(
    world: World,
    depth: int,
    rule: accept.AcceptanceRule,
    *,
    chooser: str = "sampled",
    mangle: Mangle | None = None,
) -> Distribution:
    """The exact probs of the first depth + 1 tokens: one drafted step, then plain decoding."""
    found: Distribution = {}
    for probability, drawn, sequence in drafts(world, depth, chooser):
        draft = mangle(drawn) if mangle else drawn
        add_step(found, probability, draft, world, sequence, rule, depth + 1)
    return {text: p for text, p in found.items() if p > 1e-15}


def add_step(
    found: Distribution,
    probability: float,
    draft: Draft,
    world: World,
    sequence: SequenceState,
    rule: accept.AcceptanceRule,
    length: int,
) -> None:
    for chance, accepted, own in verdicts(draft, world, sequence, rule):
        for token in range(VOCABULARY):
            weight = probability * chance * float(own[token] / own.sum())
            if weight:
                _finish(found, weight, (*accepted, token), world, length)


def _finish(
    found: Distribution, weight: float, text: tuple[int, ...], world: World, length: int
) -> None:
    """Goes on plainly to `length` tokens; an END inside what was emitted cuts it."""
    if END in text:
        text = text[: text.index(END) + 1]
        found[text] = found.get(text, 0.0) + weight
    elif len(text) == length:
        found[text] = found.get(text, 0.0) + weight
    else:
        for token, chance in enumerate(world.probs(text).tolist()):
            if chance:
                _finish(found, weight * chance, (*text, token), world, length)


def distance(one: Distribution, other: Distribution) -> float:
    """Total variation."""
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in one.keys() | other.keys()) / 2
