"""Low-rank screening of the LM head: logits of a quarter of the rank pick about 200 tokens, whose
exact logits are then computed.

After SVD-softmax (Shim et al., NeurIPS 2017), with a basis for the head's own outputs, which lie
near a low-dimensional subspace. The basis is in a separate file beside the head's, so that other
servers can load the head.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftahead.drafters.head_files import tensors_in, write_tensors
from draftahead.errors import ConfigError, DraftaheadError

FILE = "screening.safetensors"
# The rank is a multiple of it: int8 weights are quantized in groups of a multiple of 64.
RANK_STEP = 64
# hidden_size / rank: a smaller rank reads fewer bytes and misses the argmax more often.
RANK_SHARE = 4
# Share of the outputs' mean variance that is added in all directions, for outputs unlike those of
# the fit.
SMOOTHING = 1e-3


class Screening(NamedTuple):
    """An output h [H] is about `basis.T @ projection @ h`."""

    projection: Tensor  # [rank, H]
    basis: Tensor  # [rank, H]


def fit(moments: Tensor, vocab_rows: Tensor) -> Screening | None:
    """The screening with the least squared error of the logits `vocab_rows` [V, H] @ h, for outputs
    h with second moments `moments` [H, H] (the mean of h h'). None if H is too small for a rank of
    RANK_STEP, or the moments are not finite."""
    hidden_size, variance = len(moments), float(moments.diagonal().mean())
    rank = RANK_STEP * round(hidden_size / RANK_SHARE / RANK_STEP)
    if not rank or not moments.isfinite().all() or variance <= 0:
        return None
    eigenvalues, eigenvectors = torch.linalg.eigh(moments.double())
    eigenvalues = eigenvalues.clamp(min=0) + SMOOTHING * variance
    root, inverse = (eigenvectors * eigenvalues**p @ eigenvectors.T for p in (0.5, -0.5))
    # A constant added to all logits does not change their order.
    whitened = (vocab_rows - vocab_rows.mean(0)).double() @ root
    best = torch.linalg.eigh(whitened.T @ whitened)[1][:, -rank:].flip(1)
    screening = Screening((inverse @ best).T.float().cpu(), (root @ best).T.float().cpu())
    return screening if all(part.isfinite().all() for part in screening) else None


def save(screening: Screening | None, folder: Path) -> None:
    """Replaces the screening of an earlier head in the folder."""
    if screening is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        write_tensors(screening._asdict(), folder / FILE)


def load(folder: Path, hidden_size: int) -> Screening | None:
    """The screening beside a head, if there is one. A broken or foreign file is left out with a
    warning: the head works without it."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        screening = Screening(**tensors_in(file, list))
        _check(screening, hidden_size)
    except (TypeError, DraftaheadError) as problem:
        warnings.warn(
            f"{file} is left out, and the head slower on a CPU ({problem}): remove it",
            stacklevel=2,
        )
        return None
    return Screening(screening.projection.float(), screening.basis.float())


def _check(screening: Screening, hidden_size: int) -> None:
    shape = screening.projection.shape
    fits = len(shape) == 2 and shape == screening.basis.shape and shape[1] == hidden_size
    if not fits or not shape[0] or shape[0] % RANK_STEP:
        raise ConfigError(f"it does not belong to a head of hidden size {hidden_size}")
    if not all(part.isfinite().all() for part in screening):
        raise ConfigError("it holds values that are not finite")
