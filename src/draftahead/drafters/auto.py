"""Several drafters behind one, each used where it is good.

The cheap ones (`suffix`, `recycle`) are asked at every step, and their trees are laid over each
other: what both propose is likelier, and what one is sure of leaves little for the other's guesses.
A draft model is asked as well if one is given, else a trained head if one comes with the model:
wherever its guesses have lately been worth the time it takes beyond what the cheap ones promise.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftahead.drafters import Drafter, Setting, build, check, positive, register
from draftahead.errors import ConfigError, DrafterFaultWarning
from draftahead.rates import Calibration
from draftahead.types import Batch, Draft, Scores, Sequence, Verdict

MOST = 15  # guesses to choose from
TRIES = 4  # texts after which a costly drafter is known well enough to be judged
RETRY, LONGEST_RETRY = 16, 1024  # steps until it is tried again
RECENT = 0.1  # share of the newest step in what is thought of it
A_KIND, MUCH = 0.5, 2.0  # guesses of others that tell situations apart, and the most of them


@dataclass
class Guess:
    """A node of the merged tree."""

    token: int
    parent: int
    depth: int
    names: tuple[str, ...]  # who proposes it
    claim: float  # that it is reached and right, as they say
    worth: float = 0.0  # and as such claims of theirs turned out


class Promise(NamedTuple):
    """What the best width of some trees promises."""

    rate: float  # tokens a second
    gain: float  # guesses of a text that come true
    width: int  # nodes a text


@dataclass
class Situation:
    """What asking brought where the others promised about as much."""

    asked: int = 0  # texts
    more: float = 0.0  # guesses of a text that come true beyond the others'
    width: float = 1.0  # nodes a text that are scored then
    retry: int = RETRY
    idle: int = 0


@dataclass
class Costly:
    """What a drafter that takes its time is worth: as it was lately, where it was asked.

    It adds most where the others know little, so that is told apart. What counts is what claims
    turned out to be worth, not what came true in a step: a guess that was not worth its row may
    have been right as well.
    """

    name: str
    drafter: Drafter
    asked: int = 0
    seconds: float = 0.0  # a step
    situations: defaultdict[int, Situation] = field(default_factory=lambda: defaultdict(Situation))

    def pays(self, batch: Batch, others: Promise) -> bool:
        """Whether to ask now, beside what the others promise."""
        now = self.situations[kind_of(others)]
        if batch.price is None or now.asked < TRIES:
            return True
        texts = len(batch.sequences)
        seconds = batch.price.of(round(texts * now.width)) + self.seconds
        if texts * (1 + others.gain + now.more) / seconds > others.rate:
            now.retry = RETRY
            return True
        now.idle += 1
        if now.idle >= now.retry:
            now.idle, now.retry = 0, min(2 * now.retry, LONGEST_RETRY)
            return True
        return False

    def note(self, seconds: float, others: Promise, together: Promise, texts: int = 1) -> None:
        # The first time, and after a while without it, it has much to read: no price of a step.
        usual = min(seconds, 2 * self.seconds) if self.asked > 1 else seconds
        self.seconds += (1.0 if self.asked <= 1 else RECENT) * (usual - self.seconds)
        self.asked += 1
        now = self.situations[kind_of(others)]
        now.asked += texts  # a batch tells as much as so many steps
        share = max(RECENT, texts / now.asked)
        now.more += share * (together.gain - others.gain - now.more)
        now.width += share * (together.width - now.width)


def kind_of(others: Promise) -> int:
    return int(min(others.gain, MUCH) / A_KIND)


@register("auto")
class Auto(Drafter):
    def __init__(
        self,
        setting: Setting,
        *,
        num_speculative_tokens: int | None = None,
        model: Any = None,
        head: Any = None,
        shared_tokens: int = 0,
    ) -> None:
        self.guided = num_speculative_tokens is None
        self.most = positive("num_speculative_tokens", num_speculative_tokens, default=MOST)
        self.cheap: dict[str, Drafter] = {
            "suffix": build({"method": "suffix", "shared_tokens": shared_tokens}, setting),
            "recycle": build({"method": "recycle", "shared": shared_tokens > 0}, setting),
        }
        self.costly: Costly | None = None
        if model is not None and head is not None:
            raise ConfigError("give auto a 'model' or a 'head' to draft with, not both")
        # On a GPU a head's passes are not recorded, and would take longer than the target's.
        if head is None and model is None and setting.device.type == "cpu":
            head = setting.head
        if model is not None:
            drafter = build({"method": "draft_model", "model": model}, setting)
            self.costly = Costly("draft_model", drafter)
        elif head is not None:
            self.costly = Costly("eagle", build({"method": "eagle", "model": head}, setting))
        self.vocabulary = setting.vocabulary
        self._scored: Counter[str] = Counter()  # guesses, by who proposed them
        self._kept: Counter[str] = Counter()
        self._calibrations: defaultdict[tuple[str, ...], Calibration] = defaultdict(Calibration)
        self._trees: list[list[Guess]] = []  # of the step under way, by row

    # ------------------------------------------------------------------------------ proposing

    def propose(self, batch: Batch) -> Draft | None:
        self._trees = []
        drafts = {name: self._ask(name, drafter, batch) for name, drafter in [*self.cheap.items()]}
        self._trees = self._merged(drafts, batch)
        # A number of guesses that was asked for is made up whatever it takes.
        others = promised(self._trees, batch)
        if self.costly and (not self.guided or self.costly.pays(batch, others)):
            start, costly = time.perf_counter(), self.costly
            drafts[costly.name] = self._ask(costly.name, costly.drafter, batch)
            seconds = time.perf_counter() - start
            self._trees = self._merged(drafts, batch)
            costly.note(seconds, others, promised(self._trees, batch), len(batch.sequences))
        trees = [[(guess.token, guess.parent) for guess in tree] for tree in self._trees]
        if not any(trees):
            return None
        claims = [[guess.worth for guess in tree] for tree in self._trees]
        return Draft.trees(batch.roots, trees, claims if self.guided else None)

    def _ask(self, name: str, drafter: Drafter, batch: Batch) -> Draft | None:
        """One that fails is left out from then on; the others go on."""
        try:
            draft = drafter.propose(batch)
            if draft is not None:
                check(draft, batch, self.vocabulary)
            return draft
        except Exception as fault:
            self._leave_out(name, fault)
            return None

    def _leave_out(self, name: str, fault: Exception) -> None:
        if self.cheap.pop(name, None) is None:
            self.costly = None
        said = f"drafter {name} failed and is left out: {type(fault).__name__}: {fault}"
        warnings.warn(said, DrafterFaultWarning, stacklevel=2)

    def _merged(self, drafts: dict[str, Draft | None], batch: Batch) -> list[list[Guess]]:
        return [
            self._chosen(union({name: d for name, d in drafts.items() if d is not None}, row))
            for row in range(len(batch.sequences))
        ]

    def _chosen(self, guesses: list[Guess]) -> list[Guess]:
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
        ranked = sorted(range(1, len(worth)), key=lambda i: (-worth[i], i))[: self.most]
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

    def learn(self, batch: Batch, verdict: Verdict, scores: Scores) -> None:
        for name, drafter in [*self.cheap.items()]:
            try:
                drafter.learn(batch, verdict, scores)
            except Exception as fault:
                self._leave_out(name, fault)
        for row, tree in enumerate(self._trees):
            self._note(tree, verdict.tokens[row], len(verdict.paths[row]) - 1, scores.draft, row)

    def _note(
        self, tree: list[Guess], said: list[int], kept: int, draft: Draft | None, row: int
    ) -> None:
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

    def reasons(self) -> list[str]:
        """Whose guesses were taken."""
        by_name = [
            f"{name} {self._kept[name]} of {scored}" for name, scored in self._scored.most_common()
        ]
        found = [f"guesses kept, by who proposed them: {', '.join(by_name)}"] if by_name else []
        if self.costly:
            found.append(
                f"{self.costly.name} was asked {self.costly.asked} times, lately for "
                f"{1e3 * self.costly.seconds:.1f} ms; it brought {self._more_by_kind()}"
            )
        return found

    def _more_by_kind(self) -> str:
        assert self.costly is not None
        found = [
            f"{now.more:.2f} guesses more where the others promised {kind * A_KIND:.1f}"
            for kind, now in sorted(self.costly.situations.items())
            if now.asked
        ]
        return ", ".join(found) or "nothing yet"

    def release(self, sequence: Sequence) -> None:
        everyone = [*self.cheap.items()]
        if self.costly:
            everyone.append((self.costly.name, self.costly.drafter))
        for name, drafter in everyone:
            try:
                drafter.release(sequence)
            except Exception as fault:
                self._leave_out(name, fault)


def promised(trees: Seq[Seq[Guess]], batch: Batch) -> Promise:
    best = Promise(0.0, 0.0, 1)
    if batch.price is None:
        return best
    texts = len(trees)
    ranked = [sorted((guess.worth for guess in tree), reverse=True) for tree in trees]
    for width in range(1, 2 + max(map(len, ranked), default=0)):
        gain = sum(sum(row[: width - 1]) for row in ranked) / texts
        rate = texts * (1 + gain) / batch.price.of(texts * width)
        if rate > best.rate:
            best = Promise(rate, gain, width)
    return best


def union(drafts: dict[str, Draft], row: int) -> list[Guess]:
    """All nodes of some trees, each path once, parents first."""
    found: list[Guess] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> index of the node
    for name, draft in drafts.items():
        place = [0]
        for node in range(1, draft.sizes[row]):
            parent, token = place[draft.above[row][node]], draft.rows[row][node]
            claim = draft.claims[row][node - 1] if draft.claims else 0.5
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
    found: list[tuple[int, ...]] = [()]
    for node in range(1, draft.sizes[row]):
        found.append((*found[draft.above[row][node]], draft.rows[row][node]))
    return set(found)
