"""A small model of the same vocabulary drafts (Leviathan et al., arXiv 2211.17192).

With `num_speculative_tokens` it samples a chain. Otherwise it is adaptive: a tree ends when another
level is not worth its time.

It has its own KV cache and compares it with the sequence at every step: accepted tokens of its last
draft are there, missing tokens are computed. So steps without it do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from draftahead.core.device import last_of, padded
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive_int, with_drafts_for
from draftahead.drafters.registry import register
from draftahead.drafters.tree_builder import MAX_DEPTH, TreeBuilder, sampled_chain
from draftahead.errors import VocabularyMismatchError
from draftahead.kv.cache import SlotOwners
from draftahead.models.runner import ModelRunner
from draftahead.models.support import MODEL, context_limit

UNKNOWN = -1  # a sampled token that is not on the host yet


@register("draft_model")
class DraftModel(Drafter):
    """Drafts with a small model of the same vocabulary."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        model: Any,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.count = positive_int(
            "num_speculative_tokens", num_speculative_tokens, default=MAX_DEPTH
        )
        self.builder = TreeBuilder(self.count)
        tokenizer = None
        if isinstance(MODEL.of("'model' of drafter 'draft_model'", model), str | Path):
            model, tokenizer = context.load(str(model))
        check_vocabulary(context, tokenizer, int(model.config.get_text_config().vocab_size))
        self.runner = ModelRunner(
            model,
            max_batch=context.max_batch,
            max_context=min(context.max_context, context_limit(model)),
            scratch_entries=self.builder.max_expanded if self.adaptive else self.count + 1,
        )
        self._has_fewer_tokens = context.vocab_size > self.runner.vocab_size
        self._owners = SlotOwners(self.runner.cache)
        # Where each slot's sampled tokens begin, which the cache holds as UNKNOWN.
        self._sampled_from: list[int] | None = None

    def propose(self, batch: Batch) -> Draft | None:
        limit = self.runner.max_context - self.count
        fits = [len(sequence.tokens) <= limit for sequence in batch.sequences]
        batch = with_drafts_for(batch, fits)
        if not any(batch.max_depths):
            return None
        logits, argmax = self._catch_up(batch, fits)
        held = self.runner.cache.tokens_in[: len(fits)]
        if self.adaptive:
            for tokens in held:
                tokens.pop()  # the root, of which the trees are children
            return self.builder.build(batch, logits, self._expand)
        self._sampled_from = [len(tokens) for tokens in held]
        sampled_chain(batch, self.count, logits, argmax, self._feed)
        return None  # the draft sampler holds the draft

    def _expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._forward(tokens, parents).logits

    def _feed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._append(tokens[:, None], [[UNKNOWN]] * len(tokens))

    def _append(self, tokens: Tensor, known: Sequence[list[int]]) -> tuple[Tensor, Tensor | None]:
        """Computes tokens [B, N] behind each slot's, as `known` to the host; returns the logits
        after the last one of each, and their argmax if the forward computed it."""
        output = self._forward(tokens)
        for held, new in zip(self.runner.cache.tokens_in, known, strict=False):
            held.extend(new)
        argmax = None if output.argmax is None else last_of(output.argmax, known)
        return last_of(output.logits, known), argmax

    def _forward(self, tokens: Tensor, parents: Tensor | None = None) -> ForwardOutput:
        # Ids in the padding of the target's vocabulary are unknown here; a bad draft follows.
        if self._has_fewer_tokens:
            tokens = tokens.clamp(max=self.runner.vocab_size - 1)
        return self.runner.forward(tokens, parents=parents)

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        """Replaces UNKNOWN in the cache's tokens by the sampled ones."""
        if self._sampled_from is None:
            return
        for slot, (tokens, start) in enumerate(zip(draft.tokens, self._sampled_from, strict=True)):
            held, size = self.runner.cache.tokens_in[slot], draft.num_nodes[slot]
            held[start : start + size - 1] = tokens[1:size][: len(held) - start]
        self._sampled_from = None

    def _catch_up(self, batch: Batch, fits: list[bool]) -> tuple[Tensor, Tensor | None]:
        """Computes each slot's missing tokens; returns the logits after the last, and argmax."""
        cache, missing = self.runner.cache, []
        for slot, sequence in enumerate(batch.sequences):
            self._owners.claim(sequence.id, slot)
            tokens = sequence.tokens if fits[slot] else [0]  # too long: the slot idles
            held, length = cache.matching_prefix(slot, tokens[:-1]), len(tokens)
            rotates_alike = cache.long_rope[slot] == self.runner.is_long_rope(length)
            if not rotates_alike or length - held > self.count + 1:
                # A new sequence, or steps without this drafter.
                self.runner.prefill(slot, tokens[:-1])
                held = length - 1
            del cache.tokens_in[slot][held:]
            missing.append(tokens[held:])
        return self._append(padded(missing), missing)


def check_vocabulary(context: DrafterContext, tokenizer: Any, size: int) -> None:
    """Refuses other tokens. The sizes of embeddings may differ by padding."""
    if tokenizer is None or context.tokenizer is None:
        if size != context.vocab_size:
            raise VocabularyMismatchError(
                f"the draft model has {size} tokens and the target {context.vocab_size}; without "
                "tokenizers to compare they must be equal"
            )
        return
    target, draft = context.tokenizer.get_vocab(), tokenizer.get_vocab()
    differing = {token for token, _ in target.items() ^ draft.items()}
    if not differing:
        return
    token = min(differing, key=lambda token: (target.get(token, draft.get(token)), token))
    raise VocabularyMismatchError(
        f"the draft model's vocabulary differs from the target's in {len(differing)} tokens "
        f"(first {token!r}: id {target.get(token)} there, {draft.get(token)} in the draft); "
        "use a draft model with the same tokenizer"
    )
