"""The step: schedule, propose, forward, accept, commit, learn, update. All parts meet here and only
here."""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import dataclass

import torch

from draftahead.control.policy import Policy, Spent
from draftahead.core import tree
from draftahead.core.detokenizer import Decode, Detokenizer
from draftahead.core.device import device_of
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.stats import Stats, StepTimer
from draftahead.core.types import (
    Batch,
    Exact,
    ForwardOutput,
    Request,
    RunningBatch,
    SequenceState,
    StepCost,
    Verdict,
)
from draftahead.drafters.base import Drafter
from draftahead.drafters.guard import GuardedDrafter
from draftahead.drafters.none import NoDrafter
from draftahead.engine.scheduler import Scheduler
from draftahead.models.verifier import Verifier
from draftahead.sampling.accept import AcceptanceRule, accept
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import rng_key


@dataclass
class InFlightStep:
    """A step whose forward was launched, and whose output has not been read yet."""

    batch: RunningBatch
    timer: StepTimer
    shown: Batch | None  # to the drafter, if it was asked for a draft
    proposed: Draft | DeviceDraft  # the root alone if there is no draft
    draft: Draft | DeviceDraft  # the part of it that is verified
    output: ForwardOutput


class Engine:
    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        decode: Decode,
        byte_tokens: Set[int] = frozenset(),
        *,
        exact: Exact,
        rule: AcceptanceRule,
        lossless: bool,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self.decode, self.byte_tokens = decode, byte_tokens
        self.rule: AcceptanceRule = rule
        self.lossless = lossless
        self.scheduler = Scheduler(verifier, exact)
        self.policy = Policy()
        self._step_cost = StepCost(self.policy.costs.of)
        self._guarded_drafter = GuardedDrafter(
            drafter, verifier.vocab_size, verifier.supports_device_draft
        )
        self._is_plain = isinstance(drafter, NoDrafter)
        # Whether the policy decides when the drafter is asked, and how many nodes are verified.
        self.adaptive = self._guarded_drafter.adaptive
        self._ids = itertools.count()
        # A device computes the next forward while the host is busy with the rest of a step.
        self._launches_ahead = device_of(verifier.runner.device).is_gpu
        self._in_flight: InFlightStep | None = None
        if self.adaptive and not verifier.fixed_shape:  # there all cost the same
            timed, compiles = verifier.timed_forward, verifier.first_forwards_compile
            self.policy.costs.survey(timed, verifier.max_context, compiles=compiles)

    # -------------------------------------------------------------------------------- the step

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Advances every running sequence by at least one token; returns them, ended ones too. On a
        GPU the forward of this step was launched by the one before, and this one launches the next.
        """
        if (step := self._in_flight) is not None:
            self._in_flight = None
            step.timer.resume()
        elif (step := self._launch()) is None:
            return []
        batch, output = step.batch, step.output
        verdict, draft = accept(step.draft, output, batch, self.rule, lossless=self.lossless)
        self.verifier.commit(draft, verdict)
        step.timer.lap("verify")
        logprobs = self.scheduler.logprobs(batch, verdict, output)
        if step.shown is not None:
            self._learn(step, step.shown, draft, verdict)
        num_kept = self.scheduler.update(batch, verdict, logprobs)
        for sequence in batch.sequences:
            if sequence.finish_reason is not None:
                self.release(sequence)
        step.timer.lap("other")
        try:
            if self._launches_ahead:
                self._in_flight = self._launch()
        finally:  # this step is complete, even if launching the next one raises
            self._record(step, draft, verdict, num_kept)
        if self._in_flight is not None:
            self._guarded_drafter.idle_work()
            self._in_flight.timer.pause()
        return list(batch.sequences)

    def _launch(self) -> InFlightStep | None:
        """Schedules, proposes and starts the forward, which a device computes asynchronously."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        proposed: Draft | DeviceDraft = Draft.root_only([s.tokens[-1] for s in batch.sequences])
        timer, shown = StepTimer(), None
        if not self._is_plain and self._should_draft(batch):
            shown = self._shown(batch)
            proposed = self._propose(shown)
        draft = self._part_to_verify(proposed) if shown is not None else proposed
        timer.lap("draft")
        output = self.verifier.forward(batch, draft)
        return InFlightStep(batch, timer, shown, proposed, draft, output)

    def _should_draft(self, batch: RunningBatch) -> bool:
        """Whether the drafter is asked for a draft in this step."""
        if self._guarded_drafter.gave_up or not any(batch.max_depths):
            return False
        self.policy.begin(batch)
        offer = self._guarded_drafter.expected_offer if self.adaptive else None
        return not self.adaptive or self.policy.asks(len(batch.sequences), offer)

    def _shown(self, batch: RunningBatch) -> Batch:
        """The batch as a drafter sees it, with what it needs: a sampler, the cost of a forward."""
        views = tuple([sequence.view for sequence in batch.sequences])
        sampler = RecordedDraftSampler(batch, self.verifier.vocab_size)
        return Batch(views, batch.max_depths, sampler, batch.exact, self._step_cost)

    def _propose(self, batch: Batch) -> Draft | DeviceDraft:
        """The drafter's draft, as large as a forward allows; the root alone if it has none."""
        proposed = self._guarded_drafter.propose(batch)
        if proposed is None:
            self.policy.note_no_draft()
            return Draft.root_only(batch.roots)
        if isinstance(proposed, DeviceDraft):
            return proposed
        self.adaptive = self.adaptive or proposed.confidence is not None
        return self._within_limits(proposed, batch)

    def _within_limits(self, draft: Draft, batch: Batch) -> Draft:
        """Drops nodes deeper than max_depth, or beyond the size of a forward. In fixed-shape replay
        all branches: the KV entries of a branch have other indices than those of a chain, which
        changes the order of summation in attention."""
        kept = []
        for b, max_depth in enumerate(batch.max_depths):
            parents = draft.parents[b][: draft.num_nodes[b]]
            depths = tree.depths(parents)
            nodes = [node for node, depth in enumerate(depths) if depth <= max_depth]
            nodes = nodes[: self.verifier.max_nodes]
            kept.append(
                tree.first_child_chain(parents, nodes) if self.verifier.fixed_shape else nodes
            )
        return draft.subset(kept)

    def _part_to_verify(self, proposed: Draft | DeviceDraft) -> Draft | DeviceDraft:
        """Cuts a draft with confidence to the nodes that are worth verifying; in a forward of fixed
        shape they cost nothing."""
        if isinstance(proposed, DeviceDraft) or proposed.confidence is None:
            return proposed
        return proposed if self.verifier.fixed_shape else self.policy.part_to_verify(proposed)

    def _learn(self, step: InFlightStep, shown: Batch, draft: Draft, verdict: Verdict) -> None:
        """Gives the verdict to the drafter. For a device draft, the time of building the trees is
        moved from "verify" to "draft": the host waited for both at once."""
        if isinstance(step.draft, DeviceDraft) and step.draft.timer is not None:
            step.timer.reassign("verify", "draft", step.draft.timer.laps()[-1])
        step.timer.lap("other")
        self._guarded_drafter.learn(shown, draft, step.output, verdict)
        step.timer.lap("draft")

    def _record(
        self, step: InFlightStep, draft: Draft, verdict: Verdict, num_kept: list[int]
    ) -> None:
        """Counts the step in the stats of each sequence, and lets the policy observe it."""
        timer, width = step.timer, len(draft.tokens[0])
        for b, sequence in enumerate(step.batch.sequences):
            depths = tree.depths(draft.parents[b][: draft.num_nodes[b]])[1:] if width > 1 else []
            sequence.stats.add_step(depths, num_kept[b], width, timer.seconds["verify"])
            timer.add_to(sequence.stats)
        if self._is_plain:
            return
        self.policy.observe(
            step.batch,
            verdict,
            draft if isinstance(step.proposed, DeviceDraft) else step.proposed,
            Spent(timer.cost("draft"), timer.cost("verify")),
            width=1 if self.verifier.fixed_shape else width,
            asked=step.shown is not None and self.adaptive,
            unseen=isinstance(step.draft, DeviceDraft),
        )

    # ------------------------------------------------------------------- requests in and out

    def new_sequences(self, request: Request) -> list[SequenceState]:
        """One for each of the request's n samples. Any thread may call it."""
        return [
            SequenceState(
                request=request,
                id=next(self._ids),
                sample=sample,
                rng_key=rng_key(request.seed, sample),
                tokens=list(request.prompt),
                detokenizer=Detokenizer(self.decode, request.params.stop_strings, self.byte_tokens),
                stats=Stats(prompt_tokens=len(request.prompt)),
            )
            for sample in range(request.params.n)
        ]

    def add(self, request: Request) -> list[SequenceState]:
        """Queues a request."""
        sequences = self.new_sequences(request)
        self.scheduler.add(sequences)
        return sequences

    def release(self, sequence: SequenceState) -> None:
        """Frees what a sequence holds, whether it has ended or is given up."""
        sequence.detokenizer.flush()
        if self._in_flight is not None and sequence in self._in_flight.batch.sequences:
            # Slots move, so the forward in flight is discarded; the next step repeats it. Wait
            # until the device has read its inputs.
            self._in_flight = None
            self.verifier.runner.synchronize()
        if self.scheduler.remove(sequence):
            self._guarded_drafter.release(sequence.view)

    def explain(self) -> list[str]:
        """Why it drafted as it did, a sentence each."""
        if self._is_plain:
            return ["plain decoding: the drafter is 'none'"]
        return [*self.policy.reasons(), *self._guarded_drafter.explain()]
