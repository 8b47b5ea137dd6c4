"""An EAGLE-3 head drafts from the target's own states (Li et al., arXiv 2503.01840).

Asked for a number of guesses, it draws a chain of so many; asked for a `tree` of so many, it takes
the likeliest it finds. Left to itself it grows a tree as far as its time pays.

The target's states of every token lie in the target's cache. The head keeps keys of its own for the
pairs of a state and the token after it, and makes up at each step for those it lacks: what the
target accepted is fed again with the target's true states, in place of what the head had imagined.
So it can be skipped, switched off or faulty for a while and still be right the next time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead.backends.cpu.threads import one_thread
from draftahead.backends.cuda.layers import MOST_ROWS
from draftahead.control.rates import Usual
from draftahead.core import tree as trees
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.cuda import Plan
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.registry import register
from draftahead.drafters.tree_builder import CHILDREN, MAX_DEPTH, TreeBuilder, sampled_chain
from draftahead.errors import ConfigError
from draftahead.sampling.draft_sampler import scatter_to_vocab

A_LEVEL = 4  # nodes that a tree of a fixed size goes on from at each level
# On a GPU: levels of a tree, nodes of a level for all texts together, and sizes of what is scored.
AHEAD, ABREAST, SIZES = 6, 16, (2, 4, 8, 16, 32)
LOOK_AGAIN = 16  # trees after which the largest is tried again


@register("eagle", synonyms=("eagle3",))
class Eagle(Drafter):
    def __init__(
        self,
        context: DrafterContext,
        *,
        model: Any = None,
        num_speculative_tokens: int | None = None,
        tree: int | None = None,
    ) -> None:
        if tree is not None and num_speculative_tokens is not None:
            raise ConfigError("give eagle 'tree' or 'num_speculative_tokens', not both")
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=MAX_DEPTH)
        # Guesses of a tree that is scored as it is.
        self.tree = None if tree is None else positive("tree", tree)
        self.adaptive = num_speculative_tokens is None and tree is None
        self.grower = TreeBuilder(self.count) if tree is None else TreeBuilder(self.count, A_LEVEL)
        self.target = context.target_runner("eagle")
        self.head = _head(model if model is not None else context.head, self.target.model)
        self.target.capture_hidden(self.head.config.depths)
        nodes = max(self.grower.max_expanded, 1 + self.count)
        self.runner = EagleRunner(self.head, self.target, context.max_batch, nodes)
        whole = len(self.head.tokens) == self.target.vocab_size
        self._spoken = None if whole else self.head.tokens
        self._grown: DeviceDraft | None = None  # of the step under way, on a GPU
        # Of the trees there: likelihoods of the largest, by how large that is; seconds; and by
        # texts the best size.
        self._usual: defaultdict[int, Usual] = defaultdict(Usual)
        self._seconds = 0.0
        self._sizes: dict[int, int] = {}
        self._since = 0  # trees since one of the largest

    @property
    def drafts_on_device(self) -> bool:
        """Whether a device grows its trees without being waited for."""
        return self.runner.drafts_on_device

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        able = [len(sequence.tokens) > 1 for sequence in batch.sequences]  # a root and one before
        max_depths = [room if can else 0 for room, can in zip(batch.max_depths, able, strict=True)]
        if not any(max_depths):
            return None
        return self._ahead(batch, able) or self._grown_here(batch, able, max_depths)

    @one_thread()
    def _grown_here(self, batch: Batch, able: list[bool], max_depths: list[int]) -> Draft | None:
        if self.adaptive and self.runner.grows(batch, self.grower):
            return self.runner.grown(batch, able, self.grower, max_depths)
        self.runner.catch_up(batch.sequences, able)
        logits = self.runner.logits[:, 0]
        if self.adaptive:
            return self.grower.build(batch, logits, self._expand, max_depths, self._spoken)
        if self.tree is not None:
            free = dataclasses.replace(batch, step_cost=None)
            draft = self.grower.build(free, logits, self._expand, max_depths, self._spoken)
            return None if draft is None else _most_confident(draft, self.tree)
        going = None if all(max_depths) else torch.tensor([room > 0 for room in max_depths])
        logits = self._spread(logits)
        sampled_chain(batch, min(self.count, max(max_depths)), logits, None, self._feed, going)
        return None  # the dice hold the draft

    def launch(self, batch: Batch) -> DeviceDraft | None:
        """Trees that a device grows without being waited for, if it can."""
        able = [len(sequence.tokens) > 1 for sequence in batch.sequences]
        return self._ahead(batch, able) if any(able) else None

    def _ahead(self, batch: Batch, able: list[bool]) -> DeviceDraft | None:
        """On a GPU, where waiting for every level would cost more than the level."""
        plan = self._plan(batch)
        if plan is None or not self.runner.can_draft_on_device(batch, plan):
            return None
        self._grown = self.runner.ahead(batch, able, plan)
        return self._grown

    def _plan(self, batch: Batch) -> Plan | None:
        greedy = all(sequence.is_greedy for sequence in batch.sequences)
        if self.adaptive or self.tree is not None:
            size = self._size(batch) if self.tree is None else 1 + self.tree
            a_level = max(1, min(CHILDREN, ABREAST // len(batch.sequences)))
            plan = Plan(min(self.count, AHEAD), a_level, CHILDREN, size, not greedy)
            return plan if plan.guesses >= size - 1 else None
        # What is drawn needs its law.
        return Plan(self.count, 1, 1, 1 + self.count, False) if greedy else None

    def _size(self, batch: Batch) -> int:
        """Nodes of a text that usually make the most of a step."""
        texts, price = len(batch.sequences), batch.step_cost
        if self._since < LOOK_AGAIN and texts in self._sizes:
            return self._sizes[texts]
        largest = _largest(texts)
        usual = self._usual[largest]
        if price is None or self._since >= LOOK_AGAIN or not usual.known:
            return largest

        def rate(size: int) -> float:
            tokens = 1 + sum(usual.by_rank[: size - 1])
            return tokens / (self._seconds + price.of(texts * size))

        sizes = SIZES[: SIZES.index(largest) + 1]
        self._sizes[texts] = max(sizes, key=rate)
        return self._sizes[texts]

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        if self._grown is not None:
            self.observe(self._grown, draft)
        self._grown = None

    def observe(self, launched: DeviceDraft, draft: Draft) -> None:
        """Of trees that were grown ahead, and that the host has seen since."""
        if draft.confidence is None or launched.timer is None:
            return
        self._seconds = launched.timer.laps()[0]
        self._since += 1
        texts, size = len(draft.tokens), draft.width
        if size == _largest(texts):  # smaller ones do not tell what they left out
            for row in draft.confidence:
                self._usual[size].note(sorted(row, reverse=True))
            self._since = 0
            self._sizes.clear()

    def _expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.runner.go_on(tokens, parents)
        return self.runner.logits

    def _feed(self, tokens: Tensor) -> tuple[Tensor, None]:
        self.runner.append(tokens)
        return self._spread(self.runner.logits[:, -1]), None

    def _spread(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        if self._spoken is None:
            return logits
        return scatter_to_vocab(logits, self._spoken, self.target.vocab_size)


def _most_confident(draft: Draft, count: int) -> Draft:
    """The most confident nodes of each tree, without their confidence: verified as they are."""
    assert draft.confidence is not None
    part = draft.part([trees.most_confident(row, count) for row in draft.confidence])
    return dataclasses.replace(part, confidence=None)


def _largest(texts: int) -> int:
    """Of the sizes, what a pass for so many texts takes."""
    return max((size for size in SIZES if texts * size <= MOST_ROWS), default=SIZES[0])


def _head(wanted: Any, target: Any) -> EagleHead:
    if wanted is None:
        raise ConfigError("drafter 'eagle' needs 'model': the folder, file or hub id of its head")
    if isinstance(wanted, str | Path):
        return io.load(wanted, target)
    if not isinstance(wanted, EagleHead):
        raise ConfigError(f"drafter 'eagle': {wanted!r} is no EAGLE head and no path of one")
    io.check_fits(wanted.config, target, "this head")
    return copy.deepcopy(wanted)  # it will be changed
