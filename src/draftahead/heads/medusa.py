"""Medusa heads (Cai et al., arXiv 2401.10774): guesses several tokens ahead from one state.

The target's last state of a token, behind the last norm, tells the next token by the target's own
head. Head h changes that state so that it tells the token h + 1 places further. Heads know nothing
of each other's guesses.

Shapes: H hidden, K heads, D draft vocabulary.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.errors import ConfigError
from draftahead.heads.files import (
    config_beside,
    located,
    plain_state,
    tensors_in,
    write_config,
    write_tensors,
)
from draftahead.runtime.linear import rows_of
from draftahead.support import text_config

FILE = "medusa_lm_head.safetensors"
FILES = (FILE, "medusa_lm_head.pt", "model.safetensors")
MOST_NODES = 63  # of a tree, the root aside
PADDING = 128  # rows by which vocabularies may differ and still hold the same tokens

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
        outputs: Seq[int] = (),
        tokens: Tensor | None = None,
        choices: Seq[Branch] = (),
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
        return head if self.tokens is None else rows_of(head, self.tokens)


def new_heads(
    model: Any, count: int, *, layers: int = 1, tokens: Tensor | None = None
) -> MedusaHeads:
    """Untrained heads that share the target's own, in float32 on its device."""
    hidden = int(text_config(model).hidden_size)
    return MedusaHeads(hidden, count, layers=layers, tokens=tokens).to(model.device)


# --------------------------------------------------------------------------------- the tree


def likeliest_tree(
    chances: Seq[Seq[float]], count: int, least: float = 0.0
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

PREFIX = re.compile(r"medusa_heads?\.")
# Published names, and vLLM's -> those of `MedusaHeads.parts`.
NAMES = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"(\d+)\.\d+\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_heads\.(\d+)\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_head\.weight"): r"lm_heads.0.weight",
    re.compile(r"token_map"): "token_map",
}


def load_heads(source: str | Path, model: Any) -> MedusaHeads:
    """Heads from a folder, a file or a hub id, for a target, on its device and in its dtype."""
    file = located(source, FILES)
    tensors = {_name(name): held for name, held in tensors_in(file, _of_heads).items()}
    numbers = [name.split(".") for name in tensors if ".linear." in name]
    if not numbers:
        raise ConfigError(f"{file} holds no Medusa heads")
    # The file is what counts: published configurations name fewer heads than there are.
    heads = 1 + max(int(part[0]) for part in numbers)
    layers = 1 + max(int(part[1]) for part in numbers)
    rows = [held.shape[0] for name, held in tensors.items() if name.startswith("lm_heads.")]
    if len(rows) not in (0, 1, heads):
        raise ConfigError(f"{file} has {heads} heads and {len(rows)} output matrices")
    text = text_config(model)
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    tokens = tensors.get("token_map")
    if tokens is not None and (tokens.is_floating_point() or tokens.ndim != 1 or not len(tokens)):
        raise ConfigError(f"{file}: token_map is no list of tokens")
    _shorten(tensors, rows)
    found = MedusaHeads(hidden, heads, layers=layers, outputs=rows, tokens=tokens).to(model.dtype)
    parts = found.parts()
    for name, expected in parts.items():
        if name.endswith(".bias"):
            tensors.setdefault(name, expected)  # of blocks without one
        if name not in tensors:
            raise ConfigError(f"{file} is incomplete: {heads} heads, but nothing for {name}")
        if tensors[name].shape != expected.shape:
            raise ConfigError(
                f"{file} holds heads for another model: {name} is {list(tensors[name].shape)} and "
                f"would be {list(expected.shape)} for this target, whose hidden size is {hidden}"
            )
    size = len(tokens) if tokens is not None else vocabulary
    slack = PADDING if tokens is None else 1
    if any(abs(count - size) >= slack for count in rows):
        raise ConfigError(f"{file} holds heads for {rows[0]} tokens, and the target has {size}")
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ConfigError(f"{file} maps to tokens outside the target's vocabulary of {vocabulary}")
    for name, part in parts.items():
        part.copy_(tensors[name])
    choices = config_beside(file).get("medusa_choices")
    if choices is not None:
        found.choices = tuple(checked_tree("medusa_choices", choices, heads))
    return found.to(model.device).eval().requires_grad_(False)


def _of_heads(names: list[str]) -> list[str]:
    """Beside prefixed names lie those of a whole model (Medusa-2); else all must be known."""
    prefixed = [name for name in names if PREFIX.match(name)]
    unknown = [name for name in prefixed or names if _name(name) == ""]
    if unknown:
        raise ConfigError(f"these are no Medusa heads: unknown tensors {', '.join(unknown[:3])}")
    return prefixed or names


def _name(name: str) -> str:
    """Ours for a name in a file; empty if it is none that heads have."""
    name = PREFIX.sub("", name, count=1)
    for pattern, ours in NAMES.items():
        if match := pattern.fullmatch(name):
            return match.expand(ours)
    return ""


def _shorten(tensors: dict[str, Tensor], rows: list[int]) -> None:
    """One matrix of all tokens beside a map: its rows for the draft vocabulary, as vLLM does."""
    tokens = tensors.get("token_map")
    if tokens is not None and len(rows) == 1 and rows[0] > len(tokens):
        tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][tokens]
        rows[0] = len(tokens)


def save_heads(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    vocabulary: int,
    base: str | None = None,
    head: nn.Module | None = None,
) -> None:
    """Published names and a configuration that text-generation-inference and vLLM understand.
    `vocabulary`, `base`: the target's size and name. `head`: the output matrix that the heads share
    with it, for servers that want it in the file (vLLM); it is then read back as the heads' own."""
    tensors = heads.parts()
    is_shared = len(heads.lm_heads) < len(heads)
    for index in range(len(heads.lm_heads)):
        name = "lm_head.weight" if is_shared else f"{index}.{heads.layers}.weight"
        tensors[name] = tensors.pop(f"lm_heads.{index}.weight")
    if head is not None:
        tensors["lm_head.weight"] = plain_state(head)["weight"]
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": base,
        "hidden_size": heads.hidden,
        "vocab_size": vocabulary,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
    }
    if is_shared:
        config["version"] = "2"
    if heads.tokens is not None:
        config["truncated_vocab_size"] = len(heads.tokens)
    if heads.choices:
        config["medusa_choices"] = [list(path) for path in heads.choices]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / FILE)
    write_config(config, folder)
