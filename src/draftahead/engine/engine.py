"""The step: schedule, propose, forward, accept, commit, learn, update. All parts meet here and only
here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

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
    SequenceState,
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
    """A step whose forward was launched, and whose output has not been looked at yet."""

    batch: Batch
    timer: StepTimer
    proposed: Draft | None  # by the drafter with confidence, before it was cut to what pays
    draft: Draft | DeviceDraft  # what is verified
    output: ForwardOutput
    asked: bool  # whether the drafter was


class Engine:
    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        decode: Decode,
        *,
        exact: Exact,
        rule: AcceptanceRule,
        lossless: bool = True,
    ) -> None:
        self.verifier, self.drafter, self.decode = verifier, drafter, decode
        self.exact: Exact = exact
        self.rule: AcceptanceRule = rule
        self.lossless = lossless
        self.scheduler = Scheduler(verifier, exact)
        self.policy = Policy()
        self._guarded = GuardedDrafter(drafter, verifier.vocab_size, verifier.verifies_device_draft)
        self._is_plain = isinstance(drafter, NoDrafter)
        self._adaptive = self._guarded.adaptive  # the policy decides whether it is asked
        self._ids = itertools.count()
        # A device computes the next forward while the host is busy with the rest of a step.
        self._launches_ahead = device_of(verifier.runner.device).is_gpu
        self._in_flight: InFlightStep | None = None
        if self._adaptive and not verifier.fixed_shape:  # there every forward costs the same
            self.policy.costs.survey(verifier.timed_forward, verifier.max_context)

    # -------------------------------------------------------------------------------- the step

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Advances every running sequence by at least one token; returns them, ended ones too."""
        step, self._in_flight = self._in_flight or self._launch(), None
        if step is None:
            return []
        step.timer.resume()
        verdict, draft = accept(
            step.draft, step.output, step.batch, self.rule, lossless=self.lossless
        )
        self.verifier.commit(draft, verdict)
        step.timer.lap("verify")
        if step.asked:
            self._learn(step, draft, verdict)
        kept = self.scheduler.update(step.batch, verdict, step.output)
        for sequence in step.batch.sequences:
            if sequence.finish_reason is not None:
                self.release(sequence)
        step.timer.lap("other")
        try:
            if self._launches_ahead:
                self._in_flight = self._launch()
        finally:  # whatever becomes of the next forward, this step is complete
            self._record(step, draft, verdict, kept)
        if self._in_flight is not None:
            self._guarded.idle_work()
            self._in_flight.timer.pause()
        return list(step.batch.sequences)

    def _launch(self) -> InFlightStep | None:
        """Schedules, proposes and forwards; on a device the forward is then still under way."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        proposed: Draft | None = None
        draft: Draft | DeviceDraft = Draft.root_only([s.tokens[-1] for s in batch.sequences])
        timer, asked = StepTimer(), not self._is_plain and self._is_asked(batch)
        if asked:
            batch = self._with_drafting(batch)
            proposed, draft = self._propose(batch)
        timer.lap("draft")
        output = self.verifier.forward(batch, draft)
        timer.lap("verify")
        return InFlightStep(batch, timer, proposed, draft, output, asked)

    def _is_asked(self, batch: Batch) -> bool:
        """Whether the drafter is asked for a draft now."""
        if self._guarded.gave_up or not any(batch.max_depths):
            return False
        if not self._adaptive:
            return True
        self.policy.begin(batch)
        return self.policy.asks(len(batch.sequences), self._guarded.expected_offer)

    def _with_drafting(self, batch: Batch) -> Batch:
        """The batch with what a drafter needs: a sampler, and what a step costs."""
        sampler = RecordedDraftSampler(
            batch.sequences, batch.max_depths, self.verifier.vocab_size, self.exact
        )
        return replace(batch, sampler=sampler, step_cost=self.policy.begin(batch))

    def _propose(self, batch: Batch) -> tuple[Draft | None, Draft | DeviceDraft]:
        """What the drafter proposes with confidence, and the part of its draft that is verified."""
        proposed = self._guarded.propose(batch)
        if proposed is None:
            self.policy.note_no_draft()
            return None, Draft.root_only(batch.roots)
        if isinstance(proposed, DeviceDraft):
            self._adaptive = self._adaptive or proposed.trees is not None
            return None, proposed
        draft = self._within_limits(proposed, batch)
        if draft.confidence is None:
            return None, draft
        self._adaptive = True
        if self.verifier.fixed_shape:
            return draft, draft  # the forward is padded anyway: these nodes cost nothing
        return draft, self.policy.part_to_verify(draft)

    def _within_limits(self, draft: Draft, batch: Batch) -> Draft:
        """Cuts what is deeper than max_depth, or more than a forward takes; in replay all branches:
        their KV entries lie elsewhere than a chain's, and a sum in another order is another sum."""
        kept = []
        for b, max_depth in enumerate(batch.max_depths):
            parents = draft.parents[b][: draft.num_nodes[b]]
            depths = tree.depths(parents)
            nodes = [node for node, depth in enumerate(depths) if depth <= max_depth]
            nodes = nodes[: self.verifier.max_nodes]
            kept.append(tree.first_child_chain(parents, nodes) if self.verifier.fixed_shape else nodes)
        return draft.subset(kept)

    def _learn(self, step: InFlightStep, draft: Draft, verdict: Verdict) -> None:
        """The drafter hears what became of the draft. The wait for a verdict was also one for the
        trees, where a device built them."""
        if isinstance(step.draft, DeviceDraft) and step.draft.timer is not None:
            step.timer.move("verify", "draft", step.draft.timer.laps()[-1])
        self._guarded.learn(step.batch, draft, step.output, verdict)
        step.timer.lap("draft")

    def _record(self, step: InFlightStep, draft: Draft, verdict: Verdict, kept: list[int]) -> None:
        """Counts the step in each sequence's stats, and lets the policy observe it."""
        timer, width = step.timer, len(draft.tokens[0])
        for b, sequence in enumerate(step.batch.sequences):
            depths = tree.depths(draft.parents[b][: draft.num_nodes[b]])[1:] if width > 1 else []
            sequence.stats.add_step(depths, kept[b], width, timer.seconds["verify"])
            timer.add_to(sequence.stats)
        if self._is_plain:
            return
        unseen = isinstance(step.draft, DeviceDraft) and step.draft.trees is not None
        self.policy.observe(
            step.batch,
            verdict,
            draft if unseen else step.proposed,
            Spent(timer.cost("draft"), timer.cost("verify")),
            width=1 if self.verifier.fixed_shape else width,
            asked=step.asked and self._adaptive,
            unseen=unseen,
        )

    # ------------------------------------------------------------------- requests in and out

    def add(self, request: Request) -> list[SequenceState]:
        """Queues a request; one sequence for each of its n samples."""
        sequences = [
            SequenceState(
                request=request,
                id=next(self._ids),
                sample=sample,
                rng_key=rng_key(request.seed, sample),
                tokens=list(request.prompt),
                detokenizer=Detokenizer(self.decode, request.params.stops),
                stats=Stats(prompt_tokens=len(request.prompt)),
            )
            for sample in range(request.params.n)
        ]
        self.scheduler.add(sequences)
        return sequences

    def release(self, sequence: SequenceState) -> None:
        """Frees what a sequence holds, whether it has ended or is given up."""
        sequence.detokenizer.flush()
        if self._in_flight is not None and sequence in self._in_flight.batch.sequences:
            # Slots move: the forward under way is discarded and done again. It reads its inputs
            # until it has finished.
            self._in_flight = None
            self.verifier.runner.synchronize()
        if self.scheduler.remove(sequence):
            self._guarded.release(sequence)

    def explain(self) -> list[str]:
        """Why it drafted as it did, a sentence each."""
        if self._is_plain:
            return ["plain decoding: the drafter is 'none'"]
        return [*self.policy.reasons(), *self._guarded.explain()]
