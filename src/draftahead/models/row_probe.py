"""Whether a token's logits depend on its neighbours in a forward.

Lossless drafting rests on rows that are computed each for itself: what a drafted token or another
sequence of the batch holds must not change the target's distribution. Quantization that scales
activations by the largest of all rows (torch.ao's dynamic one), or treats columns apart where any
row has an outlier (bitsandbytes' int8), breaks that by some per cent of a logit's size. No
acceptance rule can help there: the distribution that a draft is compared with is another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftahead.backends.own_code import foreign_code
from draftahead.backends.select import CPU_KERNELS, CUDA_KERNELS
from draftahead.errors import UnsupportedModelError
from draftahead.models.runner import ModelRunner
from draftahead.models.support import text_config

PROMPT, COMPARED, OTHERS = 4, 4, 4  # tokens
_ROW_BY_ROW = (
    *("torch.nn.modules.", "transformers.models.", "transformers.activations"),
    *("transformers.pytorch_utils", "draftahead."),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse_dependent_rows(runner: ModelRunner) -> None:
    """Raises UnsupportedModelError for a model whose logits depend on a row's neighbours."""
    by_kernels = runner.backend_choice.name in (CPU_KERNELS, CUDA_KERNELS)
    if by_kernels or _computes_each_row(runner.model) or runner.max_context < PROMPT + 2:
        return
    gap, allowed = dependence(runner)
    if not gap <= allowed:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__}'s logits for a token depend on the other tokens of the "
            f"forward pass (by {gap:.1e} of their size), as with weights that are quantized with "
            "activations scaled for all tokens together; so drafting cannot be lossless: use "
            "drafter='none', another quantization (quantize='int8' scales each token by itself), "
            "or lossless=False"
        )


def _computes_each_row(model: Any) -> bool:
    """Whether it is known without a forward, as of most models: transformers' and torch's own code
    over plain numbers computes each row for itself (and our kernels do). It saves a second at load
    where forwards are slow."""
    modules = list(model.modules())
    if not all(type(module).__module__.startswith(_ROW_BY_ROW) for module in modules):
        return False
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_quantized for t in tensors)
    return plain and foreign_code(model) is None


def tolerance(dtype: torch.dtype, *, same_shape: bool, has_experts: bool) -> float:
    """How far logits may differ, relative to their norm.

    In forwards of one shape, rows that are computed each for itself give the same bits whatever the
    others hold: 0 was measured for each dense architecture of the tests in every dtype. One unit of
    rounding (eps) is allowed, for kernels that add in varying order, and at least 1e-4, which is
    far below what changes a text. Experts are products over as many rows as were sent to them, so
    their rounding follows the neighbours: 4 eps. Between forwards of different shapes all products
    may round otherwise: 3 eps were measured with smollm2's 30 layers in bfloat16, 16 are allowed.
    """
    units = 16 if not same_shape else 4 if has_experts else 1
    return max(1e-4, units * torch.finfo(dtype).eps)


@torch.inference_mode()
def dependence(runner: ModelRunner) -> tuple[float, float]:
    """The largest change of logits by neighbours, and what rounding allows for. Of changes that
    exceed what is allowed the largest, of others too."""
    config, dtype = text_config(runner.model), runner.cache.dtype
    experts = any(getattr(config, name, 0) for name in _EXPERTS)
    by_shape = tolerance(dtype, same_shape=False, has_experts=experts)
    by_value = tolerance(dtype, same_shape=True, has_experts=experts)
    prompt, compared, small, large = _tokens(runner)
    slots = range(min(2, runner.cache.num_slots))
    try:
        runner.prefill(0, prompt)
        root = compared[:1]
        alone = _logits(runner, [root], 1)
        with_small = _logits(runner, [compared + small], COMPARED)
        with_large = _logits(runner, [compared + large], COMPARED)
        changes = [(_change(with_small[:1], alone), by_shape)]
        changes += [(_change(with_small[i], with_large[i]), by_value) for i in range(COMPARED)]
        if len(slots) > 1:  # a sequence beside it, at its first position, where outliers are
            runner.cache.tokens_in[1].clear()
            beside = [_logits(runner, [root, [mate]], 1) for mate in (small[0], large[-1])]
            changes += [(_change(beside[0], alone), by_shape), (_change(*beside), by_value)]
    finally:
        for slot in slots:
            runner.cache.erase(slot, 0, PROMPT + 2 * (COMPARED + OTHERS))
    return max(changes, key=lambda change: change[0] / change[1])


def _tokens(runner: ModelRunner) -> tuple[list[int], list[int], list[int], list[int]]:
    """A prompt, tokens to compare, and others of the smallest and of the largest embeddings."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.vocab_size, (64,), generator=generator)
    embedded = runner.model.get_input_embeddings()(ids.to(runner.device))
    by_size = ids[embedded.float().norm(dim=-1).argsort().cpu()].tolist()
    first = ids.tolist()
    return first[:PROMPT], first[-COMPARED:], by_size[:OTHERS], by_size[-OTHERS:]


def _logits(runner: ModelRunner, nodes: list[list[int]], count: int) -> Tensor:
    """[count, V] of the first nodes of slot 0: a root, and behind it all the others as children."""
    width = len(nodes[0])
    parents = torch.tensor([[-1] + [0] * (width - 1)] * len(nodes)) if width > 1 else None
    return runner.forward(torch.tensor(nodes), parents=parents).logits[0, :count].float().clone()


def _change(one: Tensor, other: Tensor) -> float:
    """Relative to the logits' size without what all of them share, which changes no token."""
    one, other = (x - x.mean(-1, keepdim=True) for x in (one, other))
    return float((one - other).norm() / other.norm().clamp(min=1e-6))
