"""Texts to learn from: prompts, and the answers that the target itself gives to them.

A head learns to say what its target says, so it learns from the target's own words. Answers are
written in parts, each complete when its file is there: what was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftahead.core.sampling_params import SamplingParams
from draftahead.drafters.head_files import write_tensors
from draftahead.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from draftahead.llm import LLM

NOTES = "answers.json"
GROUPS = 8  # batches of answers to a file


@dataclass(frozen=True)
class Texts:
    """Token ids one behind the other. Text i is `tokens[starts[i]:starts[i + 1]]`, and what is to
    be learnt of it begins at `answers[i]`, counted from its own start."""

    tokens: Tensor  # int32
    starts: Tensor  # int64 [texts + 1]
    answers: Tensor  # int64 [texts]

    def __len__(self) -> int:
        return len(self.answers)

    def text(self, index: int) -> Tensor:
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    @staticmethod
    def of(texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Texts:
        """From prompts and answers."""
        ids = [[*prompt, *answer] for prompt, answer in texts]
        lengths = torch.tensor([0, *(len(text) for text in ids)])
        return Texts(
            tokens=torch.tensor([token for text in ids for token in text], dtype=torch.int32),
            starts=lengths.cumsum(0),
            answers=torch.tensor([len(prompt) for prompt, _ in texts]),
        )

    @staticmethod
    def joined(parts: Sequence[Texts]) -> Texts:
        lengths = torch.cat([torch.tensor([0]), *(part.lengths for part in parts)])
        return Texts(
            tokens=torch.cat([part.tokens for part in parts]),
            starts=lengths.cumsum(0),
            answers=torch.cat([part.answers for part in parts]),
        )

    @property
    def learnt(self) -> int:
        """Tokens that are to be learnt."""
        return int((self.lengths - self.answers).sum())

    def chosen(self, indices: Sequence[int]) -> Texts:
        return Texts.of(
            [
                ((text := self.text(i).tolist())[: (at := int(self.answers[i]))], text[at:])
                for i in indices
            ]
        )


# ---------------------------------------------------------------------------------- prompts


def read_prompts(path: Path, llm: LLM) -> tuple[list[list[int]], Texts | None]:
    """A JSON object a line. `prompt`, `messages` or `turns` (of which the first is asked) wait for
    an answer; a `text` is learnt as it stands. Returns the prompts' ids, and the texts if any."""
    prompts: list[list[int]] = []
    whole: list[tuple[list[int], list[int]]] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "text" in entry:
                ids = llm.encode(str(entry["text"]))
                whole.append((ids[:1], ids[1:]))
                continue
            if "messages" in entry:
                asked: Any = entry["messages"]
            else:
                turns = [entry["prompt"]] if "prompt" in entry else entry["turns"]
                if isinstance(turns, str) or not isinstance(said := turns[0], str):
                    raise TypeError("a prompt is a text, and turns are a list of them")
                chat = getattr(llm.tokenizer, "chat_template", None) is not None
                asked = [{"role": "user", "content": said}] if chat else said
            prompts.append(llm.encode(asked))
        except PromptError as problem:
            raise ConfigError(f"{path}, line {number}: {problem}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as problem:
            raise ConfigError(
                f"{path}, line {number}: needs 'prompt', 'messages', 'turns' or 'text' ({problem})"
            ) from None
    if not prompts and not whole:
        raise ConfigError(f"{path} holds nothing to learn from")
    return prompts, Texts.of(whole) if whole else None


def _lines(path: Path) -> list[str]:
    try:
        # Not `splitlines`: a text within a line may hold other ends of lines, as U+2028.
        return path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None


# ---------------------------------------------------------------------------------- answers


def write_answers(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    sampling: SamplingParams,
    longest: int | None = None,
    part: tuple[int, int] = (1, 1),
    told: Callable[[int, int, int], None] = lambda done, of, tokens: None,
) -> Texts:
    """Answers to all prompts of at most `longest` tokens, into files in `folder`; those that are
    there already are left as they are. `part` 2 of 3 does the second third of the files, so that
    several processes can share the work."""
    whole, answer = llm.engine.verifier.max_context, sampling.max_tokens or 0
    if answer >= whole:
        raise ConfigError(
            f"answers of {answer} tokens leave no room for prompts in a context of {whole}: lower "
            "max_tokens, or raise max_context"
        )
    longest = min(longest or whole, whole - answer)
    # Of like length together: a batch is as long as its longest.
    kept = sorted((list(p) for p in prompts if 0 < len(p) <= longest), key=len)
    if not kept:
        raise ConfigError(f"no prompt has at most {longest} tokens: raise the longest, or context")
    batch = llm.engine.scheduler.max_batch
    files = _noted_files(folder, llm.model, kept, sampling, -(-len(kept) // (batch * GROUPS)))
    tokens = 0
    mine = range(part[0] - 1, files, part[1])
    for done, number in enumerate(mine, start=1):
        file = folder / f"answers-{number:05d}.safetensors"
        if not file.exists():
            asked = kept[number::files]
            pairs = []
            for start in range(0, len(asked), batch):
                group = asked[start : start + batch]
                for prompt, said in zip(group, llm.generate(group, sampling), strict=True):
                    pairs.append((prompt, said.token_ids))
            _save(Texts.of(pairs), file)
            tokens += sum(len(answer) for _, answer in pairs)
        told(done, len(mine), tokens)
    return read_answers(folder)


def write_texts(texts: Texts, folder: Path) -> None:
    """Texts that need no answer, to be read along with the others."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(texts, folder / "answers-given.safetensors")


def _noted_files(
    folder: Path, model: Any, prompts: list[list[int]], sampling: SamplingParams, files: int
) -> int:
    """How many files there are to be: as many as when it was begun, maybe with another batch. What
    they are answers to is noted; others may not be mixed with them."""
    key = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    about = {"model": identity(model), "prompts": key, "sampling": repr(sampling)}
    place = folder / NOTES
    folder.mkdir(parents=True, exist_ok=True)
    if place.exists():
        try:
            said = json.loads(place.read_text("utf-8"))
        except ValueError:
            said = {}
        files = int(said.pop("files", 0))
        if said != about:
            raise ConfigError(
                f"{folder} holds answers to other prompts, of another model or with other "
                "settings: name another folder, or delete that one"
            )
        return files
    part = place.with_suffix(f".{os.getpid()}.part")  # several processes may be at it
    part.write_text(json.dumps({**about, "files": files}) + "\n", "utf-8")
    part.replace(place)
    return files


def identity(model: Any) -> str:
    """Of a model's weights, as far as its embeddings tell; the same wherever it was loaded from."""
    some = model.get_input_embeddings().weight.detach()[:64].float().cpu()
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()


def _save(texts: Texts, file: Path) -> None:
    held = {"tokens": texts.tokens, "starts": texts.starts, "answers": texts.answers}
    write_tensors(held, file)


def read_answers(folder: Path) -> Texts:
    files = sorted(folder.glob("answers-*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no answers: `draftahead train answers` writes them")
    return Texts.joined([_read(file) for file in files])


def _read(file: Path) -> Texts:
    try:
        return Texts(**load_file(file))
    except (OSError, SafetensorError, TypeError) as problem:
        raise ConfigError(
            f"{file} is damaged or holds no answers ({problem}): delete it, and let "
            "`draftahead train answers` write it again"
        ) from None
