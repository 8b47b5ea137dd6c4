"""Texts as suffix automata (Blumer et al. 1985): what followed an end of a text, and how often.

An automaton grows with its text, in constant time a token on average. Its newest state links to the
longest end that occurred earlier; the transitions from there are all that ever followed it, and the
number of their occurrences says how likely each one is. Of these, and of what is known of earlier
texts, the most promising nodes become a tree: the longer the match, the deeper it goes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftahead.control.rates import Rates

LONGEST_MATCH = 16  # longer ones are as sure
LEAST = 0.02  # likelihood below which a guess is not worth its row
MATCHES = 4  # ends of the text that have a say about the next token
WIDEST = 3  # children of a node
COUNTED = 64  # states whose occurrences are brought up to date with a token
BREAK = -1  # between two texts that share an automaton


class SuffixAutomaton:
    """All substrings of a growing text. State 0 is the empty one."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = 0
        self.size = 0  # tokens so far

    def extend(self, token: int) -> None:
        state = self._new({}, self.length[self.last] + 1)
        at = self.last
        while at != -1 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        if at == -1:
            self.link[state] = 0
        else:
            found = self.next[at][token]
            if self.length[at] + 1 == self.length[found]:
                self.link[state] = found
            else:
                self.link[state] = self._split(at, token, found)
        self.last, self.size = state, self.size + 1
        for _ in range(COUNTED):  # every state on the way to the root occurs once more
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def _new(self, transitions: dict[int, int], length: int) -> int:
        self.next.append(transitions)
        self.link.append(0)
        self.length.append(length)
        self.count.append(0)
        return len(self.next) - 1

    def _split(self, at: int, token: int, found: int) -> int:
        """The shorter strings of a state part from it once they occur where the others do not."""
        clone = self._new(dict(self.next[found]), self.length[at] + 1)
        self.link[clone], self.count[clone] = self.link[found], self.count[found]
        while at != -1 and self.next[at].get(token) == found:
            self.next[at][token] = clone
            at = self.link[at]
        self.link[found] = clone
        return clone

    def shorter(self, state: int, length: int) -> list[tuple[int, int]]:
        """(state, length) of a match of this length in a state, and of its ends that lie in other
        states, the longest first; as many as have a say."""
        found: list[tuple[int, int]] = []
        while state > 0 and len(found) < MATCHES:
            found.append((state, min(length, self.length[state])))
            state = self.link[state]
        return found

    def matches(self) -> list[tuple[int, int]]:
        """Of the ends of this very text that occurred earlier in it."""
        state = self.link[self.last]
        return self.shorter(state, self.length[state])


class Cursor:
    """The longest end of a growing text that occurs in another one."""

    def __init__(self) -> None:
        self.state = self.length = 0

    def advance(self, text: SuffixAutomaton, token: int) -> None:
        self._settle(text)
        while self.state and token not in text.next[self.state]:
            self.state = text.link[self.state]
            self.length = text.length[self.state]
        if token in text.next[self.state]:
            self.state, self.length = text.next[self.state][token], self.length + 1
        self._settle(text)

    def _settle(self, text: SuffixAutomaton) -> None:
        """A state may have been split since: its shorter strings are elsewhere now."""
        while self.state and self.length <= text.length[text.link[self.state]]:
            self.state = text.link[self.state]


class Trust:
    """How often a guess after a match of some length turned out right, lately."""

    def __init__(self) -> None:
        # Short matches deceive, long ones hardly ever do.
        self._rates: Rates[int] = Rates(lambda length: length / (length + 2), worth=8.0, fade=0.97)

    def __getitem__(self, length: int) -> float:
        return self._rates[min(length, LONGEST_MATCH)]

    def note(self, length: int, was_right: bool) -> None:
        self._rates.note(min(length, LONGEST_MATCH), was_right)


@dataclass
class Node:
    """A guess."""

    token: int
    parent: int
    depth: int
    text: SuffixAutomaton  # that knows it
    state: int  # where that one stands behind it
    length: int  # of the match that speaks for it
    likely: float  # that it is reached and right


class Match(NamedTuple):
    """An end of the text that is being continued, found in that text or in another."""

    text: SuffixAutomaton
    state: int
    length: int
    in_itself: bool  # then one of its occurrences is the end itself, with nothing behind it yet


def grow(matches: Iterable[Match], trust: Trust, most: int, room: int) -> list[Node]:
    """The likeliest nodes below the root, at most `most`, no deeper than `room`; parents first.

    At the root every match has a say, the longer ones first: what one of them leaves open by its
    trust, the next one shares out. Below, each node goes on in the text that it came from.
    """
    offered: dict[int, Node] = {}
    rest = 1.0
    for match in sorted(matches, key=lambda match: -match.length)[:MATCHES]:
        text, state, length, in_itself = match
        for token, then, share in followers(text, state, is_end=in_itself):
            likely = rest * trust[length] * share
            if token in offered:
                offered[token].likely += likely
            else:
                offered[token] = Node(token, 0, 1, text, then, length, likely)
        rest *= 1 - trust[length]
    order = itertools.count()  # the older of two equals first
    heap = [(-node.likely, next(order), node) for node in offered.values()]
    heapq.heapify(heap)
    chosen: list[Node] = []
    while heap and len(chosen) < most:
        node = heapq.heappop(heap)[2]
        if node.likely < LEAST:
            break
        chosen.append(node)
        if node.depth == room:
            continue
        length = node.length + 1
        for token, then, share in followers(node.text, node.state):
            likely = node.likely * trust[length] * share
            child = Node(token, len(chosen), node.depth + 1, node.text, then, length, likely)
            heapq.heappush(heap, (-likely, next(order), child))
    return chosen


def followers(
    text: SuffixAutomaton, state: int, *, is_end: bool = False
) -> list[tuple[int, int, float]]:
    """(token, state, share) of what followed a state's strings. The end of the text itself has no
    follower yet: there, what followed the longest of its ends that has one. So a text that goes
    round is continued round."""
    while state and not text.next[state]:
        state, is_end = text.link[state], True
    total = max(1, text.count[state] - is_end)
    known = text.next[state].items()
    found = [(token, then, text.count[then] / total) for token, then in known if token != BREAK]
    if len(found) == 1:  # as mostly
        return found
    return heapq.nlargest(WIDEST, found, key=lambda item: item[2])


class Store:
    """Earlier outputs by scope, bounded in tokens: the texts longest unused go first."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._texts: OrderedDict[tuple[str, int], tuple[int, ...]] = OrderedDict()
        self._number = itertools.count()
        self._automata: dict[str, SuffixAutomaton] = {}
        self.tokens = 0

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        text = tuple(tokens[: self.most_tokens])
        if not text:
            return
        self._texts[scope, next(self._number)] = text
        self.tokens += len(text)
        if self.tokens > self.most_tokens:
            self._evict()
        elif scope in self._automata:
            _append(self._automata[scope], text)

    def _evict(self) -> None:
        """Down to half: an automaton cannot forget, so it is made anew, and not too often."""
        while self.tokens > self.most_tokens // 2 and len(self._texts) > 1:
            _, text = self._texts.popitem(last=False)
            self.tokens -= len(text)
        self._automata.clear()

    def of(self, scope: str) -> SuffixAutomaton:
        """All that is kept of a scope, one text after another."""
        if scope not in self._automata:
            found = self._automata[scope] = SuffixAutomaton()
            for (owner, _), text in self._texts.items():
                if owner == scope:
                    _append(found, text)
        return self._automata[scope]

    def texts(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(scope, text) for (scope, _), text in self._texts.items()]


def _append(automaton: SuffixAutomaton, text: Sequence[int]) -> None:
    for token in (*text, BREAK):
        automaton.extend(token)
