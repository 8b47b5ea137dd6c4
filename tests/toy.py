"""A target and a drafter over four tokens, for which every distribution can be enumerated.

The real draft sampler and the real acceptance rules run here; only their randomness is replaced. A
sample is replaced by all its outcomes, each with its probability, and so is an acceptance test. The
result is the exact distribution of whole outputs, to be compared with the target's own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from draftahead.core import tree
from draftahead.core.detokenizer import Detokenizer, no_text
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import (
    Batch,
    Exact,
    ForwardOutput,
    ModelProcessors,
    Request,
    SequenceState,
)
from draftahead.sampling import accept, draft_sampler, noise, processors
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext

VOCAB_SIZE = 4
END = 3
Distribution = dict[tuple[int, ...], float]

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
PARAMS = {
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


@dataclass(frozen=True)
class World:
    """A target and a drafter whose logits depend on the whole prefix; some are -inf."""

    seed: int
    params: SamplingParams
    prompt: tuple[int, ...] = (0, 1)
    drafter_equals_target: bool = False
    model_processors: ModelProcessors = field(default_factory=ModelProcessors)

    @functools.cache  # noqa: B019
    def logits(self, model: str, prefix: tuple[int, ...]) -> torch.Tensor:
        """`model`: "target" or "drafter"."""
        if self.drafter_equals_target:
            model = "target"
        key = noise.rng_key(self.seed, len(model), *prefix)
        generator = torch.Generator().manual_seed(key)
        values = 2.0 * torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64)
        # One or two impossible tokens, others for the drafter than for the target.
        banned = torch.randperm(VOCAB_SIZE, generator=generator)[: 1 + key % 2]
        return values.index_fill(0, banned, -torch.inf)

    def sequence(self) -> SequenceState:
        request = Request(
            self.prompt,
            self.params,
            seed=0,
            eos_token_ids=frozenset({END}),
            model_processors=self.model_processors,
        )
        return SequenceState(request, 0, 0, 0, list(self.prompt), Detokenizer(no_text))

    def batch(self, *sequences: SequenceState, max_depth: int = 9) -> Batch:
        depths = (max_depth,) * len(sequences)
        sampler = sampler_for(sequences, depths)
        return Batch(sequences, depths, sampler)

    @functools.cache  # noqa: B019
    def probs(self, path: tuple[int, ...]) -> torch.Tensor:
        """The target's distribution after the prompt and a path."""
        context = NodeContext(self.sequence(), path)
        return processors.probs_of(self.logits("target", self.prompt + path)[None], [context])[0]

    def output_distribution(self, length: int) -> Distribution:
        """Of plain decoding: all texts of `length` tokens, or shorter ones that end with END."""
        found: Distribution = {}
        for text in itertools.product(range(VOCAB_SIZE), repeat=length):
            probability, length_used = 1.0, 0
            for length_used, token in enumerate(text, start=1):
                probability *= float(self.probs(text[: length_used - 1])[token])
                if token == END:
                    break
            found[text[:length_used]] = probability  # the same for all continuations of it
        return {text: p for text, p in found.items() if p > 0}


def sampler_for(
    sequences: Sequence[SequenceState],
    max_depths: Sequence[int],
    vocab_size: int = VOCAB_SIZE,
    exact: Exact = "distribution",
) -> RecordedDraftSampler:
    batch = Batch(tuple(sequences), tuple(max_depths), exact=exact)
    return RecordedDraftSampler(batch, vocab_size)


def batch_of_roots(*roots: int, max_depth: int = 9) -> Batch:
    """A sequence for each root."""
    sequences = [World(0, PLAIN, (0, root)).sequence() for root in roots]
    return World(0, PLAIN).batch(*sequences, max_depth=max_depth)


@contextmanager
def scripted(script: list[Any], record: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Acceptance tests pass as `script` gives it; the probability of each is recorded, and the
    distribution that the target's own token is sampled from."""
    bits = iter(script)

    def accepts(probability: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        record.append(("test", probability.detach().clone()))
        flat = [next(bits) for _ in range(probability.numel())]
        return torch.tensor(flat).view(probability.shape)

    def sample_gumbel(probs: torch.Tensor, keys: list[int]) -> torch.Tensor:
        record.append(("sample", probs.detach().clone()))
        return torch.zeros(len(probs), dtype=torch.long)

    with (
        mock.patch.object(accept, "accepts", accepts),
        mock.patch.object(accept, "sample_gumbel", sample_gumbel),
    ):
        yield


def verdicts(
    draft: Draft | DeviceDraft,
    world: World,
    sequence: SequenceState,
    rule: accept.AcceptanceRule,
) -> Iterator[tuple[float, list[int], torch.Tensor]]:
    """Every outcome of the acceptance tests: probability, accepted tokens, distribution of the own
    token."""
    known, _ = draft.to_host()
    paths = tree.paths(known.tokens[0], known.parents[0])
    logits = torch.stack([world.logits("target", world.prompt + path) for path in paths])[None]
    batch = world.batch(sequence)
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
        chances = [p for kind, t in record if kind == "test" for p in t.flatten().tolist()]
        for bit, chance in zip(script, chances, strict=True):
            probability *= chance if bit else 1 - chance
        own = [probs for kind, probs in record if kind == "sample"][-1][0]
        if probability:
            yield probability, verdict.tokens[0][:-1], own


Corrupt = Callable[[Draft], Draft]


def sampled_drafts(
    world: World, depth: int, choose: str = "sampled"
) -> Iterator[tuple[float, DeviceDraft, SequenceState]]:
    """Every chain that the real draft sampler can draw, with its probability. A chain ends with
    END. `choose`: "argmax" takes the most likely token instead of a sample, which is wrong."""
    for forced in itertools.product(range(VOCAB_SIZE), repeat=depth):
        sequence = world.sequence()
        sampler = sampler_for([sequence], [depth])
        probability = 1.0
        for token in forced:
            path = tuple(sampler.chains[0])
            active = torch.tensor([END not in path])
            logits = world.logits("drafter", world.prompt + path)[None]
            with mock.patch.object(
                draft_sampler, "sample_gumbel", lambda probs, keys, t=token: torch.tensor([t])
            ):
                sampler.draw(logits, active)
            if not active:
                # The rest of the chain was never drawn: count this draft once only.
                probability *= float(token == 0)
                continue
            probs = sampler._probs[-1][0]
            if choose == "argmax":
                probability *= float(int(probs.argmax()) == token)
            else:
                probability *= float(probs[token])
        if probability:
            draft = sampler.draft()
            assert draft is not None
            yield probability, draft, sequence


def drafted_distribution(
    world: World,
    depth: int,
    rule: accept.AcceptanceRule,
    *,
    choose: str = "sampled",
    corrupt: Corrupt | None = None,
) -> Distribution:
    """The exact distribution of depth + 1 tokens: one drafted step, then plain decoding."""
    found: Distribution = {}
    for probability, drawn, sequence in sampled_drafts(world, depth, choose):
        draft: Draft | DeviceDraft = drawn
        if corrupt:
            draft = corrupt(drawn.to_host()[0])
        add_step(found, probability, draft, world, sequence, rule, depth + 1)
    return {text: p for text, p in found.items() if p > 1e-15}


def add_step(
    found: Distribution,
    probability: float,
    draft: Draft | DeviceDraft,
    world: World,
    sequence: SequenceState,
    rule: accept.AcceptanceRule,
    length: int,
) -> None:
    """Adds all outcomes of a step with this draft, continued by plain decoding to `length`."""
    for chance, accepted, own in verdicts(draft, world, sequence, rule):
        for token in range(VOCAB_SIZE):
            weight = probability * chance * float(own[token] / own.sum())
            if weight:
                _finish(found, weight, (*accepted, token), world, length)


def _finish(
    found: Distribution, weight: float, text: tuple[int, ...], world: World, length: int
) -> None:
    """Plain decoding up to `length` tokens; an END among the emitted tokens cuts them."""
    if END in text:
        text = text[: text.index(END) + 1]
        found[text] = found.get(text, 0.0) + weight
    elif len(text) == length:
        found[text] = found.get(text, 0.0) + weight
    else:
        for token, chance in enumerate(world.probs(text).tolist()):
            if chance:
                _finish(found, weight * chance, (*text, token), world, length)


def total_variation(one: Distribution, other: Distribution) -> float:
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in one.keys() | other.keys()) / 2


def context_of(**params: object) -> NodeContext:
    """The root of a sequence with such sampling parameters, everything else switched off."""
    return NodeContext(World(0, dataclasses.replace(PLAIN, **params)).sequence())  # type: ignore[arg-type]
