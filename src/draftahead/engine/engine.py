"""The step: propose, score, verify, keep, learn, commit. Everything meets here and only here."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from draftahead.control.policy import Policy, Spent
from draftahead.control.promises import Offer
from draftahead.core import tree
from draftahead.core.detokenizer import Decode, Detokenizer
from draftahead.core.stats import Stats, StepTimer
from draftahead.core.types import (
    Batch,
    Draft,
    Exact,
    ForwardOutput,
    Request,
    SequenceState,
    TokenLogprob,
    Verdict,
)
from draftahead.drafters.base import Drafter, sound
from draftahead.engine.scheduler import Scheduler
from draftahead.errors import DrafterFaultWarning
from draftahead.models.verifier import Verifier
from draftahead.sampling.accept import AcceptanceRule, verify
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import NodeContext, rng_key
from draftahead.sampling.sample import token_logprobs

GIVE_UP_AFTER = 8  # faults of a drafter in a row


class Engine:
    def __init__(
        self,
        target: Verifier,
        drafter: Drafter,
        decode: Decode,
        *,
        exact: Exact,
        rule: AcceptanceRule,
        lossless: bool = True,
    ) -> None:
        self.target, self.drafter, self.decode = target, drafter, decode
        self.exact: Exact = exact
        self.rule: AcceptanceRule = rule
        self.lossless = lossless
        self.scheduler = Scheduler(target.runner.cache.rows)
        self._ids = itertools.count()
        self._faults = 0  # of the drafter, in a row
        self._warned = False
        self._ahead = target.runner.device.type == "cuda"
        self._flight: InFlightStep | None = None
        self.policy = Policy()
        self._asked = False  # whether the drafter was, for the pass that is being launched
        self._guided = bool(getattr(drafter, "adaptive", False))  # whether the policy decides that
        self._meanwhile: Callable[[], None] | None = getattr(drafter, "idle_work", None)
        if self._guided and not target.fixed_shape:  # there every pass costs the same
            self.policy.costs.survey(target.timed_pass, target.max_context)

    # ------------------------------------------------------------------ requests in and out

    def add(self, request: Request) -> list[SequenceState]:
        """Queues a request; one sequence for each of its n samples."""
        sequences = [
            SequenceState(
                request=request,
                id=next(self._ids),
                sample=sample,
                rng_key=rng_key(request.seed, sample),
                tokens=list(request.prompt),
                tail=Detokenizer(self.decode, request.params.stops),
                stats=Stats(prompt_tokens=len(request.prompt)),
            )
            for sample in range(request.params.n)
        ]
        self.scheduler.add(sequences)
        return sequences

    def release(self, sequence: SequenceState) -> None:
        """Frees what a sequence holds, whether it has ended or is given up."""
        if self._flight is not None and sequence in self._flight.batch.sequences:
            self._flight = None  # rows move: what is under way is done again, unlooked at
            self.target.runner.synchronize()  # and reads its inputs until then
        if sequence in self.scheduler.running or sequence in self.scheduler.waiting:
            if rows := self.scheduler.remove(sequence):
                self.target.runner.cache.swap_slots(*rows)
            self._guarded(lambda: self.drafter.release(sequence))

    # ------------------------------------------------------------------------------ the step

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Advances every running sequence by at least one token; returns them, ended ones too.

        A device is sent its next pass before the rest of the step is done, and before whoever
        asked gets the tokens: it works while the host does.
        """
        flight, self._flight = self._flight or self._launch(), None
        if flight is None:
            return []
        flight.clock.go_on()
        verdict, kept = self._land(flight)
        flight.clock.lap("other_seconds")
        try:
            if self._ahead:
                self._flight = self._launch()
        finally:  # whatever comes of the next pass, this step has been
            self._count(flight, verdict, kept)
        if self._flight is not None:
            if self._meanwhile is not None:
                self._guarded(self._meanwhile)
            self._flight.clock.stop()
        return list(flight.batch.sequences)

    def _count(self, flight: InFlightStep, verdict: Verdict, kept: list[int]) -> None:
        draft = flight.draft
        for row, sequence in enumerate(flight.batch.sequences):
            depths = tree.depths(draft.host_parents[row])
            pass_ = draft.parents.shape[1], flight.clock.spent["verify_seconds"]
            sequence.stats.count(depths[1 : draft.num_nodes[row]], kept[row], *pass_)
            flight.clock.charge(sequence.stats)
        self._note(flight, verdict)

    def _launch(self) -> InFlightStep | None:
        """Proposes and scores. On a device the scores are then still under way."""
        self._admit()
        if not self.scheduler.running:
            return None
        clock = StepTimer()
        batch = self._batch()
        proposed, draft = self._propose(batch)
        clock.lap("draft_seconds")
        scores = self.target.score(batch, draft)
        clock.lap("verify_seconds")
        adaptive = self._asked and self._guided
        return InFlightStep(batch, draft, scores, clock, proposed, self._asked, adaptive)

    def _land(self, flight: InFlightStep) -> tuple[Verdict, list[int]]:
        """Verifies, keeps, learns, commits; also returns how many drafted tokens each row keeps."""
        batch, draft, scores, clock = flight[:4]
        verdict = verify(draft, scores, batch, self.rule, lossless=self.lossless)
        clock.lap("verify_seconds")
        if draft.on_device is not None:  # then it also waited for the trees
            clock.shift("verify_seconds", "draft_seconds", draft.on_device.clock.laps()[-1])
        self.target.keep(batch, draft, verdict)
        clock.lap("verify_seconds")
        logprobs = _logprobs(batch, scores, verdict)
        clock.lap("other_seconds")
        if flight.asked:  # one that is switched off costs nothing
            # Copies: a drafter's slip stays its own.
            told = Verdict([list(p) for p in verdict.paths], [list(t) for t in verdict.tokens])
            shown = dataclasses.replace(scores, draft=draft.copied())
            self._guarded(lambda: self.drafter.learn(batch, told, shown))
        clock.lap("draft_seconds")
        kept = self.scheduler.commit(batch, verdict, logprobs)
        for sequence in batch.sequences:
            if sequence.finish_reason is not None:
                sequence.tail.flush()
                if sequence.finish_reason == "error":
                    self.target.runner.cache.clear_slot(self.scheduler.running.index(sequence))
                self.release(sequence)
        return verdict, kept

    def _note(self, flight: InFlightStep, verdict: Verdict) -> None:
        """What the policy learns of a step: of times also from a drafter that decides by itself."""
        clock, confidence = flight.clock, []
        if flight.proposed is not None:
            for row, said in enumerate(verdict.tokens):
                confidence += outcomes(flight.proposed, row, said)
            if flight.proposed.on_device is not None:
                worths = self._worths(flight.proposed)
                self.policy.note_usual([sorted(row, reverse=True) for row in worths])
        texts, width = flight.draft.parents.shape
        tokens = sum(map(len, verdict.tokens))
        keys = sum(len(sequence.tokens) for sequence in flight.batch.sequences)
        self.policy.costs.situate(texts, keys)  # a next pass may be under way, for other texts
        seconds = Spent(clock.price("draft_seconds"), clock.price("verify_seconds"))
        if self.target.fixed_shape:
            width = 1  # as every pass is padded to
        self.policy.note(texts, width, tokens, seconds, confidence, asked=flight.adaptive)

    def _batch(self) -> Batch:
        sequences = tuple(self.scheduler.running)
        most = self.target.max_nodes - 1
        max_depths = [
            max(0, min(self.scheduler.room(s), self.target.room(s), most)) for s in sequences
        ]
        self.policy.costs.situate(len(sequences), sum(len(s.tokens) for s in sequences))
        dice = RecordedDraftSampler(sequences, max_depths, self.target.vocabulary, self.exact)
        return Batch(sequences, tuple(max_depths), dice, self.exact, self.policy.costs)

    def _admit(self) -> None:
        """Gives waiting sequences a row and fills it: with what an idle row or a sister holds
        of their prompt, and the rest by prefill."""
        cache, running = self.target.runner.cache, self.scheduler.running
        while (sequence := self.scheduler.next_to_admit) is not None:
            clock, group = StepTimer(), [sequence]
            row, request = len(running), sequence.request
            prompt = request.prompt[:-1]
            sisters = [r for r, mate in enumerate(running) if mate.request is request]
            if sisters:
                cache.copy_slot(sisters[0], row)
                del cache.tokens_in[row][len(prompt) :]
                sequence.stats.reused_tokens = len(prompt)
            elif request.reuse:
                idle = range(row, cache.rows)
                cache.swap_slots(row, max(idle, key=lambda r: cache.matched(r, prompt)))
                sequence.stats.reused_tokens = self.target.prefill(row, sequence)
            else:
                group = self.scheduler.prefill_batch()
                self.target.prefill_slots(row, group)
            self.target.runner.synchronize()
            clock.lap("prefill_seconds")
            for one in group:
                clock.charge(one.stats, 1 / len(group))
                self.scheduler.admit()

    # ---------------------------------------------------------------------- the drafter's side

    def _propose(self, batch: Batch) -> tuple[Draft | None, Draft]:
        """The drafter's guesses where it makes claims, and those of them, or of others, that are
        worth a pass. Whatever it does, the draft that comes out is sound."""
        able = self._faults < GIVE_UP_AFTER and any(batch.max_depths)
        texts = len(batch.sequences)
        self._asked = able and (not self._guided or self.policy.asks(texts, self._hope()))
        if not self._asked:
            return None, Draft.nothing(batch.roots)
        found: list[Draft | None] = [None]

        def ask() -> None:
            proposed = self.drafter.propose(batch)
            if proposed is not None:
                ahead = self.target.scores_device_drafts(proposed, batch)
                found[0] = proposed if ahead else sound(proposed, batch, self.target.vocabulary)

        self._guarded(ask, counts=True)
        dice = batch.draft_sampler
        assert isinstance(dice, RecordedDraftSampler)
        # What the dice have drawn is the draft, even if the drafter failed after the draw.
        draft = dice.draft() or found[0]
        if draft is None:
            self.policy.tally.nothing += 1
            return None, Draft.nothing(batch.roots)
        if draft.on_device is not None:
            self._guided = True
            return draft, draft  # its claims will be known with it
        draft = trimmed(draft, batch, self.target.max_nodes, trunk_only=self.target.fixed_shape)
        if draft.confidence is None:
            return None, draft
        self._guided = True
        if self.target.fixed_shape:
            return draft, draft  # padded anyway: these rows cost nothing
        worths = self._worths(draft)
        width = self.policy.width(worths)
        self.policy.tally.declined += width == 1
        return draft, pruned(draft, batch, [likeliest(row, width) for row in worths])

    def _hope(self) -> Offer | None:
        """What a drafter that has more in store says of it."""
        found: list[Any] = [None]
        self._guarded(lambda: found.append(getattr(self.drafter, "expected_offer", None)))
        return found[-1] if isinstance(found[-1], Offer) else None

    def _worths(self, draft: Draft) -> list[list[float]]:
        assert draft.confidence is not None
        return [
            self.policy.worth(*row)
            for row in zip(draft.confidence, draft.host_parents, strict=True)
        ]

    def _guarded(self, call: Callable[[], None], *, counts: bool = False) -> None:
        """Runs a drafter's code. A fault costs its guesses and one warning, never the text."""
        try:
            call()
        except Exception as fault:
            self._faults += counts
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"drafter {type(self.drafter).__name__} failed and is left out where it does: "
                    f"{type(fault).__name__}: {fault}",
                    DrafterFaultWarning,
                    stacklevel=2,
                )
        else:
            self._faults = 0 if counts else self._faults


class InFlightStep(NamedTuple):
    """A pass that was sent and not looked at yet."""

    batch: Batch
    draft: Draft
    scores: ForwardOutput
    clock: StepTimer
    proposed: Draft | None  # with claims, before it was cut to what pays
    asked: bool  # the drafter was
    adaptive: bool  # and it is one that the policy guides


def _logprobs(
    batch: Batch, scores: ForwardOutput, verdict: Verdict
) -> dict[int, list[TokenLogprob]]:
    """For the rows that ask: of every token that this step emits, at the node it came from."""
    found = {}
    for row, sequence in enumerate(batch.sequences):
        if sequence.params.logprobs is not None:
            tokens = verdict.tokens[row]
            contexts = [NodeContext(sequence, tuple(tokens[:i])) for i in range(len(tokens))]
            at = verdict.paths[row][: len(tokens)]
            found[row] = token_logprobs(scores.logits[row, at], contexts, tokens)
    return found


# ------------------------------------------------------------------------- sound drafts only


def outcomes(draft: Draft, row: int, said: list[int]) -> list[tuple[float, bool]]:
    """Of every claim whether it came true, scored or not: by what the target said. What lies beyond
    its last token is not known and left out."""
    assert draft.confidence is not None
    came: list[bool | None] = [True]
    depths = tree.depths(draft.host_parents[row])
    found = []
    for node in range(1, draft.num_nodes[row]):
        before, at = came[draft.host_parents[row][node]], depths[node] - 1
        now = before
        if before is True:
            now = said[at] == draft.host_tokens[row][node] if at < len(said) else None
        came.append(now)
        if now is not None:
            found.append((draft.confidence[row][node - 1], now))
    return found


def likeliest(confidence: list[float], width: int) -> list[int]:
    """The root and the likeliest nodes below it, as many as a pass of this width takes."""
    ranked = sorted(range(1, len(confidence) + 1), key=lambda node: (-confidence[node - 1], node))
    return [0, *sorted(ranked[: width - 1])]


def trimmed(draft: Draft, batch: Batch, max_nodes: int, *, trunk_only: bool) -> Draft:
    """Cuts what is deeper than a row's room, or more than a pass takes; in replay, all but the
    trunk: a branch's keys lie in other slots than a chain's, and a sum in another order is
    another sum."""
    parents = draft.host_parents
    depths = [tree.depths(row) for row in parents]
    kept = []
    for row, (size, room) in enumerate(zip(draft.num_nodes, batch.max_depths, strict=True)):
        nodes = [n for n in range(size) if depths[row][n] <= room][:max_nodes]
        if trunk_only:
            trunk = [0]
            while child := next((n for n in nodes if parents[row][n] == trunk[-1]), None):
                trunk.append(child)
            nodes = trunk
        kept.append(nodes)
    return pruned(draft, batch, kept)


def pruned(draft: Draft, batch: Batch, kept: list[list[int]]) -> Draft:
    """The draft with these nodes only, each row's in order, none without its parent."""
    if all(len(nodes) == size for nodes, size in zip(kept, draft.num_nodes, strict=True)):
        return draft
    assert draft.probs is None, "the dice keep to the room; cutting what they drew would be a bias"
    tokens, parents = draft.host_tokens, draft.host_parents
    place = [{node: i for i, node in enumerate(nodes)} for nodes in kept]
    guesses = [
        [(tokens[row][n], place[row][parents[row][n]]) for n in nodes[1:]]
        for row, nodes in enumerate(kept)
    ]
    confidence = None
    if draft.confidence is not None:
        confidence = [
            [draft.confidence[row][n - 1] for n in nodes[1:]] for row, nodes in enumerate(kept)
        ]
    return Draft.trees(batch.roots, guesses, confidence)
