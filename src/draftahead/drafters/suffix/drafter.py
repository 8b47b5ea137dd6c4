"""Suffix matching (after SuffixDecoding, Oliaro et al., arXiv 2411.04975): a tree of what followed
the longest suffix of the sequence that has occurred before, in it or, if asked, in earlier outputs.

Earlier outputs are used only where both sides agree: the drafter has room for them
(`shared_tokens`), and the request names a namespace. A text drafts for its own namespace alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceState, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive
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

MAX_NODES = 15  # drafted nodes, where the number is not asked for: what one forward takes cheaply
# Tokens that are matched again in a shared automaton that was built anew: more find longer matches,
# and LONGEST_MATCH of them would be enough but for texts that were dropped.
REMATCHED_TOKENS = 64


class SequenceIndex:
    """What the drafter knows of one running sequence."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.shared: SuffixAutomaton | None = None
        self.cursor = AutomatonCursor()
        self.draft: list[SuffixNode] = []

    def extend(self, tokens: list[int], shared: SuffixAutomaton | None) -> list[Match]:
        """Adds what is new; returns all matches of the sequence's end."""
        if shared is not None and shared is not self.shared:  # built anew: find the place again
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
class Suffix(Drafter):
    """Drafts what followed the longest matching suffix."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> None:
        """Without a number of tokens, the policy verifies as many as pay."""
        self.adaptive = num_speculative_tokens is None
        self.max_nodes = positive(
            "num_speculative_tokens", num_speculative_tokens, default=MAX_NODES
        )
        if not isinstance(shared_tokens, int) or shared_tokens < 0:
            raise ConfigError(f"shared_tokens must be 0 (off) or more, not {shared_tokens!r}")
        self.vocab_size = context.vocab_size
        self.corpus = SharedCorpus(shared_tokens) if shared_tokens else None
        self.rates = MatchRates()
        self._indexes: dict[int, SequenceIndex] = {}  # by sequence

    def propose(self, batch: Batch) -> Draft | None:
        trees, confidence = [], []
        for sequence, max_depth in zip(batch.sequences, batch.max_depths, strict=True):
            index = self._indexes.setdefault(sequence.id, SequenceIndex())
            namespace, shared = sequence.request.namespace, None
            if namespace is not None and self.corpus is not None:
                shared = self.corpus.automaton(namespace)
            matches = index.extend(sequence.tokens, shared)
            nodes = build_tree(matches, self.rates, self.max_nodes, max_depth) if max_depth else []
            index.draft = nodes
            trees.append([(node.token, node.parent) for node in nodes])
            confidence.append([node.confidence for node in nodes])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        """Wherever the parent was right, whether its most confident child was right as well."""
        for sequence, emitted in zip(batch.sequences, verdict.tokens, strict=True):
            index = self._indexes.get(sequence.id)
            nodes = index.draft if index else []
            parents = [-1, *(node.parent for node in nodes)]
            outcomes = tree.outcomes([-1, *(node.token for node in nodes)], parents, emitted)
            for parent, children in enumerate(tree.children(parents, len(parents))):
                if outcomes[parent] and children:
                    best = max(children, key=lambda child: nodes[child - 1].confidence)
                    if (accepted := outcomes[best]) is not None:
                        self.rates.note(nodes[best - 1].length, accepted)

    def release(self, sequence: SequenceState) -> None:
        self._indexes.pop(sequence.id, None)
        if self.corpus is not None and sequence.request.namespace is not None:
            self.corpus.add(sequence.request.namespace, sequence.output)

    # ------------------------------------------------------------------------ earlier outputs

    def save(self, file: str | Path) -> None:
        """Writes the shared corpus, one text per line."""
        if self.corpus is None:
            raise ConfigError("this drafter shares nothing: give it shared_tokens")
        lines = [
            json.dumps({"namespace": name, "vocab_size": self.vocab_size, "tokens": text})
            for name, text in self.corpus.texts()
        ]
        Path(file).write_text("".join(line + "\n" for line in lines), "utf-8")

    def load(self, file: str | Path) -> None:
        """Adds what `save` wrote, by a drafter of the same vocabulary."""
        if self.corpus is None:
            raise ConfigError("this drafter shares nothing: give it shared_tokens")
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
            self.corpus.add(namespace, tokens)
