"""A small model of the same vocabulary drafts (Leviathan et al., arXiv 2211.17192).

Asked for a number of guesses, it draws a chain of so many. Left to itself it grows a tree as far as
its time pays.

It keeps a cache of its own and compares that with the text at every step: what the target
accepted of its own guesses is already there, the rest it feeds itself. So it can be skipped,
switched off or faulty for a while and still be right the next time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead.core.types import Batch, Draft, DraftSampler
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.registry import register
from draftahead.drafters.tree_builder import DEEPEST, TreeBuilder, draw_chain
from draftahead.errors import ConfigError, VocabularyMismatchError
from draftahead.kv.cache import SlotOwners
from draftahead.models.runner import ModelRunner
from draftahead.models.support import context_limit
from draftahead.sampling.noise import small_tensor

UNNAMED = -1  # in place of a token that only the device knows


@register("draft_model")
class DraftModel(Drafter):
    def __init__(
        self,
        setting: DrafterContext,
        *,
        model: Any = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=DEEPEST)
        self.grower = TreeBuilder(self.count)
        if model is None:
            raise ConfigError("drafter 'draft_model' needs 'model': the name or path of a model")
        tokenizer = None
        if isinstance(model, str | Path):
            model, tokenizer = setting.load(str(model))
        elif not hasattr(model, "config"):
            raise ConfigError(f"drafter 'draft_model': {model!r} is no model and no name of one")
        check_vocabulary(setting, tokenizer, int(model.config.get_text_config().vocab_size))
        self.runner = ModelRunner(
            model,
            max_batch=setting.max_batch,
            max_context=min(setting.max_context, context_limit(model)),
            spare=self.grower.most_nodes if self.adaptive else self.count + 1,
        )
        self._is_larger = setting.vocabulary > self.runner.vocabulary
        self._tenants = SlotOwners(self.runner.cache)
        # Whose draws the rows' contents end with, still unnamed, and from where on.
        self._fed: tuple[DraftSampler, list[int]] | None = None

    def propose(self, batch: Batch) -> Draft | None:
        most = self.runner.max_context
        fits = [len(sequence.tokens) + self.count <= most for sequence in batch.sequences]
        if not any(room and fit for room, fit in zip(batch.max_depths, fits, strict=True)):
            return None
        self._name_what_was_fed()
        if self.adaptive:
            return self._grow(batch, fits)
        self._draw(batch, fits)
        return None  # the dice hold the draft

    def _draw(self, batch: Batch, fits: list[bool]) -> None:
        logits, best = self._catch_up(batch, fits)
        self._fed = (
            batch.draft_sampler,
            [len(self.runner.cache.tokens_in[row]) for row in range(len(fits))],
        )
        going = None if all(fits) else torch.tensor(fits)
        draw_chain(batch, min(self.count, max(batch.max_depths)), logits, best, self._feed, going)

    def _feed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self._last(self._scored(tokens[:, None]))
        for row in range(len(tokens)):
            self.runner.cache.tokens_in[row].append(UNNAMED)
        return found

    def _grow(self, batch: Batch, fits: list[bool]) -> Draft | None:
        logits, _ = self._catch_up(batch, fits)
        for row in range(len(fits)):
            self.runner.cache.tokens_in[row].pop()  # the root, which the trees hang from
        max_depths = [room if fit else 0 for room, fit in zip(batch.max_depths, fits, strict=True)]
        return self.grower.grow(batch, logits, self._scored, max_depths)

    def _scored(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        # Ids in the target's padding are none of ours; a wrong guess follows, no more.
        if self._is_larger:
            tokens = tokens.clamp(max=self.runner.vocabulary - 1)
        return self.runner.run(tokens, parents=parents)

    # ---------------------------------------------------------------------------- what it reads

    def _name_what_was_fed(self) -> None:
        """Drawn tokens are fed on before the host knows them; by the next step it does."""
        if self._fed is None:
            return
        dice, starts = self._fed
        for row, (chain, start) in enumerate(zip(dice.chains, starts, strict=True)):
            held = self.runner.cache.tokens_in[row]
            held[start : start + len(chain)] = chain[: len(held) - start]
        self._fed = None

    def _catch_up(self, batch: Batch, fits: list[bool]) -> tuple[Tensor, Tensor | None]:
        """Feeds every row what its cache lacks; returns the logits after each text's end, and the
        best token if the pass found it."""
        cache, pending = self.runner.cache, []
        for row, sequence in enumerate(batch.sequences):
            self._tenants.place(sequence.id, row)
            text = sequence.tokens if fits[row] else [0]  # too long for us: the row idles
            held = cache.matched(row, text[:-1])
            if cache.far[row] != self.runner.is_far(len(text)) or len(text) - held > self.count + 1:
                # A new text, or steps without this drafter.
                self.runner.prefill(row, text[:-1])
                held = len(text) - 1
            del cache.tokens_in[row][held:]
            pending.append(text[held:])
        width = max(len(tokens) for tokens in pending)
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending])
        logits = self._scored(block)
        for row, tokens in enumerate(pending):
            cache.tokens_in[row].extend(tokens)
        ends = [len(tokens) - 1 for tokens in pending]
        if all(end == width - 1 for end in ends):
            return self._last(logits)
        last = small_tensor(ends, torch.int64, logits.device)
        rows, best = torch.arange(len(pending), device=logits.device), self.runner.best
        return logits[rows, last], None if best is None else best[rows, last]

    def _last(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        best = self.runner.best
        return logits[:, -1], None if best is None else best[:, -1]


def check_vocabulary(setting: DrafterContext, tokenizer: Any, size: int) -> None:
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
