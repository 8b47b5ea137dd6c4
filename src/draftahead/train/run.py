"""A training from texts to files: what the heads have in common around the loop."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from draftahead.core.device import gpu_count
from draftahead.errors import ConfigError
from draftahead.loader import hub
from draftahead.train.blocks import Blocks
from draftahead.train.eagle import draft_vocabulary
from draftahead.train.loop import History, Loop, Plan, Task
from draftahead.train.texts import Texts, identity, read_answers

HELD_OUT = 0.02  # of the texts, where no folder with others is named
MOST_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class Material:
    """A target and the texts it gave, one part of them held out."""

    model: Any
    tokenizer: Any
    texts: Texts
    held_out: Texts
    name: str
    processes: PartialState  # `accelerate launch` starts several, each with a GPU

    def blocks(
        self,
        depths: Sequence[int],
        *,
        tokens: int,
        longest: int,
        keep: int,
        folder: Path | None,
        seed: int,
    ) -> Blocks:
        """This process's part of the texts."""
        share = (self.processes.process_index, self.processes.num_processes)
        return Blocks(
            self.texts,
            self.model,
            depths,
            tokens=tokens,
            longest=longest,
            seed=seed,
            keep=keep if folder is None else keep // share[1],  # each has memory, all one disk
            folder=folder,
            share=share,
        )

    def most_used(self, size: int) -> Tensor:
        """A draft vocabulary."""
        vocabulary = int(self.model.config.get_text_config(decoder=True).vocab_size)
        return draft_vocabulary(self.texts, size, vocabulary)

    @property
    def about(self) -> str:
        """The same for the same texts of the same model."""
        found = hashlib.sha256(identity(self.model).encode())
        for texts in (self.texts, self.held_out):
            for part in (texts.tokens, texts.starts, texts.answers):
                found.update(part.numpy().tobytes())
        return found.hexdigest()

    def held_out_blocks(self, depths: Sequence[int], *, tokens: int, longest: int) -> Blocks:
        return Blocks(self.held_out, self.model, depths, tokens=tokens, longest=longest)


def gathered(
    model: str,
    answers: Path,
    held_out: Path | None,
    *,
    dtype: str | None,
    device: str | None,
    seed: int,
    report: hub.Report = hub.silent,
) -> Material:
    torch.manual_seed(seed)  # every process begins with the same weights
    # Processes that are told of no GPU do not find each other unless they are told of the CPU.
    on_cpu = device.startswith("cpu") if device else not gpu_count()
    processes = PartialState(cpu=on_cpu)
    where = str(processes.device) if processes.num_processes > 1 else device
    loaded, tokenizer = hub.load(model, dtype=dtype, device=where, report=report)
    loaded.eval().requires_grad_(False)
    vocabulary = int(loaded.config.get_text_config(decoder=True).vocab_size)

    def read(folder: Path) -> Texts:
        found = read_answers(folder)
        if bool((found.tokens >= vocabulary).any()):
            raise ConfigError(f"{folder} holds tokens that {model} does not have: another model's")
        return found

    texts = read(answers)
    if held_out is not None:
        apart = read(held_out)
    else:
        count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(texts))))
        if len(texts) <= count:
            raise ConfigError(f"{answers} holds {len(texts)} text: too few to learn and to test")
        order = list(range(len(texts)))
        random.Random(seed).shuffle(order)
        apart, texts = texts.chosen(order[:count]), texts.chosen(sorted(order[count:]))
    return Material(
        model=loaded,
        tokenizer=tokenizer,
        texts=texts,
        held_out=apart,
        name=model,
        processes=processes,
    )


def trained(
    material: Material,
    task: Task,
    blocks: Blocks,
    plan: Plan,
    folder: Path,
    *,
    resume: bool,
    told: Callable[[str], None],
) -> History:
    processes = material.processes
    loop = Loop(
        task,
        plan,
        folder,
        blocks.from_step,
        told=told if processes.is_main_process else lambda line: None,
        reduce=_mean_over_processes if processes.num_processes > 1 else lambda tensors: None,
        is_main=processes.is_main_process,
        about=material.about,
    )
    return loop.run(resume=resume)


def _mean_over_processes(gradients: list[Tensor]) -> None:
    """Every process takes the same step, so their weights stay the same."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
