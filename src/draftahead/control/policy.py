"""How much to draft now, and when not to.

A drafted step is worth its tokens over its time. The time of a pass is a staircase of its rows, so
for each width the likeliest nodes that fill it are taken, and the width with the most tokens a
second wins; width 1 is plain decoding. Times are those that this machine showed, likelihoods those
that the drafter's claims turned out to be worth. One rule for chains, trees and batches.

A guard keeps the account: where drafting has cost more than it gave, it pauses, and tries again
after a while, longer each time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftahead.control.promises import Offer
from draftahead.control.rates import BINS, Calibration, Usual
from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.core.types import RunningBatch, Verdict

SLOPE = 0.03  # what a row is thought to add to a pass of one, before it was seen
SURVEY_WARM_UP = 1.0  # seconds that a first pass of each width may take in all, at the start
SURVEY = 0.4  # and measuring them
SURVEY_TURNS = 4
SURVEYED_KEYS = 1024
WARM_UP = 3  # passes of a width of which the quickest counts
PACE, WIDTH = 0.15, 0.05  # of a surprise: laid to the machine's pace, and to the width
LOSS = 0.01  # of the run's time that drafting may cost before it pauses
GRACE = 0.5  # of a pass, on top: one guess that fails is no reason
FAILS = 3  # nor are so many at first, if they cost no more than so many passes together
ENOUGH = 32  # drafts after which it is known what a drafter usually has to offer
LOOK_IN = 64  # steps after which it is asked all the same
CREDIT = 3.0  # passes of gain that can make up for a loss: what was long ago does not count
PAUSE, LONGEST_PAUSE = 16, 1024  # steps


class Costs:
    """Seconds of a pass by the rows it scores and the keys it reads, and of drafting.

    A shared machine is slower in one minute than in the next, for every width alike: most of a
    surprise is laid to the minute, the rest to the width.
    """

    def __init__(self) -> None:
        self._pace = 1.0
        self._shape: dict[int, float] = {}  # by rows, at that pace, keys aside
        self._widths: list[int] = []  # the same rows, in order
        self._seen: dict[int, int] = {}
        self._a_key = self._a_row_and_key = 0.0  # reading it once, and its share in each row
        self._texts, self._keys = 1, 0
        self.drafting = 0.0  # a step
        self._drafts = 0

    def survey(
        self, timed: Callable[[int, int], float], room: int, *, compiles: bool = True
    ) -> None:
        """Measures this machine before the first step: `timed(rows, keys)` runs a pass over so many
        rows behind so many keys, no more than `room`. What there is no time for is seen later.
        `compiles`: a first pass of a width may compile or record something."""
        keys = min(SURVEYED_KEYS, room)
        places = [(1, 0), (8, 0), (1, keys), (8, keys), (16, 0), (4, 0), (2, 0)]
        start = time.perf_counter()
        warm = [] if compiles else places
        for place in places if compiles else ():  # a first pass tells nothing
            timed(*place)
            warm.append(place)
            if time.perf_counter() - start > SURVEY_WARM_UP:
                break
        # Turn by turn, and the quickest of each: what a busy machine does meanwhile should not
        # fall on one width.
        start = time.perf_counter()
        taken: dict[tuple[int, int], float] = {}
        for place in warm * SURVEY_TURNS:
            if time.perf_counter() - start > SURVEY:
                break
            taken[place] = min(taken.get(place, math.inf), timed(*place))
        for (rows, behind), seconds in taken.items():
            if not behind:
                self._shape[rows], self._seen[rows] = seconds, WARM_UP
        self._widths = sorted(self._shape)
        if (8, keys) in taken and keys:
            one = max(0.0, taken[1, keys] - taken[1, 0]) / keys
            eight = max(0.0, taken[8, keys] - taken[8, 0]) / keys
            self._a_row_and_key = max(0.0, eight - one) / 7
            self._a_key = max(0.0, one - self._a_row_and_key)

    def situate(self, texts: int, keys: int) -> None:
        """The batch that passes are for now: how many texts, and the keys of all of them."""
        self._texts, self._keys = texts, keys

    def note_pass(self, rows: int, seconds: float) -> None:
        if seconds <= 0:
            return
        self._seen[rows] = self._seen.get(rows, 0) + 1
        if self._seen[rows] <= WARM_UP:
            bare = max(0.1 * seconds, seconds - self._pace * self._attending(rows))
            # Fewer rows take no longer, unless something else happened meanwhile.
            known = [seconds for n, seconds in self._shape.items() if n >= rows]
            self._shape[rows] = min(bare / self._pace, *known, math.inf)
            self._widths = sorted(self._shape)
            return
        surprise = min(4.0, max(0.25, seconds / self.of(rows)))
        self._pace *= surprise**PACE
        self._shape[rows] *= surprise**WIDTH

    def note_drafting(self, seconds: float, *, rested: bool = False) -> float:
        """Returns the usual price of it: a drafter that reads a prompt for the first time, or has
        `rested` and makes up for it, takes longer."""
        self._drafts += 1
        if self._drafts <= WARM_UP:
            self.drafting = min(seconds, self.drafting or seconds)
        else:
            usual = min(seconds, self.drafting if rested else 3 * self.drafting)
            self.drafting = 0.8 * self.drafting + 0.2 * usual
        return self.drafting

    def of(self, rows: int) -> float:
        """For this many rows of the batch as it is now."""
        return self._pace * (self._bare(rows) + self._attending(rows))

    def _attending(self, rows: int) -> float:
        return self._keys * (self._a_key + self._a_row_and_key * rows / self._texts)

    def _bare(self, rows: int) -> float:
        """As seen, or on the line between its neighbours; beyond them by the first opinion."""
        shape = self._shape
        if rows in shape:
            return shape[rows]
        widths, at = self._widths, bisect(self._widths, rows)
        if 0 < at < len(widths):
            below, above = widths[at - 1], widths[at]
            share = (rows - below) / (above - below)
            return (1 - share) * shape[below] + share * shape[above]
        near = widths[min(at, len(widths) - 1)] if widths else 1
        return shape.get(near, 1.0) * (1 + SLOPE * (rows - 1)) / (1 + SLOPE * (near - 1))

    def curve(self) -> dict[int, float]:
        """Seconds by rows, for what has been seen or measured."""
        return {rows: self.of(rows) for rows in sorted(self._shape)}


@dataclass
class Guard:
    """The account of what drafting gave and cost, in seconds against plain decoding."""

    balance: float = 0.0  # since the last pause began
    run: float = 0.0  # likewise
    dearest: float = 0.0  # what a drafted step took beyond a pass, at most; likewise
    pause: int = PAUSE
    steps_left: int = 0  # of a pause
    pauses: int = 0

    def note(self, seconds: float, plain_seconds: float, *, a_pass: float, drafted: bool) -> None:
        """A step, and what plain decoding would have taken for its tokens, and for one pass."""
        self.run += seconds
        if not drafted or self.steps_left:  # or on its way when the pause began
            return
        self.balance = min(self.balance + plain_seconds - seconds, CREDIT * a_pass)
        self.dearest = max(self.dearest, seconds - a_pass)
        # A drafter that is mostly right may begin with the opposite; after a pause it may not.
        dear = FAILS * self.dearest if self.pause == PAUSE else 0.0
        grace = max(GRACE * a_pass, dear if dear < FAILS * a_pass else 0.0)
        if self.balance < -LOSS * self.run - grace:
            self.steps_left, self.pauses = self.pause, self.pauses + 1
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            # What is lost is lost; a probe is judged by itself.
            self.balance = self.run = self.dearest = 0.0
        elif self.balance > 0:
            self.pause = PAUSE

    def closed(self) -> bool:
        """Whether this step decodes plainly."""
        if self.steps_left:
            self.steps_left -= 1
            return True
        return False


@dataclass
class Tally:
    """What became of the steps, for whoever asks why."""

    widths: Counter[int] = field(default_factory=Counter)  # nodes of a text that a pass scored
    paused: int = 0  # the guard had drafting off
    nothing: int = 0  # the drafter had no guess
    hopeless: int = 0  # it was not asked: its usual guesses would not pay
    declined: int = 0  # it had, and no width promised more than one
    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0  # what these tokens would have taken without, at the going rate


@dataclass
class Policy:
    costs: Costs = field(default_factory=Costs)
    calibration: Calibration = field(default_factory=Calibration)
    guard: Guard = field(default_factory=Guard)
    tally: Tally = field(default_factory=Tally)
    usual: Usual = field(default_factory=Usual)  # worth of a text's best nodes
    idle: int = 0  # steps since the drafter was last asked
    rested: bool = False  # it was not asked at the last step

    # ---------------------------------------------------------------- what the engine calls

    def begin(self, batch: RunningBatch) -> Costs:
        """The batch that costs are for from now on."""
        self.costs.situate(len(batch.sequences), sum(len(s.tokens) for s in batch.sequences))
        return self.costs

    def part_to_verify(self, draft: Draft) -> Draft:
        """The nodes that are worth verifying, by the drafter's confidence."""
        worths = self._worths(draft)
        width = self.width(worths)
        self.tally.declined += width == 1
        return draft.subset([tree.most_confident(row, width - 1) for row in worths])

    def note_no_draft(self) -> None:
        self.tally.nothing += 1

    def observe(
        self,
        batch: RunningBatch,
        verdict: Verdict,
        proposed: Draft | None,
        spent: Spent,
        *,
        width: int,
        asked: bool,
        unseen: bool,
    ) -> None:
        """A step: what the drafter `proposed` with confidence, the nodes per sequence that were
        verified (`width`), and its seconds. `asked`: the drafter was, and it is adaptive. `unseen`:
        the draft was verified as a device built it."""
        confidence = []
        if proposed is not None and proposed.confidence is not None:
            for b, emitted in enumerate(verdict.tokens):
                size = proposed.num_nodes[b]
                tokens, parents = proposed.tokens[b][:size], proposed.parents[b][:size]
                outcomes = tree.match_emitted(tokens, parents, emitted)[1:]
                pairs = zip(proposed.confidence[b], outcomes, strict=True)
                confidence += [(stated, came) for stated, came in pairs if came is not None]
            if unseen:
                self.note_usual([sorted(row, reverse=True) for row in self._worths(proposed)])
        self.begin(batch)  # a next step may be under way, for other sequences
        tokens_emitted = sum(map(len, verdict.tokens))
        self.note(len(batch.sequences), width, tokens_emitted, spent, confidence, asked=asked)

    def _worths(self, draft: Draft) -> list[list[float]]:
        assert draft.confidence is not None
        return [self.worth(*row) for row in zip(draft.confidence, draft.parents, strict=True)]

    # --------------------------------------------------------------------------- decisions

    def asks(self, texts: int, expected_offer: Offer | None = None) -> bool:
        """Whether to ask the drafter at all: not while the guard has it paused, nor where even its
        usual guesses could not pay for their rows and its time; then only now and then. `hope`:
        what it could offer besides."""
        if self.guard.closed():
            self.tally.paused += 1
            return False
        self.idle += 1
        if self.usual.known >= ENOUGH and self.idle < LOOK_IN:
            offers = [Offer(self.usual, self.costs.drafting), expected_offer]
            if not any(self._could_pay(texts, offer) for offer in offers if offer):
                self.tally.hopeless += 1
                return False
        self.idle = 0
        return True

    def _could_pay(self, texts: int, offer: Offer) -> bool:
        tokens, plain = 1.0, self.costs.of(texts)
        for width, worth in enumerate(offer.usual.by_rank, start=2):
            tokens += worth
            if tokens * plain > self.costs.of(texts * width) + offer.drafting:
                return True
        return False

    def worth(self, confidence: Sequence[float], parents: Sequence[int]) -> list[float]:
        """What claims of nodes turned out to be worth, none more than its parent's."""
        found = [1.0]
        for node, claim in enumerate(confidence, start=1):
            found.append(min(self.calibration(claim), found[parents[node]]))
        return found[1:]

    def width(self, worths: Sequence[Sequence[float]]) -> int:
        """How many rows a text to score. `worths` [b]: of each drafted node, that it is reached and
        right, none likelier than its parent; a pass is as wide as its widest text. What drafting
        took is spent already, and no reason to waste it."""
        texts = len(worths)
        ranked = [sorted(row, reverse=True) for row in worths]
        self.note_usual(ranked)
        best, best_rate = 1, texts / self.costs.of(texts)
        for width in range(2, 2 + max(map(len, ranked), default=0)):
            gain = texts + sum(sum(row[: width - 1]) for row in ranked)
            rate = gain / self.costs.of(texts * width)
            if rate > best_rate:
                best, best_rate = width, rate
        return best

    def note_usual(self, ranked: Sequence[Sequence[float]]) -> None:
        """What drafts had to offer: worths of a text's nodes, the best first."""
        for row in ranked:
            self.usual.note(row)

    def note(
        self, texts: int, width: int, tokens: int, spent: Spent, confidence: Claims, *, asked: bool
    ) -> None:
        """A step: its time, its tokens, and of every drafted node whether it was kept. `asked`: the
        drafter was, and its time counts, also where none of its guesses was taken."""
        self.costs.note_pass(texts * width, spent.passing)
        drafting = 0.0
        if asked:
            drafting = self.costs.note_drafting(spent.drafting, rested=self.rested)
        self.rested = not asked
        for claim, came_true in confidence:
            self.calibration.note(claim, came_true)
        # By the usual times: what else the machine did meanwhile is no fault of the drafter's.
        a_pass, taken = self.costs.of(texts), self.costs.of(texts * width) + drafting
        plain = tokens / texts * a_pass
        self.guard.note(taken, plain, a_pass=a_pass, drafted=asked)
        self.tally.widths[width] += 1
        self.tally.tokens += tokens
        self.tally.seconds += taken
        self.tally.plain_seconds += plain

    def reasons(self) -> list[str]:
        """Why it drafted as it did, in words."""
        curve = self.costs.curve()
        if not curve or not self.tally.widths:
            return ["nothing has been decoded yet"]
        steps, tally = sum(self.tally.widths.values()), self.tally
        rows = [n for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= max(curve)]
        times = ", ".join(f"{1e3 * self.costs.of(n):.1f}" for n in rows)
        found = [
            f"a forward pass over {', '.join(map(str, rows))} tokens takes {times} ms here, "
            f"drafting {1e3 * self.costs.drafting:.1f} ms per step"
        ]
        worth = self.calibration.rates.seen()
        if worth:
            said = (
                f"{bin_ / BINS:.1f}-{(bin_ + 1) / BINS:.1f} {share:.0%}"
                for bin_, (share, _) in sorted(worth.items())
            )
            found.append("calibration, predicted and actual acceptance: " + ", ".join(said))
        widths = ", ".join(f"{n} in {count}" for n, count in sorted(tally.widths.items()))
        found.append(f"{steps} steps; tokens verified per sequence: {widths}")
        plainly = (
            (tally.nothing, "the drafter had no draft"),
            (tally.hopeless, "drafts of the usual confidence would not pay"),
            (tally.declined, "no drafted token was expected to pay for its verification"),
            (
                tally.paused,
                f"drafting was paused ({self.guard.pauses}x) after it had cost "
                f"more than {LOSS:.0%} of the time",
            ),
        )
        found += [f"{count} steps without drafting: {why}" for count, why in plainly if count]
        speed = tally.plain_seconds / tally.seconds if tally.seconds else 1.0
        found.append(f"{tally.tokens / steps:.2f} tokens per step; estimated speed-up {speed:.2f}x")
        return found


class Spent(NamedTuple):
    """Seconds of a step."""

    drafting: float
    passing: float


Claims = Sequence[tuple[float, bool]]  # how likely a node was said to be, and whether it was kept
