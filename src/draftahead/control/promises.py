"""Whether a drafter that takes its time is worth asking: by what it brought where it was asked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from draftahead.control.rates import Usual
from draftahead.core.types import Batch

TRIES = 4  # texts after which a costly drafter is known well enough to be judged
AT_FIRST = 16  # and where the others know little: that is what it is there for
RETRY, LONGEST_RETRY = 16, 1024  # steps until it is tried again
RECENT = 0.1  # share of the newest step in what is thought of it
CHANGE = 0.3  # and in what the others promise: a text that repeats itself may stop at any moment
HOPE = 1.3  # it is sent unless others promise so many times as much: one can still choose then
A_KIND, MUCH = 0.5, 2.0  # guesses of others that tell situations apart, and the most of them


class Promise(NamedTuple):
    """What the best width of some trees promises."""

    rate: float  # tokens a second
    gain: float  # guesses of a text that come true
    width: int  # nodes a text


class Offer(NamedTuple):
    """Guesses that a drafter usually has, and the seconds it takes for them."""

    usual: Usual
    drafting: float


@dataclass
class Patience:
    """How long one that did not pay is left alone: longer each time. One try tells little: so when
    it is time for another, then for a few."""

    retry: int = RETRY
    idle: int = 0
    tries: int = 0  # left of the few

    def reset(self) -> None:
        self.retry, self.tries = RETRY, 0

    def is_over(self) -> bool:
        """One more step without it; whether it is time for another try."""
        if self.tries:
            self.tries -= 1
            return True
        self.idle += 1
        if self.idle < self.retry:
            return False
        self.idle, self.retry = 0, min(2 * self.retry, LONGEST_RETRY)
        self.tries = TRIES - 1
        return True


@dataclass
class Situation:
    """What asking brought where the others promised about as much."""

    asked: int = 0  # texts
    more: float = 0.0  # guesses of a text that come true beyond the others'
    width: float = 1.0  # nodes a text that are scored then
    patience: Patience = field(default_factory=Patience)

    def note(self, texts: int, more: float, width: float) -> None:
        self.asked += texts  # a batch tells as much as so many steps
        share = max(RECENT, texts / self.asked)
        self.more += share * (more - self.more)
        self.width += share * (width - self.width)


@dataclass
class Costly:
    """What a drafter that takes its time is worth: as it was lately, where it was asked.

    It adds most where the others know little, so that is told apart. What counts is what claims
    turned out to be worth, not what came true in a step: a guess that was not worth its row may
    have been right as well.
    """

    asked: int = 0
    seconds: float = 0.0  # a step
    passed_over: bool = False  # since it was last asked
    situations: defaultdict[int, Situation] = field(default_factory=lambda: defaultdict(Situation))

    def pays(self, batch: Batch, others: Promise) -> bool:
        """Whether to ask now, beside what the others promise."""
        now = self.situations[kind_of(others)]
        if batch.step_cost is None or now.asked < _tries(others):
            return True
        texts = len(batch.sequences)
        seconds = batch.step_cost.of(round(texts * now.width)) + self.seconds
        if texts * (1 + others.gain + now.more) / seconds > others.rate:
            now.patience.reset()
            return True
        if now.patience.is_over():
            return True
        self.passed_over = True
        return False

    def note(self, seconds: float, others: Promise, together: Promise, texts: int = 1) -> None:
        self._note_time(seconds)
        more = together.gain - others.gain
        self.situations[kind_of(others)].note(texts, more, together.width)

    def _note_time(self, seconds: float) -> None:
        # The first time, and after a while without it, it has much to read: no price of a step.
        most = self.seconds if self.passed_over else 2 * self.seconds
        usual = min(seconds, most) if self.asked > 1 else seconds
        self.seconds += (1.0 if self.asked <= 1 else RECENT) * (usual - self.seconds)
        self.asked, self.passed_over = self.asked + 1, False

    def reasons(self) -> str:
        found = [
            f"{now.more:.2f} where the others expected {kind * A_KIND:.1f}"
            for kind, now in sorted(self.situations.items())
            if now.asked
        ]
        return ", ".join(found) or "nothing yet"


@dataclass
class Unseen(Costly):
    """The same for one that works on a device while the others are asked, and whose trees nobody
    sees before they are scored. It is sent off before it is known what the others promise, and
    then its trees or theirs are taken."""

    without: float = 0.0  # tokens a second that the others promise, lately
    patience: Patience = field(default_factory=Patience)
    is_tried: bool = False  # once more, although it did not pay

    def is_sent(self, batch: Batch) -> bool:
        """Whether to send it off now."""
        self.is_tried = False
        if batch.step_cost is None or self.asked < AT_FIRST:
            return True
        texts = len(batch.sequences)
        # Where the others know little, which is where it is needed.
        usual = max(self.situations.values(), key=lambda now: now.asked)
        seconds = batch.step_cost.of(round(texts * usual.width)) + self.seconds
        if HOPE * texts * (1 + usual.more) / seconds > self.without:
            self.patience.reset()
            return True
        self.is_tried = self.patience.is_over()
        return self.is_tried

    def note_others(self, others: Promise) -> None:
        """At every step, whether it was sent off or not."""
        share = CHANGE if self.without else 1.0
        self.without += share * (others.rate - self.without)

    def wins(self, batch: Batch, others: Promise, width: int) -> bool:
        """Whether its trees are taken, now that they are on their way."""
        now = self.situations[kind_of(others)]
        if batch.step_cost is None or now.asked < _tries(others) or self.is_tried:
            return True
        texts = len(batch.sequences)
        if texts * (1 + now.more) / batch.step_cost.of(texts * width) > others.rate:
            now.patience.reset()
            return True
        return now.patience.is_over()

    def note_worth(
        self, seconds: float, others: Promise, worth: float, width: int, texts: int
    ) -> None:
        """Its trees were taken, and looked as if so many guesses of a text would come true."""
        self._note_time(seconds)
        self.situations[kind_of(others)].note(texts, worth, width)

    def reasons(self) -> str:
        return super().reasons().replace("guesses more", "right guesses")


def kind_of(others: Promise) -> int:
    return int(min(others.gain, MUCH) / A_KIND)


def _tries(others: Promise) -> int:
    return TRIES if kind_of(others) else AT_FIRST
