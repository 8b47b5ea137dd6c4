"""Training data: prompts, and the target's own continuations of them.

A drafter learns to predict what its target generates. Generated data is written in files, each
complete once it exists, so that an interrupted run resumes and several processes share the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from draftahead.bench.prompts import BenchPrompt
from draftahead.core.sampling_params import SamplingParams
from draftahead.drafters.head_files import write_tensors
from draftahead.errors import ConfigError
from draftahead.loader.stored import weight_of

if TYPE_CHECKING:
    from draftahead.llm import LLM

log = logging.getLogger(__name__)

FILES = "answers-*.safetensors"  # of generated data; tensors: tokens, starts, answers
SETTINGS = "answers.json"  # what the files were generated from
HELD_OUT = 0.02  # share of the texts that is held out, unless a folder is given
MAX_HELD_OUT = 256  # texts
BATCHES_PER_FILE = 8  # a smaller number loses less work at an interruption


@dataclass(frozen=True)
class Dataset:
    """Concatenated texts. The first `prompt_lengths[i]` tokens of text i are its prompt; the others
    are to be learned."""

    tokens: Tensor  # int32
    lengths: Tensor  # int64 [texts]
    prompt_lengths: Tensor  # int64 [texts]

    @cached_property
    def starts(self) -> Tensor:
        """[texts + 1] Text i is `tokens[starts[i]:starts[i + 1]]`."""
        return F.pad(self.lengths.cumsum(0), (1, 0))

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> Tensor:
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def num_learned(self) -> int:
        """Tokens to learn."""
        return int((self.lengths - self.prompt_lengths).sum())

    @staticmethod
    def of(texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Dataset:
        """From pairs of a prompt and its continuation."""
        return Dataset(
            torch.tensor([token for text in texts for part in text for token in part]).int(),
            torch.tensor([len(prompt) + len(continuation) for prompt, continuation in texts]),
            torch.tensor([len(prompt) for prompt, _ in texts]),
        )

    @staticmethod
    def joined(parts: Sequence[Dataset]) -> Dataset:
        fields = zip(*((p.tokens, p.lengths, p.prompt_lengths) for p in parts), strict=True)
        return Dataset(*map(torch.cat, fields))

    def subset(self, indices: Sequence[int]) -> Dataset:
        tokens, at = torch.cat([self.text(i) for i in indices]), list(indices)
        return Dataset(tokens, self.lengths[at], self.prompt_lengths[at])

    def most_frequent(self, size: int, vocab_size: int) -> Tensor:
        """The `size` most frequent tokens to learn, by id: a draft vocabulary."""
        within = torch.arange(len(self.tokens)) - self.starts[:-1].repeat_interleave(self.lengths)
        learned = within >= self.prompt_lengths.repeat_interleave(self.lengths)
        counts = torch.bincount(self.tokens[learned].long(), minlength=vocab_size).double()
        # Among equals the lower id: tokenizers number frequent tokens first.
        counts -= torch.arange(vocab_size) / (2 * vocab_size)
        return counts.topk(min(size, vocab_size)).indices.sort().values


# ---------------------------------------------------------------------------------- prompts


def encode_prompts(
    given: Sequence[BenchPrompt], llm: LLM
) -> tuple[list[list[int]], Dataset | None]:
    """The ids of prompts to continue; and the `text`s, if any, which are training data as they
    are."""
    texts = [prompt.encode(llm) for prompt in given if prompt.text is not None]
    prompts = [prompt.encode(llm) for prompt in given if prompt.text is None]
    return prompts, Dataset.of([(ids[:1], ids[1:]) for ids in texts]) if texts else None


# --------------------------------------------------------------------------- generated data


def generate_data(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    params: SamplingParams,
    max_length: int | None = None,
    shard: tuple[int, int] = (1, 1),
    report: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """Continues all prompts of at most `max_length` tokens, into files in `folder`; existing files
    are kept. Shard (2, 3) writes every third file from the second on."""
    context, max_tokens = llm.engine.verifier.max_context, params.max_tokens or 0
    if max_tokens >= context:
        raise ConfigError(
            f"generating {max_tokens} tokens leaves no room for prompts in a context of {context}: "
            "lower max_tokens, or raise max_context"
        )
    max_length = min(max_length or context, context - max_tokens)
    # Sorted by length: a batch takes as long as its longest prompt.
    kept = sorted((list(p) for p in prompts if 0 < len(p) <= max_length), key=len)
    if not kept:
        raise ConfigError(f"no prompt has at most {max_length} tokens: raise max_length or context")
    log.info("%d of %d prompts have at most %d tokens", len(kept), len(prompts), max_length)
    num_files = -(-len(kept) // (llm.engine.scheduler.max_batch * BATCHES_PER_FILE))
    num_files = _check_settings(folder, llm.model, kept, params, num_files)
    tokens = 0
    own_files = range(shard[0] - 1, num_files, shard[1])
    for done, number in enumerate(own_files, start=1):
        file = folder / FILES.replace("*", f"{number:05d}")
        if not file.exists():
            todo = kept[number::num_files]
            continuations = [out.token_ids for out in llm.generate(todo, params)]
            _write(Dataset.of(list(zip(todo, continuations, strict=True))), file)
            tokens += sum(map(len, continuations))
        report(f"{done} of {len(own_files)} files, {tokens} new tokens")
    return read_data(folder)


def _check_settings(
    folder: Path, model: Any, prompts: list[list[int]], params: SamplingParams, num_files: int
) -> int:
    """The number of files: the noted one where an earlier run, maybe with another batch size, has
    begun. Data of other prompts, models or parameters is refused."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    settings = {"model": model_digest(model), "prompts": digest, "sampling": repr(params)}
    file = folder / SETTINGS
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}.part")  # other processes may write it as well
        part.write_text(json.dumps({**settings, "files": num_files}) + "\n", "utf-8")
        part.replace(file)
        return num_files
    try:
        noted = json.loads(file.read_text("utf-8"))
    except ValueError:
        noted = {}
    num_files = int(noted.pop("files", 0))
    if noted != settings:
        raise ConfigError(
            f"{folder} holds data of other prompts, of another model or with other sampling "
            "parameters: name another folder, or delete that one"
        )
    return num_files


def model_digest(model: Any) -> str:
    """Identifies a model by its first embeddings, wherever it was loaded from."""
    embedding = model.get_input_embeddings()
    first = torch.arange(min(64, embedding.num_embeddings), device=model.device)
    rows = weight_of(embedding, first).detach().float().cpu()
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()


def write_texts(texts: Dataset, folder: Path) -> None:
    """Writes texts that need no generation, to be read along with the generated data."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(texts, folder / FILES.replace("*", "given"))


def _write(data: Dataset, file: Path) -> None:
    tensors = {"tokens": data.tokens, "starts": data.starts, "answers": data.prompt_lengths}
    write_tensors(tensors, file)


# ---------------------------------------------------------------------------------- reading


def read_data(folder: Path) -> Dataset:
    files = sorted(folder.glob(FILES))
    if not files:
        raise ConfigError(f"{folder} holds no training data: `draftahead train data` writes it")
    return Dataset.joined([_read(file) for file in files])


def check_vocabulary(data: Dataset, folder: Path, vocab_size: int) -> None:
    if bool((data.tokens >= vocab_size).any()):
        raise ConfigError(
            f"{folder} holds tokens outside the model's vocabulary of {vocab_size}: it is data of "
            "another model"
        )


def _read(file: Path) -> Dataset:
    try:
        held = load_file(file)
        return Dataset(held["tokens"], held["starts"].diff(), held["answers"])
    except (OSError, SafetensorError, KeyError) as problem:
        raise ConfigError(
            f"{file} is damaged or holds no training data ({problem}): delete it, and let "
            "`draftahead train data` write it again"
        ) from None


def read_for_training(folder: Path, held_out: Path | None, *, seed: int) -> tuple[Dataset, Dataset]:
    """Texts to train on and texts to evaluate on: from a folder each, or a random part held out."""
    texts = read_data(folder)
    if held_out is not None:
        return texts, read_data(held_out)
    count = min(MAX_HELD_OUT, max(1, round(HELD_OUT * len(texts))))
    if len(texts) <= count:
        raise ConfigError(f"{folder} holds {len(texts)} text: too few to train and to evaluate")
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    return texts.subset(sorted(order[count:])), texts.subset(order[:count])


def digest(model: Any, *data: Dataset) -> str:
    """Identifies a model and data."""
    found = hashlib.sha256(model_digest(model).encode())
    for texts in data:
        for tensor in (texts.tokens, texts.starts, texts.prompt_lengths):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()
