"""Suffix automata of texts (Blumer et al. 1985): which tokens followed a suffix, and how often.

An automaton grows with its text, in constant time per token on average. Its newest state links to
the longest suffix that occurred earlier; the transitions from there are all that ever followed it,
and their counts say how likely each one is. From these, and from earlier outputs, the most
confident nodes become a tree: the longer the match, the deeper it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from draftahead.control.rates import Rates
from draftahead.core import tree
from draftahead.drafters.base import MIN_CONFIDENCE
from draftahead.drafters.candidates import CandidateNode

LONGEST_MATCH = 16  # longer matches count as this long: they are equally reliable
# Suffixes of the text, the longest first, that vote on the next token. More of them find more
# alternatives where the longest one is rare.
MAX_MATCHES = 4
MAX_CHILDREN = 3  # of a node
# States whose counts are updated per token. Fewer leave the counts of short suffixes too low; all
# of them would cost the length of the text where it repeats one token.
MAX_COUNTED = 64
SEPARATOR = -1  # between two texts that share an automaton


class SuffixAutomaton:
    """All substrings of a growing text. State 0 is the empty one."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = self.size = 0  # state of the whole text; tokens so far

    def extend(self, token: int) -> None:
        state = self._new({}, self.length[self.last] + 1)
        suffix = self.last
        while suffix != -1 and token not in self.next[suffix]:
            self.next[suffix][token] = state
            suffix = self.link[suffix]
        if suffix != -1:
            longer = self.next[suffix][token]
            is_longest = self.length[suffix] + 1 == self.length[longer]
            self.link[state] = longer if is_longest else self._split(suffix, token, longer)
        self.last, self.size = state, self.size + 1
        for _ in range(MAX_COUNTED):  # all suffixes occur once more
            self.count[state] += 1
            state = self.link[state]
            if state <= 0:
                break

    def _new(self, transitions: dict[int, int], length: int) -> int:
        self.next.append(transitions)
        self.link.append(0)
        self.length.append(length)
        self.count.append(0)
        return len(self.next) - 1

    def _split(self, suffix: int, token: int, longer: int) -> int:
        """Moves the shorter strings of a state to a new state, once they occur where the longer
        ones do not."""
        clone = self._new(dict(self.next[longer]), self.length[suffix] + 1)
        self.link[clone], self.count[clone] = self.link[longer], self.count[longer]
        while suffix != -1 and self.next[suffix].get(token) == longer:
            self.next[suffix][token] = clone
            suffix = self.link[suffix]
        self.link[longer] = clone
        return clone

    def suffixes(self, state: int, length: int) -> list[tuple[int, int]]:
        """(state, length) of a match and of its suffixes in other states: the MAX_MATCHES longest,
        the longest first."""
        found: list[tuple[int, int]] = []
        while state > 0 and len(found) < MAX_MATCHES:
            found.append((state, min(length, self.length[state])))
            state = self.link[state]
        return found

    def repeated_suffixes(self) -> list[tuple[int, int]]:
        """The same for the suffixes of this very text that occurred earlier in it."""
        state = self.link[self.last]
        return self.suffixes(state, self.length[state])


class AutomatonCursor:
    """The longest suffix of a growing text that occurs in another one."""

    def __init__(self) -> None:
        self.state = self.length = 0

    def advance(self, automaton: SuffixAutomaton, token: int) -> None:
        self._normalize(automaton)
        while self.state and token not in automaton.next[self.state]:
            self.state = automaton.link[self.state]
            self.length = automaton.length[self.state]
        if token in automaton.next[self.state]:
            self.state, self.length = automaton.next[self.state][token], self.length + 1
        self._normalize(automaton)

    def _normalize(self, automaton: SuffixAutomaton) -> None:
        """The state may have been split since: then its shorter strings are in its link."""
        while self.state and self.length <= automaton.length[automaton.link[self.state]]:
            self.state = automaton.link[self.state]


# ---------------------------------------------------------------------------------- the tree


class MatchRates:
    """How often a candidate after a match of some length was accepted, recently."""

    def __init__(self) -> None:
        # Short matches are often wrong, long ones hardly ever.
        self._rates: Rates[int] = Rates(
            lambda length: length / (length + 2), prior_weight=8.0, decay=0.97
        )

    def __getitem__(self, length: int) -> float:
        return self._rates[min(length, LONGEST_MATCH)]

    def note(self, length: int, accepted: bool) -> None:
        self._rates.note(min(length, LONGEST_MATCH), accepted)


class Match(NamedTuple):
    """A suffix of the text that is being continued, found in that text or in another."""

    automaton: SuffixAutomaton
    state: int
    length: int
    # Found in the text itself: one occurrence is its current end, which has no next token yet.
    is_own: bool


SuffixNode = CandidateNode[Match]  # its source: the match that includes its own token


def build_tree(
    matches: Iterable[Match], rates: MatchRates, max_nodes: int, max_depth: int
) -> list[SuffixNode]:
    """The most confident nodes below the root, parents first.

    At the root every match votes, the longer ones first: a match distributes its acceptance rate,
    and leaves the rest of the probability to the next shorter one. Below, each node continues in
    the automaton that it came from.
    """

    def children(match: Match, parent: int, depth: int, confidence: float) -> Iterator[SuffixNode]:
        for token, state, share in followers(match.automaton, match.state, is_end=match.is_own):
            longer = Match(match.automaton, state, match.length + 1, False)
            reached = confidence * rates[match.length] * share
            yield CandidateNode(token, parent, depth, reached, longer)

    def expand(node: SuffixNode, index: int) -> Iterable[SuffixNode]:
        if node.depth == max_depth:
            return ()
        return children(node.source, index, node.depth + 1, node.confidence)

    roots: dict[int, SuffixNode] = {}
    rest = 1.0
    for match in sorted(matches, key=lambda match: -match.length)[:MAX_MATCHES]:
        for node in children(match, 0, 1, rest):
            if node.token in roots:
                roots[node.token].confidence += node.confidence
            else:
                roots[node.token] = node
        rest *= 1 - rates[match.length]
    return tree.best_first(roots.values(), expand, max_nodes, MIN_CONFIDENCE)


def followers(
    automaton: SuffixAutomaton, state: int, *, is_end: bool = False
) -> list[tuple[int, int, float]]:
    """(token, state, share) of the tokens that followed a state's strings. `is_end`: one of these
    occurrences is the end of the text, without a next token. A state without any next token is
    replaced by its longest suffix that has one, so that a periodic text is continued."""
    while state and not automaton.next[state]:
        state, is_end = automaton.link[state], True
    total = max(1, automaton.count[state] - is_end)
    shares = [
        # MAX_COUNTED leaves the counts of short strings too low: a follower may have a higher one.
        (token, next_state, min(1.0, automaton.count[next_state] / total))
        for token, next_state in automaton.next[state].items()
        if token != SEPARATOR
    ]
    return sorted(shares, key=lambda item: -item[2])[:MAX_CHILDREN]


# --------------------------------------------------------------------------- earlier outputs


class SharedCorpus:
    """Earlier outputs by namespace, bounded in tokens: the oldest are dropped first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self.texts: deque[tuple[str, tuple[int, ...]]] = deque()  # with the namespace of each
        self._automata: dict[str, SuffixAutomaton] = {}

    def add(self, namespace: str, tokens: Sequence[int]) -> None:
        text = tuple(tokens[: self.max_tokens])
        if not text:
            return
        self.texts.append((namespace, text))
        self.num_tokens += len(text)
        if self.num_tokens > self.max_tokens:
            # Down to half: an automaton cannot forget, so it is built anew, and not too often.
            while self.num_tokens > self.max_tokens // 2 and len(self.texts) > 1:
                self.num_tokens -= len(self.texts.popleft()[1])
            self._automata.clear()
        elif namespace in self._automata:
            _append(self._automata[namespace], text)

    def automaton(self, namespace: str) -> SuffixAutomaton:
        """All that is kept of a namespace, one text after another."""
        if namespace not in self._automata:
            automaton = self._automata[namespace] = SuffixAutomaton()
            for owner, text in self.texts:
                if owner == namespace:
                    _append(automaton, text)
        return self._automata[namespace]


def _append(automaton: SuffixAutomaton, text: Sequence[int]) -> None:
    for token in (*text, SEPARATOR):
        automaton.extend(token)
