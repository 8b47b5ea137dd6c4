"""Suffix matching (after SuffixDecoding, Oliaro et al., arXiv 2411.04975): a tree of what followed
the longest end of this text that has occurred before, in it or, if asked, in earlier outputs.

Earlier outputs are used only where both sides agree: the drafter has room for them
(`shared_tokens`), and the request names a scope. A text drafts for its own scope alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from draftahead.core.types import Batch, Draft, ForwardOutput, SequenceState, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.registry import register
from draftahead.drafters.suffix.automaton import (
    Cursor,
    Match,
    Node,
    Store,
    SuffixAutomaton,
    Trust,
    grow,
)
from draftahead.errors import ConfigError

MOST = 15  # guesses to choose from
AGAIN = 64  # tokens to read again in a store that was made anew


class Reading:
    """What the drafter knows of one running text."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.shared: SuffixAutomaton | None = None
        self.cursor = Cursor()
        self.draft: list[Node] = []

    def read(self, tokens: list[int], shared: SuffixAutomaton | None) -> list[Match]:
        """Takes in what is new; returns all matches of the text's end."""
        if shared is not None and shared is not self.shared:  # made anew: find the place again
            self.shared, self.cursor = shared, Cursor()
            for token in tokens[max(0, self.own.size - AGAIN) : self.own.size]:
                self.cursor.advance(shared, token)
        for token in tokens[self.own.size :]:
            self.own.extend(token)
            if shared is not None:
                self.cursor.advance(shared, token)
        found = [Match(self.own, *match, True) for match in self.own.matches()]
        if shared is not None:
            places = shared.shorter(self.cursor.state, self.cursor.length)
            found += [Match(shared, *match, False) for match in places]
        return found


@register("suffix")
class Suffix(Drafter):
    def __init__(
        self,
        setting: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> None:
        """Without a number of guesses, the policy takes as many as pay."""
        self.adaptive = num_speculative_tokens is None
        self.most = positive("num_speculative_tokens", num_speculative_tokens, default=MOST)
        if not isinstance(shared_tokens, int) or shared_tokens < 0:
            raise ConfigError(f"shared_tokens must be 0 (off) or more, not {shared_tokens!r}")
        self.vocabulary = setting.vocabulary
        self.store = Store(shared_tokens) if shared_tokens else None
        self.trust = Trust()
        self._readings: dict[int, Reading] = {}  # by sequence

    def propose(self, batch: Batch) -> Draft | None:
        trees, confidence = [], []
        for sequence, room in zip(batch.sequences, batch.max_depths, strict=True):
            reading = self._readings.setdefault(sequence.id, Reading())
            scope = sequence.request.scope
            shared = None if scope is None or self.store is None else self.store.of(scope)
            matches = reading.read(sequence.tokens, shared)
            reading.draft = grow(matches, self.trust, self.most, room) if room else []
            trees.append([(node.token, node.parent) for node in reading.draft])
            confidence.append([node.likely for node in reading.draft])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def learn(self, batch: Batch, verdict: Verdict, scores: ForwardOutput) -> None:
        """At each node that the walk reached, the likeliest child was right or was not."""
        for sequence, said in zip(batch.sequences, verdict.tokens, strict=True):
            reading = self._readings.get(sequence.id)
            nodes, at = reading.draft if reading else [], 0
            for token in said:
                children = [(i, n) for i, n in enumerate(nodes, start=1) if n.parent == at]
                if not children:
                    break
                best = max(children, key=lambda item: item[1].likely)[1]
                self.trust.note(best.length, best.token == token)
                at = next((i for i, n in children if n.token == token), -1)
                if at == -1:
                    break

    def release(self, sequence: SequenceState) -> None:
        self._readings.pop(sequence.id, None)
        if self.store is not None and sequence.request.scope is not None:
            self.store.add(sequence.request.scope, sequence.output)

    # ------------------------------------------------------------------------ earlier outputs

    def save(self, file: str | Path) -> None:
        """Writes what is shared, one text a line."""
        if self.store is None:
            raise ConfigError("this drafter shares nothing: give it shared_tokens")
        lines = [
            json.dumps({"scope": scope, "vocabulary": self.vocabulary, "tokens": text})
            for scope, text in self.store.texts()
        ]
        Path(file).write_text("".join(line + "\n" for line in lines), "utf-8")

    def load(self, file: str | Path) -> None:
        """Adds what `save` wrote, by a drafter of the same vocabulary."""
        if self.store is None:
            raise ConfigError("this drafter shares nothing: give it shared_tokens")
        for number, line in enumerate(Path(file).read_text("utf-8").splitlines(), start=1):
            try:
                entry = json.loads(line)
                scope, tokens = str(entry["scope"]), [int(token) for token in entry["tokens"]]
                fits = entry["vocabulary"] == self.vocabulary
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: no saved text ({error})") from None
            if not fits or not all(0 <= token < self.vocabulary for token in tokens):
                raise ConfigError(f"{file}, line {number}: of another vocabulary")
            self.store.add(scope, tokens)
