"""Medusa heads (Cai et al., arXiv 2401.10774): guesses several tokens ahead from one state.

The target's last state of a token, behind the last norm, tells the next token by the target's own
head. Head h changes that state so that it tells the token h + 1 places further. Heads know nothing
of each other's guesses.

Shapes: H hidden, K heads, D draft vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.cpu.linear import output_subset
from draftahead.errors import ConfigError
from draftahead.models.support import text_config

MOST_NODES = 63  # of a tree, the root aside

Branch = tuple[int, ...]  # to a node: which candidate of each head leads to it


class MedusaHeads(nn.Module):
    """`outputs`: rows of the output matrices that it brings: of one for all heads, of one for each,
    or none, where the target's own head serves. `tokens`: which of the target's tokens the rows
    stand for, if not for all of them in order."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        layers: int = 1,
        outputs: Sequence[int] = (),
        tokens: Tensor | None = None,
        choices: Sequence[Branch] = (),
    ) -> None:
        super().__init__()
        self.hidden, self.heads, self.layers = hidden, heads, layers
        self.choices = tuple(choices)  # a tree that was found to be good; none: no such tree
        # All heads see the same state first: one product for all of them.
        self.first = nn.Linear(hidden, heads * hidden)
        self.deeper = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(heads))
            for _ in range(layers - 1)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, rows, bias=False) for rows in outputs)
        self.tokens: Tensor | None
        self.register_buffer("tokens", tokens)
        for parameter in (*self.first.parameters(), *self.deeper.parameters()):
            nn.init.zeros_(parameter)  # a new head says what the target says

    def __len__(self) -> int:
        return self.heads

    def forward(self, states: Tensor) -> Tensor:
        """The target's last states [..., H] -> what its head would see, [..., K, H]."""
        shape = (*states.shape[:-1], self.heads, self.hidden)
        x = states[..., None, :] + F.silu(self.first(states).view(shape))
        for blocks in self.deeper:
            each = zip(blocks, x.unbind(-2), strict=True)  # type: ignore[call-overload]
            x = x + F.silu(torch.stack([block(one) for block, one in each], -2))
        return x

    def of(self, head: int, states: Tensor) -> Tensor:
        """The same for one of the heads, [..., H]."""
        own = slice(head * self.hidden, (head + 1) * self.hidden)
        x = states + F.silu(F.linear(states, self.first.weight[own], self.first.bias[own]))
        for blocks in self.deeper:
            x = x + F.silu(blocks[head](x))  # type: ignore[index]
        return x

    def logits(self, states: Tensor, head: nn.Module | None) -> Tensor:
        """Over the draft vocabulary, [..., K, D]. `head`: see `output_for`."""
        found = self(states)
        if len(self.lm_heads) > 1:
            each = zip(self.lm_heads, found.unbind(-2), strict=True)
            return torch.stack([output(x) for output, x in each], -2)
        output = self.lm_heads[0] if self.lm_heads else head
        assert output is not None
        return output(found)  # type: ignore[no-any-return]

    def parts(self) -> dict[str, Tensor]:
        """Its tensors by their published names, outputs by vLLM's: views, to read or to fill."""
        found = {}
        for head in range(self.heads):
            own = slice(head * self.hidden, (head + 1) * self.hidden)
            for kind in ("weight", "bias"):
                found[f"{head}.0.linear.{kind}"] = getattr(self.first, kind).detach()[own]
                for layer, blocks in enumerate(self.deeper, start=1):
                    block = blocks[head]  # type: ignore[index]
                    found[f"{head}.{layer}.linear.{kind}"] = getattr(block, kind).detach()
        for name, weight in self.lm_heads.named_parameters():
            found[f"lm_heads.{name}"] = weight.detach()
        return found | ({} if self.tokens is None else {"token_map": self.tokens})

    def output_for(self, model: Any) -> Any:
        """The target's own head, or its rows for the draft vocabulary; None if not needed."""
        if self.lm_heads:
            return None
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no head that Medusa heads could share")
        return head if self.tokens is None else output_subset(head, self.tokens)


def new_heads(
    model: Any, count: int, *, layers: int = 1, tokens: Tensor | None = None
) -> MedusaHeads:
    """Untrained heads that share the target's own, in float32 on its device."""
    hidden = int(text_config(model).hidden_size)
    return MedusaHeads(hidden, count, layers=layers, tokens=tokens).to(model.device)


# --------------------------------------------------------------------------------- the tree


def likeliest_tree(
    chances: Sequence[Sequence[float]], count: int, least: float = 0.0
) -> list[tuple[Branch, float]]:
    """`chances[h][i]`: that candidate i of head h is right, whatever came before. Returns the
    `count` nodes that are most often reached and right, each behind its parent, and how often;
    none that is no likelier than `least`."""
    found: list[tuple[Branch, float]] = []
    open_: list[tuple[float, Branch]] = [(-1.0, ())]
    while open_ and len(found) < count:
        reached, path = heapq.heappop(open_)
        if path:
            found.append((path, -reached))
        if len(path) < len(chances):
            for candidate, chance in enumerate(chances[len(path)]):
                if -reached * chance > least:
                    heapq.heappush(open_, (reached * chance, (*path, candidate)))
    return found


def checked_tree(name: str, tree: Any, heads: int) -> list[Branch]:
    """Paths as in Medusa's `medusa_choices`, parents first."""
    rows: list[Any] = list(tree) if isinstance(tree, list | tuple) else []
    listed = all(isinstance(path, list | tuple) and path for path in rows)
    known = listed and all(type(i) is int and i >= 0 for path in rows for i in path)
    if not known or not 1 <= len(rows) <= MOST_NODES:
        raise ConfigError(
            f"{name} must be a list of 1 to {MOST_NODES} paths of candidates, as [[0], [1], [0, 0]]"
        )
    paths = sorted({tuple(path) for path in rows}, key=lambda path: (len(path), path))
    if len(paths[-1]) > heads:
        raise ConfigError(f"{name} is {len(paths[-1])} deep, and there are {heads} Medusa heads")
    for path in paths:
        if path[:-1] and path[:-1] not in paths:
            raise ConfigError(f"{name} has {list(path)} without {list(path[:-1])} above it")
    return paths


# --------------------------------------------------------------------------------- the files
