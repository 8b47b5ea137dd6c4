"""Blocks of texts with the target's states: what every head learns from.

Texts of like length stand in a block side by side, ending together: so the answers, which come
last, fill a window at the right edge, and what is unrolled or scored is a plain slice.

Shapes: B texts, T tokens, W watched states, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftahead.errors import ConfigError
from draftahead.train.texts import Texts

POOL = 64  # blocks whose texts are sorted by length together


@dataclass(frozen=True)
class Block:
    tokens: Tensor  # [B, T] int64; texts end at T, padding stands before them
    real: Tensor  # [B, T] bool: no padding
    learnt: Tensor  # [B, T] bool: tokens that are to be foretold
    window: int  # tokens at the right edge that hold all of those
    states: Tensor  # [B, T, W, H] after the watched layers
    last: Tensor  # [B, T, H] after all of them, behind the last norm


class Blocks:
    """Blocks of some texts, epoch after epoch, in an order that a seed decides.

    `keep`: bytes of states that are kept on the device once computed; beyond, they are computed
    anew each time.
    """

    def __init__(
        self,
        texts: Texts,
        model: Any,
        depths: Seq[int],
        *,
        tokens: int,
        longest: int | None = None,
        seed: int = 0,
        keep: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._texts, self._model, self._depths = texts, model, tuple(depths)
        self._budget, self._seed, self._share = tokens, seed, share
        layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        if not depths or not all(0 < depth <= layers for depth in depths):
            raise ConfigError(f"states are there after 1 to {layers} layers, not {list(depths)}")
        self._lengths = texts.lengths.tolist()
        self._answers = texts.answers.tolist()
        most = min(tokens, longest or tokens)
        # A text too long keeps its end: there is the answer.
        self._cut = [min(length, most) for length in self._lengths]
        self._usable = [
            i
            for i, length in enumerate(self._cut)
            if length >= 3 and self._lengths[i] > self._answers[i]
        ]
        if not self._usable:
            raise ConfigError("no text has an answer to learn from")
        self._device = model.device
        self._kept = _Kept(model, self._depths, keep, self._cut)

    def __len__(self) -> int:
        """Blocks of an epoch, for this process."""
        return len(self._epoch(0))

    def from_step(self, step: int) -> Iterator[Block]:
        """Endless; the same for the same step, whatever was before."""
        epoch = 0
        while step >= (count := len(self._epoch(epoch))):
            step, epoch = step - count, epoch + 1
        while True:
            for group in self._epoch(epoch)[step:]:
                yield self._block(group)
            step, epoch = 0, epoch + 1

    def once(self) -> Iterator[Block]:
        for group in self._epoch(0):
            yield self._block(group)

    def _epoch(self, number: int) -> list[list[int]]:
        dice = random.Random(f"{self._seed} {number}")
        order = dice.sample(self._usable, len(self._usable))
        pool = POOL * max(1, self._budget // 256)
        groups: list[list[int]] = []
        for start in range(0, len(order), pool):
            group: list[int] = []
            for index in sorted(order[start : start + pool], key=lambda i: self._cut[i]):
                if group and self._cut[index] * (len(group) + 1) > self._budget:
                    groups.append(group)
                    group = []
                group.append(index)
            groups.append(group)
        dice.shuffle(groups)
        mine, of = self._share
        return groups[mine : len(groups) - len(groups) % of or None : of]

    def _block(self, group: list[int]) -> Block:
        width = max(self._cut[i] for i in group)
        tokens = torch.zeros(len(group), width, dtype=torch.int64)
        real = torch.zeros(len(group), width, dtype=torch.bool)
        learnt = torch.zeros(len(group), width, dtype=torch.bool)
        for row, index in enumerate(group):
            size = self._cut[index]
            tokens[row, width - size :] = self._texts.text(index)[-size:]
            real[row, width - size :] = True
            answer = min(self._lengths[index] - self._answers[index], size - 1)
            learnt[row, width - answer :] = True
        tokens, real, learnt = (
            part.to(self._device, non_blocking=True) for part in (tokens, real, learnt)
        )
        window = max(min(self._lengths[i] - self._answers[i], self._cut[i] - 1) for i in group)
        states = self._kept(group, tokens, real)
        return Block(tokens, real, learnt, window, states[:, :, :-1], states[:, :, -1])


class _Kept:
    """The target's states of texts, computed once as far as there is room to keep them."""

    def __init__(self, model: Any, depths: tuple[int, ...], room: int, lengths: list[int]) -> None:
        self._model, self._depths = model, depths
        hidden = int(model.config.get_text_config(decoder=True).hidden_size)
        self._size = (len(depths) + 1, hidden)
        fits = room // ((len(depths) + 1) * hidden * model.dtype.itemsize)
        self._starts: dict[int, int] = {}
        total = 0
        for index, length in enumerate(lengths):
            if total + length > fits:
                break
            self._starts[index] = total
            total += length
        self._lengths, self._done = lengths, set[int]()
        self._store = torch.empty(total, *self._size, dtype=model.dtype, device=model.device)

    @torch.no_grad()
    def __call__(self, group: list[int], tokens: Tensor, real: Tensor) -> Tensor:
        if all(index in self._done for index in group):
            width = tokens.shape[1]
            starts = [self._starts[i] - (width - self._lengths[i]) for i in group]
            at = torch.tensor(starts, device=tokens.device)[:, None]
            at = (at + torch.arange(width, device=tokens.device)).clamp(min=0)
            return self._store[at]
        found = self._computed(tokens, real)
        for row, index in enumerate(group):
            start, size = self._starts.get(index), self._lengths[index]
            if start is not None and index not in self._done:
                self._store[start : start + size] = found[row, -size:]
                self._done.add(index)
        return found

    def _computed(self, tokens: Tensor, real: Tensor) -> Tensor:
        """[B, T, W + 1, H]; the last are those behind the model's last norm."""
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        out = self._model.get_decoder()(
            input_ids=tokens,
            attention_mask=real.long(),
            position_ids=positions,
            output_hidden_states=True,
            use_cache=False,
        )
        watched = [out.hidden_states[depth] for depth in self._depths]
        return torch.stack([*watched, out.last_hidden_state], 2)
