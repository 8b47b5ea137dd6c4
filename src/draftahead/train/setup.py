"""What every training starts with: the target, its data, the processes."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from draftahead.core.device import gpu_count
from draftahead.errors import ConfigError
from draftahead.loader import hub
from draftahead.loader.progress import ProgressCallback, no_progress
from draftahead.models.support import text_config
from draftahead.train.dataset import Dataset, model_digest, read_data

HELD_OUT = 0.02  # share of the texts that is held out, unless a folder is given
MAX_HELD_OUT = 256  # texts


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    model: Any  # the target
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    processes: PartialState  # `accelerate launch` starts several, each with a GPU

    @property
    def shard(self) -> tuple[int, int]:
        return self.processes.process_index, self.processes.num_processes

    def most_frequent_tokens(self, size: int) -> Tensor:
        """A draft vocabulary."""
        return self.train.most_frequent(size, int(text_config(self.model).vocab_size))

    @property
    def data_digest(self) -> str:
        """Identifies the data and the model."""
        digest = hashlib.sha256(model_digest(self.model).encode())
        for data in (self.train, self.held_out):
            for tensor in (data.tokens, data.starts, data.prompt_lengths):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def prepare(
    model: str,
    data: Path,
    held_out: Path | None,
    *,
    dtype: str | None,
    device: str | None,
    seed: int,
    progress: ProgressCallback = no_progress,
) -> TrainSetup:
    torch.manual_seed(seed)  # all processes start with the same weights
    # Without cpu=True, processes on a machine without GPUs would not form a group.
    on_cpu = device.startswith("cpu") if device else not gpu_count()
    processes = PartialState(cpu=on_cpu)
    own_device = str(processes.device) if processes.num_processes > 1 else device
    target, tokenizer = hub.load(model, dtype=dtype, device=own_device, progress=progress)
    vocab_size = int(text_config(target).vocab_size)

    def read(folder: Path) -> Dataset:
        found = read_data(folder)
        if bool((found.tokens >= vocab_size).any()):
            raise ConfigError(
                f"{folder} holds tokens outside the vocabulary of {model}: data of another model"
            )
        return found

    train = read(data)
    if held_out is not None:
        test = read(held_out)
    else:
        count = min(MAX_HELD_OUT, max(1, round(HELD_OUT * len(train))))
        if len(train) <= count:
            raise ConfigError(f"{data} holds {len(train)} text: too few to train and to evaluate")
        order = list(range(len(train)))
        random.Random(seed).shuffle(order)
        test, train = train.subset(order[:count]), train.subset(sorted(order[count:]))
    return TrainSetup(
        model=target, tokenizer=tokenizer, train=train, held_out=test, processes=processes
    )
