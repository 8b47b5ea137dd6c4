"""Blocks of texts with the target's states: what every head learns from.

Texts of like length stand in a block side by side, ending together: so the answers, which come
last, fill a window at the right edge, and what is unrolled or scored is a plain slice.

Shapes: B texts, T tokens, W watched states, H hidden.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftahead.errors import ConfigError
from draftahead.train.texts import Texts

POOL = 64  # blocks whose texts are sorted by length together


@dataclass(frozen=True)
class Block:
    tokens: Tensor  # [B, T] int64; texts end at T, padding stands before them
    real: Tensor  # [B, T] bool: no padding
    positions: Tensor  # [B, T] int64, from 0 at a text's first token
    learnt: Tensor  # [B, T] bool: tokens that are to be foretold
    window: int  # tokens at the right edge that hold all of those
    states: Tensor  # [B, T, W, H] after the watched layers
    last: Tensor  # [B, T, H] after all of them, behind the last norm


class Blocks:
    """Blocks of some texts, epoch after epoch, in an order that a seed decides.

    `keep`: bytes of states that are kept once computed; beyond, they are computed anew each time.
    They stay on the device, or in a nameless file in `folder`.
    """

    def __init__(
        self,
        texts: Texts,
        model: Any,
        depths: Sequence[int],
        *,
        tokens: int,
        longest: int | None = None,
        seed: int = 0,
        keep: int = 0,
        folder: Path | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._texts, self._model, self._depths = texts, model, tuple(depths)
        self._budget, self._seed, self._share = tokens, seed, share
        layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        if not all(0 < depth <= layers for depth in depths):
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
        self._kept = _Kept(model, self._depths, keep, self._cut, folder)

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
        if len(groups) < of:
            raise ConfigError(
                f"{of} processes and {len(groups)} blocks of texts: fewer processes, or fewer "
                "tokens to a block"
            )
        return groups[mine : len(groups) - len(groups) % of : of]  # as many for each

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
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        states = self._kept(group, tokens, real, positions)
        return Block(tokens, real, positions, learnt, window, states[:, :, :-1], states[:, :, -1])


class _Kept:
    """The target's states of texts, computed once as far as there is room to keep them."""

    def __init__(
        self,
        model: Any,
        depths: tuple[int, ...],
        room: int,
        lengths: list[int],
        folder: Path | None,
    ) -> None:
        self._model, self._depths = model, depths
        hidden = int(model.config.get_text_config(decoder=True).hidden_size)
        size = (len(depths) + 1, hidden)
        fits = room // (size[0] * size[1] * model.dtype.itemsize)
        self._starts: dict[int, int] = {}
        total = 0
        for index, length in enumerate(lengths):
            if total + length > fits:
                break
            self._starts[index] = total
            total += length
        self._lengths, self._done = lengths, set[int]()
        # All of it is zero at first: where a text is padded, what stands before it is read.
        if folder is None or not total:
            self._store = torch.zeros(total, *size, dtype=model.dtype, device=model.device)
        else:
            self._store = _on_disk(folder, (total, *size), model.dtype)

    @torch.no_grad()
    def __call__(self, group: list[int], tokens: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        if all(index in self._done for index in group):
            width = tokens.shape[1]
            starts = [self._starts[i] - (width - self._lengths[i]) for i in group]
            at = (torch.tensor(starts)[:, None] + torch.arange(width)).clamp(min=0)
            return self._store[at.to(self._store.device)].to(tokens.device)
        found = self._computed(tokens, real, positions)
        for row, index in enumerate(group):
            start, size = self._starts.get(index), self._lengths[index]
            if start is not None and index not in self._done:
                self._store[start : start + size] = found[row, -size:].to(self._store.device)
                self._done.add(index)
        return found

    def _computed(self, tokens: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """[B, T, W + 1, H]; the last are those behind the model's last norm."""
        out = self._model.get_decoder()(
            input_ids=tokens,
            attention_mask=real.long(),
            position_ids=positions,
            output_hidden_states=bool(self._depths),
            use_cache=False,
        )
        watched = [out.hidden_states[depth] for depth in self._depths]
        return torch.stack([*watched, out.last_hidden_state], 2)


def _on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a file that has no name and is gone with the process, however it ends."""
    size = math.prod(shape) * dtype.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is no good news later
            held = np.memmap(file, mode="r+", shape=(size,))
    except OSError as problem:
        raise ConfigError(
            f"no room for {size / 1e9:.2f} GB of states in {folder} ({problem.strerror}): keep "
            "fewer of them, or name another folder"
        ) from None
    return torch.from_numpy(held).view(dtype).view(shape)
