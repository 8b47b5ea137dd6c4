"""The acceptance rules: which drafted tokens stay, so that the target's law is kept exactly.

p is the target's law and q the draft's, both after every processor. The rules are pure
functions of (p, q, drafted tokens); chance enters only through `coin`, at the end.

- match:    point-mass drafts. The target draws its own token at every node; descend while a
            child holds it. Lossless for any tree, and for replay with keyed noise.
- siblings: sampled children, tried in order against what is left of p, without replacement
            (SpecInfer, arXiv 2305.09781; one child: Leviathan et al., arXiv 2211.17192).
- block:    sampled chains as a whole (Sun et al., arXiv 2403.10444): keeps at least as much.
- typical:  NOT lossless, and only where that was asked for: point-mass guesses that are likely
            enough stay, drawn or not (Medusa, arXiv 2401.10774). Greedy texts stay exact.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.types import Batch, Draft, ForwardOutput, SequenceState, Verdict
from draftahead.errors import DraftaheadError, NonFiniteLogitsError
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    sample_gumbel,
    small_tensor,
    step_rng_key,
    target_rng_key,
    uniforms,
)
from draftahead.sampling.processors import probs_of
from draftahead.sampling.sample import draw

AcceptanceRule = Literal["block", "token"]
EPSILON, DELTA = 0.3, 0.09  # of typical acceptance, as in Medusa's own code
NO_TOKEN = -1  # in place of a token where the logits allow none


# ------------------------------------------------------------------------ the pure functions


def accept_probability(p: Tensor, q: Tensor, token: int) -> Tensor:
    """min(1, p/q) at one drafted token; 0 where the target never says it."""
    return (p[..., token] / q[..., token]).nan_to_num(0.0).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p once a token drawn from q was rejected: norm((p - q)+)."""
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    # Only rounding brings total to 0 here: p equals q, and nothing is ever rejected.
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, token: int) -> Tensor:
    """q for the next sibling: drawn without replacement."""
    left = q.clone()
    left[..., token] = 0
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, left)


def block_keep_probabilities(
    p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification of chains x_1..x_γ, γ = lengths[b].

    p [B, G+1, V]: p[:, i] is the law after x_i. q [B, G, V]: q[:, i] is the law x_{i+1} was
    drawn from. Returns keep [B, G+1] and weight [B, G+1]: `keep[:, i]` is the chance that a
    coin keeps x_1..x_i, and `weight[:, i]` the P_i that the residual after it needs.
    """
    rows, width = tokens.shape
    weight = [p.new_ones(rows)]
    keep = [p.new_ones(rows)]  # the empty prefix is always there to fall back on
    for i in range(1, width + 1):
        said = tokens[:, i - 1, None]
        p_said = p[:, i - 1].gather(-1, said)[:, 0]
        q_said = q[:, i - 1].gather(-1, said)[:, 0]
        weight.append((weight[-1] * p_said / q_said).nan_to_num(0.0).clamp(max=1.0))
        chance = weight[i]
        if i < width:
            excess = (weight[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            inner = (excess / (excess + 1 - weight[i])).clamp(max=1.0)
            inner = torch.where((excess == 0) & (weight[i] == 1), 1.0, inner)
            chance = torch.where(lengths == i, weight[i], inner)
        keep.append(torch.where(lengths < i, 0.0, chance))
    return torch.stack(keep, 1), torch.stack(weight, 1)


def block_residual(p: Tensor, q: Tensor, weight: Tensor, is_end: Tensor) -> Tensor:
    """The law of the token after the kept prefix: p itself where the whole chain was kept."""
    weighted = weight[:, None] * p
    nothing_left = (weighted <= q).all(-1)  # by rounding only: see residual
    return torch.where((is_end | nothing_left)[:, None], p, residual(weighted, q))


def longest_kept(won: Tensor) -> Tensor:
    """[B, G+1] coins -> [B]: the LAST prefix whose coin wins. The empty one needs no luck."""
    index = torch.arange(won.shape[1], device=won.device)
    return torch.where(won, index, 0).amax(-1)


def coin(chance: Tensor, uniform: Tensor) -> Tensor:
    """Strictly below: a chance of 0 never wins, whatever the coin shows."""
    return uniform < chance


def typical_floor(p: Tensor) -> Tensor:
    """What a token must be likelier than to be typical of laws [..., V]: the surer the law, the
    more. A law that is sure of one token (greedy) leaves that one only."""
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return (DELTA * (-entropy).exp()).clamp(max=EPSILON)


# -------------------------------------------------------------------------- from law to verdict


def verify(
    draft: Draft,
    scores: ForwardOutput,
    batch: Batch,
    rule: AcceptanceRule = "block",
    *,
    lossless: bool = True,
) -> Verdict:
    """Which path of each row's tree agrees, and the target's own next token."""
    if draft.probs is None:
        return match(draft, scores, batch) if lossless else accept_typical(draft, scores, batch)
    if rule == "block" and draft.is_chain:
        return accept_block(draft, scores, batch)
    return accept_siblings(draft, scores, batch)


def match(draft: Draft, scores: ForwardOutput, batch: Batch) -> Verdict:
    """Point-mass drafts, all rows together, one level of the trees at a time."""
    everywhere = _drawn_everywhere(draft, scores, batch)
    tokens, parents = draft.host_tokens, draft.host_parents
    known = [
        {(parents[b][n], tokens[b][n]): n for n in range(size - 1, 0, -1)}
        for b, size in enumerate(draft.num_nodes)
    ]
    verdict = _empty(batch)
    active = list(range(len(batch.sequences)))
    while active:
        at = [verdict.paths[b][-1] for b in active]
        if everywhere is None:
            picked = _drawn(scores, batch, verdict, active, at)
        else:
            picked = [everywhere[b][node] for b, node in zip(active, at, strict=True)]
        going = []
        for b, node, token in zip(active, at, picked, strict=True):
            if token == NO_TOKEN:
                verdict.errors[b] = _no_token_error(batch.sequences[b])
                continue
            verdict.tokens[b].append(token)
            if (child := known[b].get((node, token))) is not None:
                verdict.paths[b].append(child)
                going.append(b)
        active = going
    return verdict


def _drawn(
    scores: ForwardOutput, batch: Batch, verdict: Verdict, active: list[int], at: list[int]
) -> list[int]:
    """The target's own token at one node of each row, along that row's path."""
    contexts = [NodeContext(batch.sequences[b], tuple(verdict.tokens[b])) for b in active]
    apart = batch.exact == "replay"
    chosen, finite = draw(scores.logits[active, at], contexts, apart=apart)
    return chosen.where(finite, NO_TOKEN).tolist()


def _drawn_everywhere(draft: Draft, scores: ForwardOutput, batch: Batch) -> list[list[int]] | None:
    """The target's own token at every node, where waiting for a device level by level costs more
    than drawing what is not needed. None where a draw depends on the path or must stand alone."""
    if any(s.has_processors for s in batch.sequences):
        return None
    greedy = all(sequence.params.greedy for sequence in batch.sequences)
    if scores.logits.device.type == "cpu" and not (greedy and scores.argmax is not None):
        return None  # no device to wait for
    if batch.exact == "replay" and not greedy:
        return None
    rows, width = draft.tokens.shape
    if greedy and scores.argmax is not None:
        return draft.read_with(scores.argmax)
    if greedy:
        best, chosen = scores.logits.max(-1)
        finite = best.isfinite()
    else:
        flat, contexts = scores.logits.reshape(rows * width, -1), _contexts(draft, batch)
        chosen, finite = (found.view(rows, width) for found in draw(flat, contexts))
    return draft.read_with(chosen.where(finite, NO_TOKEN))


def _contexts(draft: Draft, batch: Batch) -> list[NodeContext]:
    """Of every node, row by row. Tokens stand in only where processors look at them."""
    needed = any(s.has_processors for s in batch.sequences)
    found = []
    for b, (sequence, parents) in enumerate(zip(batch.sequences, draft.host_parents, strict=True)):
        tokens = draft.host_tokens[b] if needed else [0] * len(parents)
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(parents)):
            is_real = node < draft.num_nodes[b]
            paths.append((*paths[parents[node]], *([tokens[node]] if is_real else [])))
        found += [NodeContext(sequence, path) for path in paths]
    return found


def accept_block(draft: Draft, scores: ForwardOutput, batch: Batch) -> Verdict:
    """Sampled chains by block verification. Reads back once."""
    assert draft.probs is not None
    rows, width = draft.tokens.shape
    contexts = _contexts(draft, batch)
    logits = scores.logits.reshape(rows * width, -1)
    p = probs_of(logits, contexts).view(rows, width, -1).to(torch.float64)
    # A node whose own law is not finite can be reached, but nothing beyond it can.
    finite = p[..., 0].isfinite()
    index = torch.arange(width, device=p.device)
    last = small_tensor([size - 1 for size in draft.num_nodes], torch.int64, p.device)
    ends = index.where(~finite, width).amin(-1).minimum(last)
    q = draft.probs[:, :-1].to(p)
    drafted = draft.tokens[:, 1:].to(p.device)
    keep, weight = block_keep_probabilities(p.nan_to_num(0.0), q, drafted, ends)
    coins = [step_rng_key(RngStream.COIN, context) for context in contexts]
    won = coin(keep, uniforms(coins, 1, p.device).view(rows, width))
    kept = longest_kept(won)
    each = torch.arange(rows, device=p.device)
    q_after = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[each, kept]
    law = block_residual(p[each, kept], q_after, weight[each, kept], kept == ends)
    keys = small_tensor([target_rng_key(context) for context in contexts], torch.int64, p.device)
    own = sample_gumbel(law, keys.view(rows, width)[each, kept])
    own = own.where(finite[each, kept], NO_TOKEN)
    verdict = _empty(batch)
    for b, (k, token) in enumerate(draft.read_with(torch.stack([kept, own], 1))):
        verdict.paths[b].extend(range(1, k + 1))
        verdict.tokens[b].extend(draft.host_tokens[b][1 : k + 1])
        if token == NO_TOKEN:
            verdict.errors[b] = _no_token_error(batch.sequences[b])
        else:
            verdict.tokens[b].append(token)
    return verdict


def accept_siblings(draft: Draft, scores: ForwardOutput, batch: Batch) -> Verdict:
    """Sampled trees, node by node: every child against what its elder siblings left."""
    assert draft.probs is not None
    verdict = _empty(batch)
    for b, sequence in enumerate(batch.sequences):
        tokens, parents = draft.host_tokens[b], draft.host_parents[b]
        below = tree.children(parents, draft.num_nodes[b])
        path, said = verdict.paths[b], verdict.tokens[b]
        descending = True
        while descending:
            node, context = path[-1], NodeContext(sequence, tuple(said))
            p = probs_of(scores.logits[b, node][None], [context])[0].to(torch.float64)
            if not p[0].isfinite():
                verdict.errors[b] = _no_token_error(batch.sequences[b])
                break
            q = draft.probs[b, node].to(p)
            key = step_rng_key(RngStream.COIN, context)
            coins = uniforms([key], len(below[node]) + 1, p.device)[0]
            descending = False
            for flip, child in zip(coins, below[node], strict=False):
                if coin(accept_probability(p, q, tokens[child]), flip):
                    path.append(child)
                    said.append(tokens[child])
                    descending = True
                    break
                p, q = residual(p, q), without(q, tokens[child])
            if not descending:
                said.append(int(sample_gumbel(p[None], [target_rng_key(context)])[0]))
    return verdict


def accept_typical(draft: Draft, scores: ForwardOutput, batch: Batch) -> Verdict:
    """The longest path of typical guesses, of equals the likeliest, and the target's own draw
    after it. This bends the law: texts become what the drafter likes."""
    rows, width = draft.tokens.shape
    contexts = _contexts(draft, batch)
    law = probs_of(scores.logits.reshape(rows * width, -1), contexts)
    own = sample_gumbel(law, [target_rng_key(context) for context in contexts])
    said = draft.read_with(own.where(law[:, 0].isfinite(), NO_TOKEN).view(rows, width))
    law = law.view(rows, width, -1)
    each = torch.arange(rows, device=law.device)[:, None]
    above = draft.parents.to(law.device).clamp(min=0)
    chance = law[each, above, draft.tokens.to(law.device)]
    likely = chance.where(chance > typical_floor(law)[each, above], 0.0).tolist()
    verdict = _empty(batch)
    for b, size in enumerate(draft.num_nodes):
        paths, chances = [[0]], [1.0]
        for node in range(1, size):
            parent = draft.host_parents[b][node]
            paths.append([*paths[parent], node])
            chances.append(chances[parent] * likely[b][node])
        kept = [node for node in range(size) if chances[node] > 0]
        path = paths[max(kept, key=lambda node: (len(paths[node]), chances[node]))]
        verdict.paths[b][:] = path
        verdict.tokens[b].extend(draft.host_tokens[b][node] for node in path[1:])
        if (token := said[b][path[-1]]) == NO_TOKEN:
            verdict.errors[b] = _no_token_error(batch.sequences[b])
        else:
            verdict.tokens[b].append(token)
    return verdict


def _empty(batch: Batch) -> Verdict:
    errors: dict[int, DraftaheadError] = {}
    return Verdict([[0] for _ in batch.sequences], [[] for _ in batch.sequences], errors)


def _no_token_error(sequence: SequenceState) -> DraftaheadError:
    return sequence.fault or NonFiniteLogitsError(
        "the target's logits allow no next token (NaN, infinite, or every token forbidden); "
        "try dtype='float32', or check the logit bias, the bad words and the processors"
    )
