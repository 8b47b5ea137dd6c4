"""The acceptance rules: which drafted tokens stay, so that the target's distribution is kept
exactly.

p is the target's distribution and q the draft's, both after every processor. The rules are pure
functions of (p, q, drafted tokens); randomness enters only through `accepts` and `sample_gumbel`.

- matching: point-mass drafts. The target samples its own token at every node; descend while a child
            holds it. Lossless for any tree, and for replay with keyed noise.
- siblings: sampled children, tried in order against the residual of p, without replacement
            (SpecInfer, arXiv 2305.09781; one child: Leviathan et al., arXiv 2211.17192).
- block:    sampled chains as a whole (Sun et al., arXiv 2403.10444): accepts at least as much.
- typical:  NOT lossless, and only with lossless=False: tokens of any draft, sampled or not, stay if
            they are likely enough (Medusa, arXiv 2401.10774). Greedy output stays exact.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.device import device_of, small_tensor
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceState, Verdict
from draftahead.errors import DraftaheadError, NonFiniteLogitsError
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    sample_gumbel,
    step_rng_key,
    target_rng_key,
    uniforms,
)
from draftahead.sampling.processors import probs_of
from draftahead.sampling.sample import sample_target

AcceptanceRule = Literal["block", "token"]
POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3  # of typical acceptance: medusa_generate's
NO_TOKEN = -1  # in place of a token where the logits allow none


def accept(
    draft: Draft | DeviceDraft,
    output: ForwardOutput,
    batch: Batch,
    rule: AcceptanceRule = "block",
    *,
    lossless: bool = True,
) -> tuple[Verdict, Draft]:
    """Which path of each tree is accepted, and the target's own next token; and the draft, which
    the host may not have known before."""
    if not lossless:
        return accept_typical(draft, output, batch)
    if draft.probs is None:
        return accept_matching(draft, output, batch)
    if rule == "block" and draft.is_chain:
        return accept_block(draft, output, batch)
    return accept_siblings(draft, output, batch)


# ------------------------------------------------------------------------- point-mass drafts


def accept_matching(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch
) -> tuple[Verdict, Draft]:
    """Descends while a child holds the target's own token: all trees together, one level at a
    time."""
    verdict = _empty_verdict(batch)
    known, own = _own_tokens_everywhere(draft, output, batch)
    children = [
        {(known.parents[b][n], known.tokens[b][n]): n for n in range(size - 1, 0, -1)}
        for b, size in enumerate(known.num_nodes)
    ]
    active = list(range(len(batch.sequences)))
    while active:
        nodes = [verdict.paths[b][-1] for b in active]
        if own is None:
            tokens = _own_tokens(output, batch, verdict, active, nodes)
        else:
            tokens = [own[b][node] for b, node in zip(active, nodes, strict=True)]
        descended = []
        for b, node, token in zip(active, nodes, tokens, strict=True):
            if token == NO_TOKEN:
                verdict.errors[b] = _no_token_error(batch.sequences[b])
                continue
            verdict.tokens[b].append(token)
            if (child := children[b].get((node, token))) is not None:
                verdict.paths[b].append(child)
                descended.append(b)
        active = descended
    return verdict, known


def _own_tokens_everywhere(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch
) -> tuple[Draft, list[list[int]] | None]:
    """The draft, and the target's own token at every node: where waiting for a device at each level
    would cost more than sampling tokens that are not needed. None where a sample depends on the
    path, or must be computed by itself."""
    greedy = all(sequence.is_greedy for sequence in batch.sequences)
    has_processors = any(sequence.has_processors for sequence in batch.sequences)
    if greedy and not has_processors and output.argmax is not None:
        return draft.read(output.argmax)
    on_host = device_of(output.logits.device).is_cpu
    if has_processors or on_host or (batch.exact == "replay" and not greedy):
        return _read(draft), None
    if greedy:
        largest, own = output.logits.max(-1)
        finite = largest.isfinite()
    else:
        contexts = _contexts(batch, draft)
        flat = output.logits.flatten(0, 1)
        own, finite = (t.view(output.logits.shape[:2]) for t in sample_target(flat, contexts))
    return draft.read(own.where(finite, NO_TOKEN))


def _own_tokens(
    output: ForwardOutput, batch: Batch, verdict: Verdict, active: list[int], nodes: list[int]
) -> list[int]:
    """The target's own token at one node of each active sequence, along its accepted path."""
    contexts = [NodeContext(batch.sequences[b], tuple(verdict.tokens[b])) for b in active]
    # In replay every distribution is computed by itself, whoever else is in the batch.
    one_by_one = batch.exact == "replay"
    own, finite = sample_target(output.logits[active, nodes], contexts, one_by_one=one_by_one)
    return own.where(finite, NO_TOKEN).tolist()


# ----------------------------------------------------------------- sampled chains: block rule


def accept_block(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch
) -> tuple[Verdict, Draft]:
    """Block verification of sampled chains. Reads back once."""
    assert draft.probs is not None
    size, width, device = len(batch.sequences), draft.width, output.logits.device
    contexts = _contexts(batch, draft)
    probs = probs_of(output.logits.flatten(0, 1), contexts)
    p = probs.view(size, width, -1).to(torch.float64)
    # A node without a finite distribution can be reached, but nothing beyond it can.
    finite = p[..., 0].isfinite()
    index = torch.arange(width, device=device)
    last = small_tensor([count - 1 for count in draft.num_nodes], torch.int64, device)
    ends = index.where(~finite, width).amin(-1).minimum(last)
    q = draft.probs[:, :-1].to(p)
    drafted = draft.token_tensor[:, 1:].to(device)
    keep, weight = block_keep_probabilities(p.nan_to_num(0.0), q, drafted, ends)
    keys = [step_rng_key(RngStream.ACCEPT, context) for context in contexts]
    accepted = accepts(keep, uniforms(keys, 1, device).view(size, width))
    kept = longest_kept(accepted)
    each = torch.arange(size, device=device)
    q_after = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[each, kept]
    own_probs = block_residual(p[each, kept], q_after, weight[each, kept], kept == ends)
    target_keys = small_tensor([target_rng_key(c) for c in contexts], torch.int64, device)
    own = sample_gumbel(own_probs, target_keys.view(size, width)[each, kept])
    own = own.where(finite[each, kept], NO_TOKEN)
    known, found = draft.read(torch.stack([kept, own], 1))
    verdict = _empty_verdict(batch)
    for b, (count, token) in enumerate(found):
        verdict.paths[b].extend(range(1, count + 1))
        verdict.tokens[b].extend(known.tokens[b][1 : count + 1])
        _emit_own(verdict, b, token, batch)
    return verdict, known


def block_keep_probabilities(
    p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification of chains x_1..x_γ, γ = lengths[b].

    p [B, G+1, V]: p[:, i] is the target's distribution after x_i. q [B, G, V]: q[:, i] is the one
    that x_{i+1} was drawn from. Returns keep [B, G+1], the probability h_i that the test for the
    prefix x_1..x_i passes, and weight [B, G+1], the P_i that the residual after it needs.
    """
    batch, width = tokens.shape
    weight = [p.new_ones(batch)]
    keep = [p.new_ones(batch)]  # the empty prefix always passes
    for i in range(1, width + 1):
        drafted = tokens[:, i - 1, None]
        p_drafted = p[:, i - 1].gather(-1, drafted)[:, 0]
        q_drafted = q[:, i - 1].gather(-1, drafted)[:, 0]
        weight.append((weight[-1] * p_drafted / q_drafted).nan_to_num(0.0).clamp(max=1.0))
        probability = weight[i]
        if i < width:
            excess = (weight[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            inside = (excess / (excess + 1 - weight[i])).clamp(max=1.0)
            inside = torch.where((excess == 0) & (weight[i] == 1), 1.0, inside)
            probability = torch.where(lengths == i, weight[i], inside)
        keep.append(torch.where(lengths < i, 0.0, probability))
    return torch.stack(keep, 1), torch.stack(weight, 1)


def longest_kept(accepted: Tensor) -> Tensor:
    """[B, G+1] tests -> [B]: the LAST prefix that passes. The empty one always does."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    return torch.where(accepted, index, 0).amax(-1)


def block_residual(p: Tensor, q: Tensor, weight: Tensor, is_end: Tensor) -> Tensor:
    """The distribution of the token after the kept prefix: p itself where all of the chain is."""
    weighted = weight[:, None] * p
    nothing_left = (weighted <= q).all(-1)  # by rounding only: see residual
    return torch.where((is_end | nothing_left)[:, None], p, residual(weighted, q))


# ---------------------------------------------------------------- sampled trees: token by token


def accept_siblings(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch
) -> tuple[Verdict, Draft]:
    """Sampled trees, node by node: every child against the residual of its elder siblings."""
    assert draft.probs is not None
    known, verdict = _read(draft), _empty_verdict(batch)
    for b, sequence in enumerate(batch.sequences):
        drafted, emitted = known.tokens[b], verdict.tokens[b]
        children = tree.children(known.parents[b], known.num_nodes[b])
        path, descending = verdict.paths[b], True
        while descending:
            node, context = path[-1], NodeContext(sequence, tuple(emitted))
            p = probs_of(output.logits[b, node][None], [context])[0].to(torch.float64)
            if not p[0].isfinite():
                verdict.errors[b] = _no_token_error(sequence)
                break
            q = draft.probs[b, node].to(p)
            key = step_rng_key(RngStream.ACCEPT, context)
            numbers = uniforms([key], len(children[node]) + 1, p.device)[0]
            descending = False
            for number, child in zip(numbers, children[node], strict=False):
                if accepts(accept_probability(p, q, drafted[child]), number):
                    path.append(child)
                    emitted.append(drafted[child])
                    descending = True
                    break
                p, q = residual(p, q), without(q, drafted[child])
            if not descending:
                emitted.append(int(sample_gumbel(p[None], [target_rng_key(context)])[0]))
    return verdict, known


def accept_probability(p: Tensor, q: Tensor, token: int) -> Tensor:
    """min(1, p/q) at one drafted token; 0 where p is 0."""
    return (p[..., token] / q[..., token]).nan_to_num(0.0).clamp(max=1.0)


def accepts(probability: Tensor, uniform: Tensor) -> Tensor:
    """Strictly below: a probability of 0 never passes, whatever the random number."""
    return uniform < probability


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p once a token drawn from q was rejected: norm((p - q)+)."""
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    # Only rounding brings the total to 0 here: p equals q, and nothing is ever rejected.
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, token: int) -> Tensor:
    """q for the next sibling: drawn without replacement."""
    left = q.clone()
    left[..., token] = 0
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, left)


# ------------------------------------------------------------------ typical: not lossless


def accept_typical(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch
) -> tuple[Verdict, Draft]:
    """The longest path of typical tokens, of equals the most likely, and the target's own token
    after it. This changes the distribution towards what the drafter prefers."""
    known = _read(draft)
    size, width = len(batch.sequences), known.width
    contexts = _contexts(batch, known)
    probs = probs_of(output.logits.flatten(0, 1), contexts)
    own = sample_gumbel(probs, [target_rng_key(context) for context in contexts])
    own_tokens = own.where(probs[:, 0].isfinite(), NO_TOKEN).view(size, width).tolist()
    probs = probs.view(size, width, -1)
    each = torch.arange(size, device=probs.device)[:, None]
    parents = known.parent_tensor.to(probs.device).clamp(min=0)
    drafted = probs[each, parents, known.token_tensor.to(probs.device)]
    typical = drafted.where(drafted > typical_threshold(probs)[each, parents], 0.0).tolist()
    verdict = _empty_verdict(batch)
    for b, count in enumerate(known.num_nodes):
        paths, likelihoods = [[0]], [1.0]
        for node in range(1, count):
            parent = known.parents[b][node]
            paths.append([*paths[parent], node])
            likelihoods.append(likelihoods[parent] * typical[b][node])
        kept = [node for node in range(count) if likelihoods[node] > 0]
        path = paths[max(kept, key=lambda node: (len(paths[node]), likelihoods[node]))]
        verdict.paths[b][:] = path
        verdict.tokens[b].extend(known.tokens[b][node] for node in path[1:])
        _emit_own(verdict, b, own_tokens[b][path[-1]], batch)
    return verdict, known


def typical_threshold(p: Tensor) -> Tensor:
    """What a token's probability must exceed to be typical of distributions [..., V]: the lower the
    entropy, the more. One-hot distributions (greedy) leave their one token only."""
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return (POSTERIOR_ALPHA * (-entropy).exp()).clamp(max=POSTERIOR_THRESHOLD)


# ------------------------------------------------------------------------------- shared parts


def _read(draft: Draft | DeviceDraft) -> Draft:
    if isinstance(draft, Draft):
        return draft
    return draft.read(draft.token_tensor[:, :0])[0]


def _contexts(batch: Batch, draft: Draft | DeviceDraft) -> list[NodeContext]:
    """Of every node, sequence by sequence. Processors look at the tokens of a path; without them
    only its length matters, and a device need not be waited for."""
    has_processors = any(sequence.has_processors for sequence in batch.sequences)
    # The depths of trees that a device is building are unknown until they are read.
    if isinstance(draft, DeviceDraft) and draft.is_chain and not has_processors:
        chain = [(0,) * depth for depth in range(draft.width)]
        return [NodeContext(s, path) for s in batch.sequences for path in chain]
    known, found = _read(draft), []
    for b, (sequence, size) in enumerate(zip(batch.sequences, known.num_nodes, strict=True)):
        paths = tree.paths(known.tokens[b][:size], known.parents[b][:size])
        paths += [()] * (known.width - size)  # no processor sees the tokens of padding
        found += [NodeContext(sequence, path) for path in paths]
    return found


def _emit_own(verdict: Verdict, b: int, token: int, batch: Batch) -> None:
    """The target's own token ends what sequence b emits, or an error does."""
    if token == NO_TOKEN:
        verdict.errors[b] = _no_token_error(batch.sequences[b])
    else:
        verdict.tokens[b].append(token)


def _empty_verdict(batch: Batch) -> Verdict:
    return Verdict([[0] for _ in batch.sequences], [[] for _ in batch.sequences])


def _no_token_error(sequence: SequenceState) -> DraftaheadError:
    return sequence.fault or NonFiniteLogitsError(
        "the target's logits allow no next token (NaN, infinite, or every token forbidden); "
        "try dtype='float32', or check the logit bias, the bad words and the processors"
    )
