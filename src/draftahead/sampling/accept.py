"""The acceptance rules: which drafted tokens stay, so that the target's distribution is kept
exactly.

p is the target's distribution and q the draft's, both after every processor. The rules are pure
functions of (p, q, drafted tokens); randomness enters only through `accepts` and `sample_gumbel`.

- deterministic: drafts that were not sampled (point masses). The target samples its own token at
            every node; descend while a child holds it. Lossless for any tree, and for replay with
            keyed noise.
- token rejection: sampled chains, token by token (Leviathan et al., arXiv 2211.17192).
- block:    sampled chains as a whole (Sun et al., arXiv 2403.10444): accepts at least as much as
            token rejection.
- typical:  NOT lossless, and only with lossless=False: tokens of any draft, sampled or not, stay if
            they are likely enough (Medusa, arXiv 2401.10774). Greedy output stays exact.

Only chains are sampled: the draft sampler draws one token for each sequence and depth.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.device import device_of, small_tensor
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import ForwardOutput, RunningBatch, Verdict
from draftahead.errors import NonFiniteLogitsError
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
NO_TOKEN = -1  # where the logits allow no token, as in ForwardOutput.argmax


def accept(
    draft: Draft | DeviceDraft,
    output: ForwardOutput,
    batch: RunningBatch,
    rule: AcceptanceRule = "block",
    *,
    lossless: bool = True,
) -> tuple[Verdict, Draft]:
    """Which path of each tree is accepted, and the target's own next token; and the draft on the
    host."""
    for sequence in batch.sequences:
        sequence.processor_errors.clear()
    if not lossless:
        return accept_typical(draft, output, batch)
    if draft.probs is None:
        return accept_deterministic(draft, output, batch)
    if rule == "block":
        return accept_block(draft, output, batch)
    return accept_token_rejection(draft, output, batch)


# ------------------------------------------------------------------------- point-mass drafts


def accept_deterministic(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Verdict, Draft]:
    """Descends while a child holds the target's own token: all trees together, one level at a
    time."""
    verdict = _empty_verdict(batch)
    host_draft, all_tokens = _target_tokens_of_all_nodes(draft, output, batch)
    children = [
        {(host_draft.parents[b][n], host_draft.tokens[b][n]): n for n in range(size - 1, 0, -1)}
        for b, size in enumerate(host_draft.num_nodes)
    ]
    active = list(range(len(batch.sequences)))
    while active:
        nodes = [verdict.paths[b][-1] for b in active]
        if all_tokens is None:
            tokens = _target_tokens(output, batch, verdict, active, nodes)
        else:
            tokens = [all_tokens[b][node] for b, node in zip(active, nodes, strict=True)]
        descended = []
        for b, node, token in zip(active, nodes, tokens, strict=True):
            if token == NO_TOKEN:
                _fail(verdict, b, batch)
                continue
            verdict.tokens[b].append(token)
            if (child := children[b].get((node, token))) is not None:
                verdict.paths[b].append(child)
                descended.append(b)
        active = descended
    return verdict, host_draft


def _target_tokens_of_all_nodes(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Draft, list[list[int]] | None]:
    """The draft on the host, and the target's own token at every node [B][N], with one
    synchronisation. None in place of the tokens (a) on a CPU, where sampling all nodes costs more
    than it saves, (b) with logits that depend on the path, (c) in replay, which samples one by one.
    """
    if output.argmax is not None and all(s.takes_argmax for s in batch.sequences):
        return draft.to_host(output.argmax)
    on_host = device_of(output.logits.device).is_cpu
    if batch.modifies_logits or on_host or (batch.exact == "replay" and not batch.all_greedy):
        return draft.to_host()[0], None
    if batch.all_greedy:
        largest, tokens = output.logits.max(-1)
        has_token = largest.isfinite()
    else:
        probs, rng_keys = _target_probs(draft, output, batch)
        tokens = sample_gumbel(probs.flatten(0, 1), rng_keys.flatten()).view(rng_keys.shape)
        has_token = probs[..., 0].isfinite()
    return draft.to_host(tokens.where(has_token, NO_TOKEN))


def _target_tokens(
    output: ForwardOutput,
    batch: RunningBatch,
    verdict: Verdict,
    active: list[int],
    nodes: list[int],
) -> list[int]:
    """The target's own token at one node of each active sequence, along its accepted path."""
    contexts = [NodeContext(batch.sequences[b], tuple(verdict.tokens[b])) for b in active]
    # In replay every distribution is computed by itself, whoever else is in the batch.
    one_by_one = batch.exact == "replay"
    tokens, has_token = sample_target(output.logits[active, nodes], contexts, one_by_one=one_by_one)
    return tokens.where(has_token, NO_TOKEN).tolist()


# ----------------------------------------------------------------- sampled chains: block rule


def accept_block(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Verdict, Draft]:
    """Block verification of sampled chains, with one synchronisation."""
    assert draft.probs is not None
    probs, target_keys = _target_probs(draft, output, batch)
    p, device = probs.to(torch.float64), probs.device
    # Verification stops at the first node whose logits are not finite.
    has_token = p[..., 0].isfinite()
    index = torch.arange(draft.width, device=device)
    last = small_tensor([count - 1 for count in draft.num_nodes], torch.int64, device)
    ends = index.where(~has_token, draft.width).amin(-1).minimum(last)
    q = draft.probs[:, :-1].to(p)
    drafted = draft.token_tensor[:, 1:].to(device)
    keep, weight = block_keep_probabilities(p.nan_to_num(0.0), q, drafted, ends)
    contexts = _contexts_by_depth(batch, draft.width)
    rng_keys = [step_rng_key(RngStream.ACCEPT, context) for context in contexts]
    accepted = accepts(keep, uniforms(rng_keys, 1, device).view(keep.shape))
    length = longest_kept(accepted)
    each = torch.arange(len(length), device=device)
    q_after = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[each, length]
    next_probs = block_residual(p[each, length], q_after, weight[each, length], length == ends)
    next_token = sample_gumbel(next_probs, target_keys[each, length])
    next_token = next_token.where(has_token[each, length], NO_TOKEN)
    host_draft, found = draft.to_host(torch.stack([length, next_token], 1))
    verdict = _empty_verdict(batch)
    for b, (count, token) in enumerate(found):
        verdict.paths[b].extend(range(1, count + 1))
        verdict.tokens[b].extend(host_draft.tokens[b][1 : count + 1])
        _emit(verdict, b, token, batch)
    return verdict, host_draft


def block_keep_probabilities(
    p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification of chains x_1..x_γ, γ = lengths[b].

    p [B, G+1, V]: p[:, i] is the target's distribution after x_i. q [B, G, V]: q[:, i] is the one
    that x_{i+1} was drawn from. Returns keep [B, G+1], the probability h_i that the test for the
    prefix x_1..x_i passes, and weight [B, G+1], the P_i that the residual after it needs.
    """
    batch, num_drafted = tokens.shape
    weight = [p.new_ones(batch)]
    keep = [p.new_ones(batch)]  # the empty prefix always passes
    for i in range(1, num_drafted + 1):
        token = tokens[:, i - 1, None]
        p_token = p[:, i - 1].gather(-1, token)[:, 0]
        q_token = q[:, i - 1].gather(-1, token)[:, 0]
        weight.append((weight[-1] * p_token / q_token).nan_to_num(0.0).clamp(max=1.0))
        probability = weight[i]
        if i < num_drafted:
            excess = (weight[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            inner = (excess / (excess + 1 - weight[i])).clamp(max=1.0)
            inner = torch.where((excess == 0) & (weight[i] == 1), 1.0, inner)
            probability = torch.where(lengths == i, weight[i], inner)
        keep.append(torch.where(lengths < i, 0.0, probability))
    return torch.stack(keep, 1), torch.stack(weight, 1)


def longest_kept(accepted: Tensor) -> Tensor:
    """[B, G+1] tests -> [B]: the LAST prefix that passes. The empty one always does."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    return torch.where(accepted, index, 0).amax(-1)


def block_residual(p: Tensor, q: Tensor, weight: Tensor, is_end: Tensor) -> Tensor:
    """The distribution of the token after the kept prefix: p itself if the whole chain was kept."""
    weighted = weight[:, None] * p
    nothing_left = (weighted <= q).all(-1)  # by rounding only: see residual
    return torch.where((is_end | nothing_left)[:, None], p, residual(weighted, q))


# --------------------------------------------------------------- sampled chains: token by token


def accept_token_rejection(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Verdict, Draft]:
    """Token rejection of sampled chains: each token is tested against p/q at its node."""
    assert draft.probs is not None
    host_draft, verdict = draft.to_host()[0], _empty_verdict(batch)
    for b, sequence in enumerate(batch.sequences):
        path, emitted = verdict.paths[b], verdict.tokens[b]
        for node, token in enumerate([*host_draft.tokens[b][1 : draft.num_nodes[b]], NO_TOKEN]):
            context = NodeContext(sequence, tuple(emitted))
            p = probs_of(output.logits[b, node][None], [context])[0].to(torch.float64)
            if not p[0].isfinite():
                _fail(verdict, b, batch)
                break
            if token != NO_TOKEN:
                q = draft.probs[b, node].to(p)
                uniform = uniforms([step_rng_key(RngStream.ACCEPT, context)], 1, p.device)[0, 0]
                if accepts(accept_probability(p, q, token), uniform):
                    path.append(node + 1)
                    emitted.append(token)
                    continue
                p = residual(p, q)
            emitted.append(int(sample_gumbel(p[None], [target_rng_key(context)])[0]))
            break
    return verdict, host_draft


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


# ------------------------------------------------------------------ typical: not lossless


def accept_typical(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Verdict, Draft]:
    """The longest path of typical tokens, ties broken by likelihood, and the target's own token
    after it. This changes the distribution towards what the drafter prefers."""
    host_draft = draft.to_host()[0]
    probs, rng_keys = _target_probs(host_draft, output, batch)
    own = sample_gumbel(probs.flatten(0, 1), rng_keys.flatten()).view(rng_keys.shape)
    own_tokens = own.where(probs[..., 0].isfinite(), NO_TOKEN).tolist()
    each = torch.arange(len(probs), device=probs.device)[:, None]
    parents = host_draft.parent_tensor.to(probs.device).clamp(min=0)
    likelihood = probs[each, parents, host_draft.token_tensor.to(probs.device)]
    is_typical = likelihood > typical_threshold(probs)[each, parents]
    typical = likelihood.where(is_typical, 0.0).tolist()
    verdict = _empty_verdict(batch)
    for b, num_nodes in enumerate(host_draft.num_nodes):
        paths, path_likelihood = [[0]], [1.0]
        for node in range(1, num_nodes):
            parent = host_draft.parents[b][node]
            paths.append([*paths[parent], node])
            path_likelihood.append(path_likelihood[parent] * typical[b][node])
        nodes = [node for node in range(num_nodes) if path_likelihood[node] > 0]
        path = paths[max(nodes, key=lambda node: (len(paths[node]), path_likelihood[node]))]
        verdict.paths[b][:] = path
        verdict.tokens[b].extend(host_draft.tokens[b][node] for node in path[1:])
        _emit(verdict, b, own_tokens[b][path[-1]], batch)
    return verdict, host_draft


def typical_threshold(p: Tensor) -> Tensor:
    """What a token's probability must exceed to be typical of distributions [..., V]. It falls as
    the entropy rises. A one-hot distribution (greedy) has one typical token."""
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return (POSTERIOR_ALPHA * (-entropy).exp()).clamp(max=POSTERIOR_THRESHOLD)


# ------------------------------------------------------------------------------- shared parts


def _target_probs(
    draft: Draft | DeviceDraft, output: ForwardOutput, batch: RunningBatch
) -> tuple[Tensor, Tensor]:
    """The target's distribution at every node [B, N, V], and the RNG key of its own token there
    [B, N]. A draft on a device is copied to the host only if the logits depend on the path."""
    if isinstance(draft, DeviceDraft) and not batch.modifies_logits:
        contexts = _contexts_by_depth(batch, draft.width)
    else:
        draft, contexts = draft.to_host()[0], []
        for b, (sequence, size) in enumerate(zip(batch.sequences, draft.num_nodes, strict=True)):
            paths = tree.paths(draft.tokens[b][:size], draft.parents[b][:size])
            paths += [()] * (draft.width - size)  # no processor sees the tokens of padding
            contexts += [NodeContext(sequence, path) for path in paths]
    probs = probs_of(output.logits.flatten(0, 1), contexts).view(output.logits.shape)
    rng_keys = small_tensor([target_rng_key(c) for c in contexts], torch.int64, probs.device)
    rng_keys = rng_keys.view(probs.shape[:2])
    if isinstance(draft, DeviceDraft) and not draft.is_chain:
        rng_keys = rng_keys.gather(1, tree.depth_tensor(draft.parent_tensor))
    return probs, rng_keys


def _contexts_by_depth(batch: RunningBatch, width: int) -> list[NodeContext]:
    """For RNG keys, which depend on the length of a path and not on its tokens."""
    return [NodeContext(s, (0,) * depth) for s in batch.sequences for depth in range(width)]


def _emit(verdict: Verdict, b: int, token: int, batch: RunningBatch) -> None:
    """Adds the target's own token to what sequence b emits, or its error if there is none."""
    if token == NO_TOKEN:
        _fail(verdict, b, batch)
    else:
        verdict.tokens[b].append(token)


def _fail(verdict: Verdict, b: int, batch: RunningBatch) -> None:
    """Records why the target has no token after what sequence b emits in this step."""
    processor_error = batch.sequences[b].processor_errors.get(tuple(verdict.tokens[b]))
    verdict.errors[b] = processor_error or NonFiniteLogitsError(
        "the target's logits allow no next token (NaN, infinite, or every token forbidden); "
        "try dtype='float32', or check the logit bias, the bad words and the processors"
    )


def _empty_verdict(batch: RunningBatch) -> Verdict:
    return Verdict([[0] for _ in batch.sequences], [[] for _ in batch.sequences])
