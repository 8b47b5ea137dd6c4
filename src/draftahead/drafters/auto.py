"""Several drafters behind one, each used where it is good.

The cheap ones (`suffix`, and `recycle` where there is no head) are asked at every step, and their
trees are laid over each other: what both propose is likelier, and what one is sure of leaves little
for the other's guesses. A draft model is asked as well if one is given, else a trained head if one
comes with the model: wherever its guesses have lately been worth the time it takes beyond what the
cheap ones promise.

On a GPU a head grows its trees while the host asks the others, and nobody waits to lay them over
each other: either its trees or theirs are scored.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from draftahead.control.promises import TRIES, Costly, Offer, Promise, Unseen
from draftahead.control.rates import Calibration, Usual
from draftahead.core import tree as core_tree
from draftahead.core.device import device_of
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceView, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, as_built, check_draft, positive_int
from draftahead.drafters.registry import build, register
from draftahead.errors import ConfigError, DrafterFaultWarning

MOST = 15  # guesses to choose from


@dataclass
class Guess:
    """A node of the merged tree."""

    token: int
    parent: int
    depth: int
    names: tuple[str, ...]  # who proposes it
    claim: float  # that it is reached and right, as they say
    worth: float = 0.0  # and as such claims of theirs turned out


class Sent(NamedTuple):
    """Trees under way that were taken, and what the others promised."""

    draft: DeviceDraft
    others: Promise


class Lesson(NamedTuple):
    """What became of a step."""

    verdict: Verdict
    draft: Draft  # that was scored
    built: Draft  # by a device, before it was cut to that
    sent: Sent | None
    trees: list[list[Guess]]  # of the others, by row


@register("auto")
class Auto(Drafter):
    """Merges several drafters, and asks expensive ones where they pay."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        model: Any = None,
        head: Any = None,
        shared_tokens: int = 0,
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.most = positive_int("num_speculative_tokens", num_speculative_tokens, default=MOST)
        self.cheap: dict[str, Drafter] = {
            "suffix": build({"method": "suffix", "shared_tokens": shared_tokens}, context),
            "recycle": build({"method": "recycle", "shared": shared_tokens > 0}, context),
        }
        if model is not None and head is not None:
            raise ConfigError("give auto a 'model' or a 'head' to draft with, not both")
        self._aside: dict[str, Drafter] = {}  # not needed while there is a head
        self.other: Drafter | None = None  # the one that takes its time
        self.name = ""
        self.costly = Costly()
        self.unseen: Unseen | None = None
        if model is not None:
            self.name = "draft_model"
            self.other = build({"method": "draft_model", "model": model}, context)
        elif head is not None or context.head is not None:
            self.name = "eagle"
            self.other = build({"method": "eagle", "model": head or context.head}, context)
            self._place_head(context, asked=head is not None)
        self.vocabulary = context.vocab_size
        self._scored: Counter[str] = Counter()  # guesses, by who proposed them
        self._kept: Counter[str] = Counter()
        self._calibrations: defaultdict[tuple[str, ...], Calibration] = defaultdict(Calibration)
        self._trees: list[list[Guess]] = []  # of the step under way, by row
        self._sent: Sent | None = None  # and what a device grows for it
        self._lesson: Lesson | None = None  # to be learnt while a device is busy
        self._together = Usual()  # what trees were worth where the costly one was asked

    @property
    def expected_offer(self) -> Offer | None:
        """What the policy, who sees what is proposed mostly without it, cannot know."""
        known = self.other is not None and self._together.known >= TRIES
        return Offer(self._together, self.costly.seconds) if known else None

    def _place_head(self, context: DrafterContext, *, asked: bool) -> None:
        drafts_on_device = bool(getattr(self.other, "drafts_on_device", False))
        if not device_of(context.device).is_cpu and not drafts_on_device and not asked:
            self.other = None  # level by level it would take longer than the target
            return
        # What it knows a head knows better, and a row has its price.
        self._aside = {"recycle": self.cheap.pop("recycle")}
        if drafts_on_device:
            self.costly = self.unseen = Unseen()

    # ------------------------------------------------------------------------------ proposing

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        self._trees, self._sent = [], None
        ahead = self._sent_ahead(batch)
        drafts = {name: self._ask(name, drafter, batch) for name, drafter in [*self.cheap.items()]}
        self._trees = self._merged(drafts, batch)
        others = promised(self._trees, batch)
        if self.unseen is not None:
            self.unseen.note_others(others)
        if ahead is not None and self.unseen is not None:
            if self.unseen.wins(batch, others, ahead.width):
                self._sent = Sent(ahead, others)
                return ahead
        # A number of guesses that was asked for is made up whatever it takes.
        elif self.other and (not self.adaptive or self._pays(batch, others)):
            start = time.perf_counter()
            drafts[self.name] = self._ask(self.name, self.other, batch)
            seconds = time.perf_counter() - start
            self._trees = self._merged(drafts, batch)
            self._note_together(self._trees)
            self.costly.note(seconds, others, promised(self._trees, batch), len(batch.sequences))
        trees = [[(guess.token, guess.parent) for guess in tree] for tree in self._trees]
        if not any(trees):
            return None
        confidence = [[guess.worth for guess in tree] for tree in self._trees]
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def _pays(self, batch: Batch, others: Promise) -> bool:
        return self.unseen is None and self.costly.pays(batch, others)

    def _sent_ahead(self, batch: Batch) -> DeviceDraft | None:
        """Trees that a device grows from now on, if that pays."""
        head: Any = self.other
        if self.unseen is None or not self.adaptive or not self.unseen.is_sent(batch):
            return None
        try:
            return head.launch(batch)  # type: ignore[no-any-return]
        except Exception as fault:
            self._leave_out(self.name, fault)
            return None

    def _ask(self, name: str, drafter: Drafter, batch: Batch) -> Draft | None:
        """One that fails is left out from then on; the others go on."""
        try:
            draft = drafter.propose(batch)
            if isinstance(draft, DeviceDraft):
                draft, _ = draft.to_host()
            if draft is not None:
                check_draft(draft, batch, self.vocabulary)
            return draft
        except Exception as fault:
            self._leave_out(name, fault)
            return None

    def _leave_out(self, name: str, fault: Exception) -> None:
        if self.cheap.pop(name, None) is None:
            self.other = self.unseen = None
            self.cheap |= self._aside
            self._aside = {}
        said = f"drafter {name} failed and is left out: {type(fault).__name__}: {fault}"
        warnings.warn(said, DrafterFaultWarning, stacklevel=2)

    def _merged(self, drafts: dict[str, Draft | None], batch: Batch) -> list[list[Guess]]:
        return [
            self._chosen(union({name: d for name, d in drafts.items() if d is not None}, row))
            for row in range(len(batch.sequences))
        ]

    def _chosen(self, guesses: list[Guess], most: int | None = None) -> list[Guess]:
        """The likeliest of them, parents first, each worth what such guesses turned out to be."""
        left = [1.0]  # by node: what its children can still claim
        for guess in guesses:
            said = self._calibrations[guess.names](guess.claim)
            left.append(min(said, left[guess.parent]))
        # Of siblings the likelier has the first say; together they are no likelier than one.
        worth = list(left)
        for index in sorted(range(1, len(worth)), key=lambda i: (guesses[i - 1].depth, -worth[i])):
            parent = guesses[index - 1].parent
            left[index] = worth[index] = min(worth[index], left[parent])
            left[parent] -= worth[index]
        ranked = sorted(range(1, len(worth)), key=lambda i: (-worth[i], i))[: most or self.most]
        place, chosen = {0: 0}, list[Guess]()
        for index in sorted(ranked):
            guess = guesses[index - 1]
            if guess.parent in place:
                place[index] = len(chosen) + 1
                parent = place[guess.parent]
                guess.parent, guess.worth = parent, worth[index]
                chosen.append(guess)
        return chosen

    # ------------------------------------------------------------------------------- learning

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        for name, drafter in [*self.cheap.items()]:
            try:
                drafter.learn(batch, draft, output, verdict)
            except Exception as fault:
                self._leave_out(name, fault)
        self.idle_work()
        built = draft if self._sent is None else as_built(self._sent.draft, draft)
        self._lesson = Lesson(verdict, draft, built, self._sent, self._trees)
        if self.unseen is None:  # else the device is sent its next trees first
            self.idle_work()

    def idle_work(self) -> None:
        """What is not needed for the next guesses."""
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        verdict, draft, built, sent, trees = lesson
        if sent is not None and self.unseen is not None:
            self._note_sent(sent, built, draft, verdict)
        scored = draft if sent is None else None
        for row, tree in enumerate(trees):
            self._note(tree, verdict.tokens[row], len(verdict.paths[row]) - 1, scored, row)

    def _note_sent(self, sent: Sent, built: Draft, draft: Draft, verdict: Verdict) -> None:
        """Of trees that a device grew: what they promised, as such claims turned out to be worth,
        tells more than the few guesses that came true."""
        head: Any = self.other
        assert self.unseen is not None and head is not None and sent.draft.timer is not None
        head.observe(sent.draft, built)
        width, texts = built.width, len(verdict.paths)
        worth = 0.0
        for row, said in enumerate(verdict.tokens):
            guesses = self._chosen(union({self.name: built}, row), most=width)
            self._note_together([guesses])
            worth += sum(guess.worth for guess in guesses)
            self._note(guesses, said, len(verdict.paths[row]) - 1, draft, row)
        seconds = sent.draft.timer.laps()[0]
        self.unseen.note_worth(seconds, sent.others, worth / texts, width, texts)

    def _note_together(self, trees: list[list[Guess]]) -> None:
        for tree in trees:
            self._together.note(sorted((guess.worth for guess in tree), reverse=True))

    def _note(
        self, tree: list[Guess], said: list[int], kept: int, draft: Draft | None, row: int
    ) -> None:
        """Of one row's guesses, scored or not, whether they came true; and of those that are part
        of the `draft` whose they were."""
        scored = set() if draft is None else paths(draft, row)
        came: list[bool | None] = [True]
        walked: list[tuple[int, ...]] = [()]
        for guess in tree:
            before, index = came[guess.parent], guess.depth - 1
            known = before is not True or index < len(said)
            now = before and said[index] == guess.token if known else None
            came.append(now)
            walked.append((*walked[guess.parent], guess.token))
            if now is not None:  # what lies beyond the target's own token is not known
                self._calibrations[guess.names].note(guess.claim, now)
            if walked[-1] in scored:
                label = "+".join(guess.names)
                self._scored[label] += 1
                self._kept[label] += bool(now) and guess.depth <= kept

    def explain(self) -> list[str]:
        """Whose guesses were taken."""
        by_name = [
            f"{name} {self._kept[name]}/{scored}" for name, scored in self._scored.most_common()
        ]
        found = (
            [f"accepted/verified drafted tokens by drafter: {', '.join(by_name)}"]
            if by_name
            else []
        )
        if self.other:
            found.append(
                f"{self.name} drafted {self.costly.asked} times, recently in "
                f"{1e3 * self.costly.seconds:.1f} ms; expected extra accepted tokens: "
                f"{self.costly.reasons()}"
            )
        return found

    def release(self, sequence: SequenceView) -> None:
        everyone = [*self.cheap.items()]
        if self.other:
            everyone.append((self.name, self.other))
        for name, drafter in everyone:
            try:
                drafter.release(sequence)
            except Exception as fault:
                self._leave_out(name, fault)


def promised(trees: Sequence[Sequence[Guess]], batch: Batch) -> Promise:
    best = Promise(0.0, 0.0, 1)
    if batch.step_cost is None:
        return best
    texts = len(trees)
    ranked = [sorted((guess.worth for guess in tree), reverse=True) for tree in trees]
    right = 0.0  # guesses of all texts, of the likeliest so many
    for width, worths in enumerate([(0.0,), *zip_longest(*ranked, fillvalue=0.0)], start=1):
        right += sum(worths)
        rate = (texts + right) / batch.step_cost.of(texts * width)
        if rate > best.rate:
            best = Promise(rate, right / texts, width)
    return best


def union(drafts: dict[str, Draft], row: int) -> list[Guess]:
    """All nodes of some trees, each path once, parents first."""
    found: list[Guess] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> index of the node
    for name, draft in drafts.items():
        place = [0]
        for node in range(1, draft.num_nodes[row]):
            parent, token = place[draft.parents[row][node]], draft.tokens[row][node]
            claim = draft.confidence[row][node - 1] if draft.confidence else 0.5
            index = known.get((parent, token))
            if index is None:
                depth = found[parent - 1].depth + 1 if parent else 1
                found.append(Guess(token, parent, depth, (name,), claim))
                index = known[parent, token] = len(found)
            elif name not in (guess := found[index - 1]).names:
                guess.names = (*guess.names, name)
                guess.claim = 1 - (1 - guess.claim) * (1 - claim)
            place.append(index)
    return found


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to every node."""
    size = draft.num_nodes[row]
    return set(core_tree.paths(draft.tokens[row][:size], draft.parents[row][:size]))
