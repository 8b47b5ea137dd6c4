"""Which tokens are worth a look, from a fraction of the vocabulary's bytes.

A head's outputs fill few of the directions they could. Through those alone (a quarter of all) a row
of the vocabulary tells roughly how likely its token is, and only the likeliest are computed as they
are (after SVD-softmax, Shim et al., NeurIPS 2017; there by the directions of the rows, here also by
those of the outputs). It lies in a file beside the head: to others it is a head like any.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftahead.drafters.head_files import tensors_in, write_tensors
from draftahead.errors import ConfigError, DraftaheadError

FILE = "shortlist.safetensors"
STEP = 64  # directions are a multiple of it
SHARE = 4  # of all directions, one in so many
SMOOTHING = 1e-3  # of the outputs' usual size, for directions that were never seen


class Screening(NamedTuple):
    """An output h is about `span.T @ sight @ h`."""

    sight: Tensor  # [directions, H]
    span: Tensor  # [directions, H]


def fitted(moments: Tensor, rows: Tensor) -> Screening | None:
    """`moments` [H, H]: the mean of h h' over outputs h, as the vocabulary's `rows` [V, H] take
    them. The best there is for logits of such outputs. None where there are few directions."""
    hidden, usual = len(moments), float(moments.diagonal().mean())
    directions = STEP * round(hidden / SHARE / STEP)
    if not directions or not moments.isfinite().all() or usual <= 0:
        return None
    size, turn = torch.linalg.eigh(moments.double())
    size = size.clamp(min=0) + SMOOTHING * usual
    root, inverse = (turn * size**power @ turn.T for power in (0.5, -0.5))
    apart = (rows - rows.mean(0)).double() @ root  # what all logits share tells nothing
    best = torch.linalg.eigh(apart.T @ apart)[1][:, -directions:].flip(1)
    found = Screening((inverse @ best).T.float().cpu(), (root @ best).T.float().cpu())
    return found if all(part.isfinite().all() for part in found) else None


def save(shortlist: Screening, folder: Path) -> None:
    write_tensors(shortlist._asdict(), folder / FILE)


def load(folder: Path, hidden: int) -> Screening | None:
    """What lies beside a head of this width, if something does. A head does without one that is
    not in order."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        found = Screening(**tensors_in(file, list))
        shape = found.sight.shape
        fits = len(shape) == 2 and shape == found.span.shape and shape[1] == hidden
        if not fits or not shape[0] or shape[0] % STEP:
            raise ConfigError(f"it is not of a head of width {hidden}")
        if not all(part.isfinite().all() for part in found):
            raise ConfigError("it holds numbers that are none")
    except (TypeError, DraftaheadError) as problem:
        said = f"{file} is left out, and the head slower on a CPU ({problem}): remove it"
        warnings.warn(said, stacklevel=2)
        return None
    return Screening(found.sight.float(), found.span.float())


def remove(folder: Path) -> None:
    """What lies there is of a head that will be no more."""
    (folder / FILE).unlink(missing_ok=True)
