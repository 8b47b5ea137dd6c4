"""Suffix matching (after SuffixDecoding, Oliaro et al., arXiv 2411.04975): a tree of what followed
the longest suffix of the sequence that has occurred before, in it or, if asked, in earlier outputs.

Earlier outputs are used only within a namespace that the request names, and only if the drafter
keeps them (`shared_tokens`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from draftahead.core.checks import whole
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceView, Verdict
from draftahead.drafters.base import DrafterContext
from draftahead.drafters.candidates import CandidateDrafter
from draftahead.drafters.registry import register
from draftahead.drafters.suffix.automaton import (
    AutomatonCursor,
    Match,
    MatchRates,
    SharedCorpus,
    SuffixAutomaton,
    SuffixNode,
    build_tree,
)
from draftahead.errors import ConfigError

# Last tokens of a sequence that are matched again when the shared automaton was rebuilt. More find
# longer matches.
REMATCHED_TOKENS = 64


class SequenceIndex:
    """The automaton of one running sequence, and its place in the shared one."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.shared: SuffixAutomaton | None = None
        self.cursor = AutomatonCursor()

    def extend(self, tokens: Sequence[int], shared: SuffixAutomaton | None) -> list[Match]:
        """Adds the new tokens; returns the matches of the sequence's suffixes."""
        if shared is not None and shared is not self.shared:  # rebuilt
            self.shared, self.cursor = shared, AutomatonCursor()
            for token in tokens[max(0, self.own.size - REMATCHED_TOKENS) : self.own.size]:
                self.cursor.advance(shared, token)
        for token in tokens[self.own.size :]:
            self.own.extend(token)
            if shared is not None:
                self.cursor.advance(shared, token)
        found = [Match(self.own, *match, True) for match in self.own.repeated_suffixes()]
        if shared is not None:
            suffixes = shared.suffixes(self.cursor.state, self.cursor.length)
            found += [Match(shared, *match, False) for match in suffixes]
        return found


@register("suffix")
class Suffix(CandidateDrafter[Match]):
    """Drafts what followed the longest matching suffix."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> None:
        super().__init__(num_speculative_tokens)
        shared_tokens = whole(0, note="0 is off").of("shared_tokens", shared_tokens)
        self.vocab_size = context.vocab_size
        self.corpus = SharedCorpus(shared_tokens) if shared_tokens else None
        self.rates = MatchRates()
        self._indexes: dict[int, SequenceIndex] = {}  # by sequence

    def candidates(self, sequence: SequenceView, max_depth: int) -> list[SuffixNode]:
        index = self._indexes.setdefault(sequence.id, SequenceIndex())
        namespace, shared = sequence.namespace, None
        if namespace is not None and self.corpus is not None:
            shared = self.corpus.automaton(namespace)
        matches = index.extend(sequence.tokens, shared)
        return build_tree(matches, self.rates, self.max_nodes, max_depth)

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        """Notes the outcome of the most confident child of every accepted node."""
        for sequence, emitted in zip(batch.sequences, verdict.tokens, strict=True):
            best: dict[int, tuple[SuffixNode, bool]] = {}  # by parent
            for node, accepted in self.outcomes(sequence, emitted):
                if node.parent not in best or node.confidence > best[node.parent][0].confidence:
                    best[node.parent] = node, accepted
            for node, accepted in best.values():
                self.rates.note(node.source.length - 1, accepted)  # of the match without the node

    def release(self, sequence: SequenceView) -> None:
        super().release(sequence)
        self._indexes.pop(sequence.id, None)
        if self.corpus is not None and sequence.namespace is not None:
            self.corpus.add(sequence.namespace, sequence.output)

    # ------------------------------------------------------------------------ earlier outputs

    def save(self, file: str | Path) -> None:
        """Writes the shared corpus, one text per line."""
        lines = [
            json.dumps({"namespace": name, "vocab_size": self.vocab_size, "tokens": text}) + "\n"
            for name, text in self._shared_corpus().texts
        ]
        Path(file).write_text("".join(lines), "utf-8")

    def load(self, file: str | Path) -> None:
        """Adds what `save` wrote, by a drafter of the same vocabulary."""
        corpus = self._shared_corpus()
        for number, line in enumerate(Path(file).read_text("utf-8").splitlines(), start=1):
            try:
                entry = json.loads(line)
                namespace = str(entry["namespace"])
                tokens = [int(token) for token in entry["tokens"]]
                fits = entry["vocab_size"] == self.vocab_size
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: no saved text ({error})") from None
            if not fits or not all(0 <= token < self.vocab_size for token in tokens):
                raise ConfigError(f"{file}, line {number}: of another vocabulary")
            corpus.add(namespace, tokens)

    def _shared_corpus(self) -> SharedCorpus:
        if self.corpus is None:
            raise ConfigError("this drafter shares nothing: give it shared_tokens")
        return self.corpus
