"""Batches of texts with the target's hidden states: the input of every training.

Texts of similar length form a batch, padded on the left: the continuations, which come last, lie in
a window at the right edge, and what is unrolled or evaluated is a slice of it.

Shapes: B texts, T tokens, A auxiliary layers, H hidden size.
"""

from __future__ import annotations

import logging
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
from torch.nn.utils.rnn import pad_sequence

from draftahead.errors import ConfigError
from draftahead.models.support import text_config
from draftahead.train.dataset import Dataset

log = logging.getLogger(__name__)

SORTED_BATCHES = 64  # about this number of batches is sorted by length together


@dataclass(frozen=True)
class TrainBatch:
    tokens: Tensor  # [B, T] int64; texts end at T, padding is on the left
    attention_mask: Tensor  # [B, T] bool: False at padding
    position_ids: Tensor  # [B, T] int64, 0 at a text's first token
    loss_mask: Tensor  # [B, T] bool: tokens to learn
    window: int  # tokens at the right edge that hold all tokens to learn
    aux_hidden: Tensor  # [B, T, A, H] after the auxiliary layers
    last_hidden: Tensor  # [B, T, H] after the last layer and the final norm


class TrainBatches:
    """Batches of a dataset, epoch after epoch, in an order that depends on the seed.

    tokens: of a batch, padding included. max_length: longer texts keep their last tokens.
    cache_bytes: bytes of hidden states kept once computed, on the device or in an unnamed file in
        cache_folder; those beyond are recomputed each epoch.
    shard: (index, count) of this process.
    """

    def __init__(
        self,
        data: Dataset,
        model: Any,
        aux_layers: Sequence[int],
        *,
        tokens: int,
        max_length: int | None = None,
        seed: int = 0,
        cache_bytes: int = 0,
        cache_folder: Path | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        num_layers = int(text_config(model).num_hidden_layers)
        if not all(0 < layer <= num_layers for layer in aux_layers):
            raise ConfigError(
                f"hidden states exist after 1 to {num_layers} layers, not {list(aux_layers)}"
            )
        self._data, self._tokens, self._seed, self._shard = data, tokens, seed, shard
        # The end of a long text is kept: it holds the tokens to learn.
        self._lengths = data.lengths.clamp(max=min(tokens, max_length or tokens))
        # The first token that is left cannot be predicted.
        self._learned = (data.lengths - data.prompt_lengths).minimum(self._lengths - 1)
        self._usable = ((self._lengths >= 3) & (self._learned > 0)).nonzero()[:, 0].tolist()
        if not self._usable:
            raise ConfigError("no text has tokens to learn")
        self._hidden = HiddenStates(
            model, tuple(aux_layers), self._lengths, cache_bytes, cache_folder
        )

    def __len__(self) -> int:
        """Batches per epoch, for this process."""
        return len(self._epoch(0))

    def from_step(self, step: int) -> Iterator[TrainBatch]:
        """An endless stream from batch `step` on, independent of what was read before."""
        epoch = 0
        while step >= (count := len(self._epoch(epoch))):
            step, epoch = step - count, epoch + 1
        while True:
            yield from map(self._batch, self._epoch(epoch)[step:])
            step, epoch = 0, epoch + 1

    def __iter__(self) -> Iterator[TrainBatch]:
        """One epoch."""
        return map(self._batch, self._epoch(0))

    def _epoch(self, number: int) -> list[list[int]]:
        """The texts of each batch of this process."""
        rng = random.Random(f"{self._seed} {number}")
        order = rng.sample(self._usable, len(self._usable))
        pool = SORTED_BATCHES * max(1, self._tokens // 256)
        lengths, batches = self._lengths.tolist(), list[list[int]]()
        for start in range(0, len(order), pool):
            batch: list[int] = []
            for index in sorted(order[start : start + pool], key=lengths.__getitem__):
                if batch and lengths[index] * (len(batch) + 1) > self._tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        rng.shuffle(batches)
        rank, processes = self._shard
        if len(batches) < processes:
            raise ConfigError(
                f"{processes} processes and {len(batches)} batches: use fewer processes, or fewer "
                "tokens per batch"
            )
        return batches[rank : len(batches) - len(batches) % processes : processes]

    def _batch(self, indices: list[int]) -> TrainBatch:
        texts = [self._data.text(i)[-int(self._lengths[i]) :].long() for i in indices]
        tokens = pad_sequence(texts, batch_first=True, padding_side="left")
        from_end = torch.arange(tokens.shape[1], 0, -1)
        attention_mask = from_end <= self._lengths[indices, None]
        learned = self._learned[indices, None]
        device = self._hidden.device
        tokens, attention_mask, loss_mask = (
            x.to(device, non_blocking=True) for x in (tokens, attention_mask, from_end <= learned)
        )
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = self._hidden(indices, tokens, attention_mask, position_ids)
        aux, last, window = hidden[:, :, :-1], hidden[:, :, -1], int(learned.max())
        return TrainBatch(tokens, attention_mask, position_ids, loss_mask, window, aux, last)


class HiddenStates:
    """The target's hidden states, cached within a budget of bytes."""

    def __init__(
        self,
        model: Any,
        aux_layers: tuple[int, ...],
        lengths: Tensor,
        cache_bytes: int,
        cache_folder: Path | None,
    ) -> None:
        self._model, self._aux_layers, self._lengths = model, aux_layers, lengths
        self.device = model.device
        shape = (len(aux_layers) + 1, int(text_config(model).hidden_size))
        self._ends = lengths.cumsum(0)
        capacity = cache_bytes // (math.prod(shape) * model.dtype.itemsize)  # tokens
        self._num_fitting = int((self._ends <= capacity).sum())  # the first texts
        total = int(lengths[: self._num_fitting].sum())
        self._computed = set[int]()
        # Zeros, not `empty`: the padding of a text reads entries that may not be written yet.
        if cache_folder is None or not total:
            self._store = torch.zeros(total, *shape, dtype=model.dtype, device=model.device)
        else:
            self._store = _on_disk(cache_folder, (total, *shape), model.dtype)
        if cache_bytes:
            fit = f"{self._num_fitting} of {len(lengths)} texts"
            log.info("hidden states of %s fit the cache (%s)", fit, cache_folder or model.device)

    @torch.no_grad()
    def __call__(
        self, indices: list[int], tokens: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> Tensor:
        """[B, T, A + 1, H]; the last ones are those after the final norm."""
        if self._computed.issuperset(indices):
            from_end = torch.arange(tokens.shape[1], 0, -1)
            entries = (self._ends[indices, None] - from_end).clamp(min=0)
            return self._store[entries.to(self._store.device)].to(tokens.device)
        output = self._model.get_decoder()(
            input_ids=tokens,
            attention_mask=attention_mask.long(),
            position_ids=position_ids,
            output_hidden_states=bool(self._aux_layers),
            use_cache=False,
        )
        aux = [output.hidden_states[layer] for layer in self._aux_layers]
        hidden = torch.stack([*aux, output.last_hidden_state], 2)
        for row, index in enumerate(indices):
            if index < self._num_fitting and index not in self._computed:
                end, length = int(self._ends[index]), int(self._lengths[index])
                self._store[end - length : end] = hidden[row, -length:].to(self._store.device)
                self._computed.add(index)
        return hidden


def _on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in an unnamed file, which the system removes with the process."""
    size = math.prod(shape) * dtype.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk shows now, not in the middle of a run
                os.posix_fallocate(file.fileno(), 0, size)
            mapped = np.memmap(file, mode="r+", shape=(size,))
    except OSError as problem:
        raise ConfigError(
            f"no room for {size / 1e9:.2f} GB of hidden states in {folder} ({problem.strerror}): "
            "cache fewer, or name another folder"
        ) from None
    return torch.from_numpy(mapped).view(dtype).view(shape)
