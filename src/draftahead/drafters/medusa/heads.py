"""Medusa heads (Cai et al., arXiv 2401.10774): predict several tokens ahead from one hidden state.

The target's last hidden state of a token, after the last norm, predicts the next token through the
target's lm_head. Head h maps that hidden state to one that predicts the token h + 1 positions
further. The heads do not see each other's predictions.

Shapes: H hidden size, K heads, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.modules import output_subset
from draftahead.drafters.medusa.tree import Choice
from draftahead.errors import ConfigError
from draftahead.models.support import text_config


class MedusaHeads(nn.Module):
    """`lm_head_sizes`: tokens of the lm_heads that it brings: none (it uses the target's), one for
    all heads, or one each. `draft_to_target` [D]: the tokens of the draft vocabulary;
    None: the target's whole one. `choices`: the tree to draft, as in a file's `medusa_choices`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_layers: int = 1,
        lm_head_sizes: Sequence[int] = (),
        draft_to_target: Tensor | None = None,
        choices: Sequence[Choice] = (),
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self._num_heads = num_heads
        self.choices = tuple(choices)
        # The first residual blocks of all heads have the same input: one matrix product for all.
        self.first = nn.Linear(hidden_size, num_heads * hidden_size)
        self.deeper = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
            for _ in range(num_layers - 1)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, size, bias=False) for size in lm_head_sizes
        )
        self.draft_to_target: Tensor | None
        self.register_buffer("draft_to_target", draft_to_target)
        for parameter in (*self.first.parameters(), *self.deeper.parameters()):
            nn.init.zeros_(parameter)  # a new head leaves the hidden state as it is

    def __len__(self) -> int:
        return self._num_heads

    def forward(self, hidden: Tensor) -> Tensor:
        """The target's last hidden states [..., H] -> those of every head [..., K, H]."""
        shape = (*hidden.shape[:-1], len(self), self.hidden_size)
        x = hidden[..., None, :] + F.silu(self.first(hidden).view(shape))
        for blocks in self.deeper:
            pairs = zip(blocks, x.unbind(-2), strict=True)  # type: ignore[call-overload]
            x = x + F.silu(torch.stack([block(hidden) for block, hidden in pairs], -2))
        return x

    def forward_head(self, head: int, hidden: Tensor) -> Tensor:
        """The forward of one head: [..., H] -> [..., H]."""
        first = slice(head * self.hidden_size, (head + 1) * self.hidden_size)
        x = hidden + F.silu(F.linear(hidden, self.first.weight[first], self.first.bias[first]))
        for blocks in self.deeper:
            x = x + F.silu(blocks[head](x))  # type: ignore[index]
        return x

    def logits(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Logits over the draft vocabulary, [..., K, D]. `lm_head`: see `target_lm_head`."""
        x = self(hidden)
        if len(self.lm_heads) > 1:
            pairs = zip(self.lm_heads, x.unbind(-2), strict=True)
            return torch.stack([lm_head(hidden) for lm_head, hidden in pairs], -2)
        shared = self.lm_heads[0] if self.lm_heads else lm_head
        assert shared is not None
        return shared(x)  # type: ignore[no-any-return]

    def target_lm_head(self, model: Any) -> Any:
        """The target's lm_head, or its part for the draft vocabulary; None if not needed."""
        if self.lm_heads:
            return None
        lm_head = model.get_output_embeddings()
        if lm_head is None:
            raise ConfigError(
                f"{type(model).__name__} has no lm_head that Medusa heads could share"
            )
        vocab = self.draft_to_target
        return lm_head if vocab is None else output_subset(lm_head, vocab)

    def published_tensors(self) -> dict[str, Tensor]:
        """Views of its tensors by published names, lm_heads by vLLM's: to read or to fill."""
        tensors = {f"lm_heads.{name}": x.data for name, x in self.lm_heads.named_parameters()}
        for kind in ("weight", "bias"):
            blocks = [getattr(self.first, kind).unflatten(0, (len(self), self.hidden_size))]
            blocks += [[getattr(block, kind) for block in layer] for layer in self.deeper]  # type: ignore[attr-defined]
            for layer, by_head in enumerate(blocks):
                for head in range(len(self)):
                    tensors[f"{head}.{layer}.linear.{kind}"] = by_head[head]
        if self.draft_to_target is not None:
            tensors["token_map"] = self.draft_to_target
        return {name: tensor.detach() for name, tensor in tensors.items()}


def new_heads(model: Any, num_heads: int, **options: Any) -> MedusaHeads:
    """Untrained heads that use the target's lm_head, in float32 on its device. `options` of
    MedusaHeads."""
    return MedusaHeads(int(text_config(model).hidden_size), num_heads, **options).to(model.device)
