"""A small model of the same vocabulary drafts (Leviathan et al., arXiv 2211.17192).

Asked for a number of guesses, it draws a chain of so many. Left to itself it grows a tree as far as
its time pays, always going on from the nodes that its own probabilities make the likeliest (after
EAGLE-2, Li et al., arXiv 2406.16858).

It keeps a cache of its own and compares that with the text at every step: what the target
accepted of its own guesses is already there, the rest it feeds itself. So it can be skipped,
switched off or faulty for a while and still be right the next time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead.drafters import Drafter, Setting, positive, register
from draftahead.errors import ConfigError, VocabularyMismatchError
from draftahead.passes import CachedModel
from draftahead.sampling import placed
from draftahead.support import context_limit
from draftahead.types import Batch, Dice, Draft

UNNAMED = -1  # in place of a token that only the device knows
DEEPEST = 8  # levels, where the number is left to it
A_LEVEL = 2  # nodes of a tree that it goes on from at each level
CHILDREN = 4  # of each of them
LEAST = 0.02  # likelihood below which a guess is not worth its row
FORGET = 0.98  # of the time of a level, whenever it was not run for it
GOOD = 0.7  # chance that the next level holds a right guess, before that is known


@register("draft_model")
class DraftModel(Drafter):
    def __init__(
        self, setting: Setting, *, model: Any = None, num_speculative_tokens: int | None = None
    ) -> None:
        self.guided = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=DEEPEST)
        if model is None:
            raise ConfigError("drafter 'draft_model' needs 'model': the name or path of a model")
        tokenizer = None
        if isinstance(model, str | Path):
            model, tokenizer = setting.load(str(model))
        elif not hasattr(model, "config"):
            raise ConfigError(f"drafter 'draft_model': {model!r} is no model and no name of one")
        check_vocabulary(setting, tokenizer, int(model.config.get_text_config().vocab_size))
        self.passes = CachedModel(
            model,
            max_batch=setting.max_batch,
            max_context=min(setting.max_context, context_limit(model)),
            spare=1 + A_LEVEL * self.count if self.guided else self.count + 1,
        )
        # Ids in the target's padding are none of ours; a wrong guess follows, no more.
        self._is_larger = setting.vocabulary > self.passes.vocabulary
        self.rows: list[int] = [-1] * setting.max_batch  # which sequence each cache row is for
        # Whose draws the rows' contents end with, still unnamed, and from where on.
        self._fed: tuple[Dice, list[int]] | None = None
        self._level_seconds = 0.0  # of one more level, as of late
        self._levels = 0  # that this is known from

    def propose(self, batch: Batch) -> Draft | None:
        most = self.passes.max_context
        fits = [len(sequence.tokens) + self.count <= most for sequence in batch.sequences]
        if not any(room and fit for room, fit in zip(batch.rooms, fits, strict=True)):
            return None
        self._name_what_was_fed()
        if self.guided:
            return self._grow(batch, fits)
        self._draw(batch, fits)
        return None  # the dice hold the draft

    # --------------------------------------------------------------------------------- chains

    def _draw(self, batch: Batch, fits: list[bool]) -> None:
        count = min(self.count, max(batch.rooms))
        logits, best = self._catch_up(batch, fits)
        self._fed = batch.dice, [len(self.passes.cache.contents[row]) for row in range(len(fits))]
        going = None if all(fits) else torch.tensor(fits)
        for depth in range(count):
            tokens = batch.dice.draw(logits, going, best)
            if depth + 1 < count:
                if self._is_larger:
                    tokens = tokens.clamp(max=self.passes.vocabulary - 1)
                logits, best = self._last(self.passes.run(tokens[:, None]))
                for row in range(len(fits)):
                    self.passes.cache.contents[row].append(UNNAMED)

    # ---------------------------------------------------------------------------------- trees

    def _grow(self, batch: Batch, fits: list[bool]) -> Draft | None:
        logits, _ = self._catch_up(batch, fits)
        for row in range(len(fits)):
            self.passes.cache.contents[row].pop()  # the root, which the trees hang from
        trees = [Tree(root) for root in batch.roots]
        rooms = [room if fit else 0 for room, fit in zip(batch.rooms, fits, strict=True)]
        self._branch(trees, [[0] if room else [] for room in rooms], logits[:, None], batch)
        for _ in range(self.count - 1):
            frontier = [tree.frontier(room) for tree, room in zip(trees, rooms, strict=True)]
            if not self._pays(trees, frontier, batch):
                break
            start = time.perf_counter()
            for tree, nodes in zip(trees, frontier, strict=True):
                tree.expanded += nodes
            width = max(len(tree.expanded) for tree in trees)
            tokens = torch.tensor([tree.block(width) for tree in trees])
            parents = torch.tensor([tree.block_parents(width) for tree in trees])
            tokens = tokens.clamp(max=self.passes.vocabulary - 1)
            logits = self.passes.run(tokens, parents=parents)
            self._branch(trees, frontier, logits, batch)
            self._note_level(time.perf_counter() - start)
        if not any(tree.tokens[1:] for tree in trees):
            return None
        guesses = [list(zip(t.tokens[1:], t.parents[1:], strict=True)) for t in trees]
        return Draft.trees(batch.roots, guesses, [tree.likely[1:] for tree in trees])

    def _branch(
        self, trees: list[Tree], frontier: list[list[int]], logits: Tensor, batch: Batch
    ) -> None:
        """Children for the nodes that the pass has just been over; reads back once."""
        at = [(row, node) for row, nodes in enumerate(frontier) for node in nodes]
        rows = [row for row, _ in at]
        places = [trees[row].expanded.index(node) for row, node in at]
        paths = [trees[row].path(node) for row, node in at]
        weights, tokens = batch.dice.outlook(logits[rows, places], rows, paths, CHILDREN)
        found = torch.cat([weights, tokens.to(weights)], -1).tolist()
        for (row, node), children in zip(at, found, strict=True):
            trees[row].add(node, children)

    def _note_level(self, seconds: float) -> None:
        self._levels += 1
        if self._levels <= 3:  # the first may compile or record
            self._level_seconds = min(seconds, self._level_seconds or seconds)
        else:
            usual = min(seconds, 3 * self._level_seconds)
            self._level_seconds += 0.2 * (usual - self._level_seconds)

    def _pays(self, trees: list[Tree], frontier: list[list[int]], batch: Batch) -> bool:
        """Whether one more level promises more than it takes."""
        reached = sum(
            tree.likely[node] for tree, nodes in zip(trees, frontier, strict=True) for node in nodes
        )
        if not reached or batch.price is None:
            return bool(reached)
        a_token = batch.price.of(len(trees)) / len(trees)
        if GOOD * reached * a_token > self._level_seconds:
            return True
        self._level_seconds *= FORGET  # or one bad moment would be believed for ever
        return False

    # ---------------------------------------------------------------------------- what it reads

    def _name_what_was_fed(self) -> None:
        """Drawn tokens are fed on before the host knows them; by the next step it does."""
        if self._fed is None:
            return
        dice, starts = self._fed
        for row, (chain, start) in enumerate(zip(dice.chains, starts, strict=True)):
            held = self.passes.cache.contents[row]
            held[start : start + len(chain)] = chain[: len(held) - start]
        self._fed = None

    def _catch_up(self, batch: Batch, fits: list[bool]) -> tuple[Tensor, Tensor | None]:
        """Feeds every row what its cache lacks; returns the logits after each text's end, and the
        best token if the pass found it."""
        cache, pending = self.passes.cache, []
        for row, sequence in enumerate(batch.sequences):
            self._place(sequence.id, row)
            text = sequence.tokens if fits[row] else [0]  # too long for us: the row idles
            held = cache.matched(row, text[:-1])
            if cache.far[row] != self.passes.is_far(len(text)) or len(text) - held > self.count + 1:
                # A new text, or steps without this drafter.
                self.passes.prefill(row, text[:-1])
                held = len(text) - 1
            del cache.contents[row][held:]
            pending.append(text[held:])
        width = max(len(tokens) for tokens in pending)
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending])
        logits = self.passes.run(block.clamp(max=self.passes.vocabulary - 1))
        for row, tokens in enumerate(pending):
            cache.contents[row].extend(tokens)
        ends = [len(tokens) - 1 for tokens in pending]
        if all(end == width - 1 for end in ends):
            return self._last(logits)
        last = placed(ends, torch.int64, logits.device)
        rows, best = torch.arange(len(pending), device=logits.device), self.passes.best
        return logits[rows, last], None if best is None else best[rows, last]

    def _last(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        best = self.passes.best
        return logits[:, -1], None if best is None else best[:, -1]

    def _place(self, sequence: int, row: int) -> None:
        """Rows follow the batch: what another row holds for this sequence comes along."""
        if self.rows[row] != sequence:
            if sequence in self.rows:
                at = self.rows.index(sequence)
                self.passes.cache.swap_rows(at, row)
                self.rows[at] = self.rows[row]
            self.rows[row] = sequence


@dataclass
class Tree:
    """One text's guesses while they grow. Node 0 is the root."""

    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    likely: list[float] = field(default_factory=lambda: [1.0])  # reached and right, as we think
    expanded: list[int] = field(default_factory=lambda: [0])  # the nodes it went on from

    def __post_init__(self) -> None:
        self.tokens = [self.root]

    def add(self, node: int, found: list[float]) -> None:
        """Children of a node: likelihoods, and behind them the tokens."""
        half = len(found) // 2
        for chance, token in zip(found[:half], found[half:], strict=True):
            if self.likely[node] * chance >= LEAST:
                self.tokens.append(int(token))
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.likely.append(self.likely[node] * chance)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from below the root to a node."""
        found: list[int] = []
        while node:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def frontier(self, room: int) -> list[int]:
        """The likeliest nodes that can have children and have none."""
        leaves = [
            node
            for node in range(1, len(self.tokens))
            if node not in self.expanded and self.depths[node] < room
        ]
        return sorted(sorted(leaves, key=lambda node: -self.likely[node])[:A_LEVEL])

    def block(self, width: int) -> list[int]:
        tokens = [self.tokens[node] for node in self.expanded]
        return tokens + [self.root] * (width - len(tokens))

    def block_parents(self, width: int) -> list[int]:
        place = {node: index for index, node in enumerate(self.expanded)}
        parents = [place.get(self.parents[node], -1) for node in self.expanded]
        return parents + [0] * (width - len(parents))


def check_vocabulary(setting: Setting, tokenizer: Any, size: int) -> None:
    """Same token for every id. Embeddings may differ in padding behind the last token."""
    if tokenizer is None or setting.tokenizer is None:
        if size != setting.vocabulary:
            raise VocabularyMismatchError(
                f"the draft model has {size} tokens and the target {setting.vocabulary}; without "
                "tokenizers to compare they must be equal"
            )
        return
    target, draft = setting.tokenizer.get_vocab(), tokenizer.get_vocab()
    if target == draft:
        return
    differing = sorted(
        (target.get(token, draft.get(token)), token)
        for token in target.keys() | draft.keys()
        if target.get(token) != draft.get(token)
    )
    token = differing[0][1]
    raise VocabularyMismatchError(
        f"the draft model's vocabulary differs from the target's in {len(differing)} tokens "
        f"(first {token!r}: id {target.get(token)} there, {draft.get(token)} in the draft); "
        "use a draft model with the same tokenizer"
    )
