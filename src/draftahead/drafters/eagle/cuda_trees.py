"""Draft trees on a GPU: the missing inputs and all levels as one CUDA graph, verified before the
host has read them (a device draft). Waiting for every level would take longer than the level."""

from __future__ import annotations

from draftahead.backends.base import UnsupportedSpecError
from draftahead.backends.cuda.timing import TimerCache
from draftahead.core.device import device_of
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import Batch
from draftahead.drafters.eagle.cuda_head import CudaEagleHead, TreePlan
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.drafters.eagle.spec import input_projection


class CudaTreeLauncher:
    """Launches trees by a head that the GPU kernels support."""

    def __init__(self, runner: EagleRunner, prefill: HeadPrefill, kernels: CudaEagleHead) -> None:
        self._runner, self._prefill, self._kernels = runner, prefill, kernels
        self._timers = TimerCache(runner.device)

    @staticmethod
    def of(runner: EagleRunner, prefill: HeadPrefill) -> CudaTreeLauncher | None:
        """None without a GPU, and where the kernels do not support the head."""
        if not device_of(runner.device).is_gpu:
            return None
        projection = input_projection(runner.head, runner.embed, runner.draft_to_target)
        if projection is None:
            return None
        try:
            kernels = CudaEagleHead(runner.spec, runner.cache, projection, runner.cos_sin)
        except UnsupportedSpecError:
            return None
        return CudaTreeLauncher(runner, prefill, kernels)

    @property
    def works(self) -> bool:
        """Whether CUDA graphs can be captured."""
        return self._kernels.graphs.can_capture

    def supports(self, batch: Batch, plan: TreePlan) -> bool:
        """Processors depend on the path to a node, which only the device knows."""
        return not batch.modifies_logits and self._kernels.supports(len(batch.sequences), plan)

    def launch(self, batch: Batch, plan: TreePlan) -> DeviceDraft | None:
        """Starts building trees, and returns without waiting. None where that fails; then no input
        was computed."""
        runner, target = self._runner, self._runner.target
        max_missing = min(MAX_MISSING, self._kernels.max_inputs(len(batch.sequences)))
        missing = self._prefill.prepare(batch.sequences, max_missing)
        num_cached = [len(tokens) for tokens in runner.cache.tokens_in[: len(missing)]]
        hidden = target.cache.hidden
        assert hidden is not None
        timer = self._timers.timer((len(missing), plan))
        trees = self._kernels.build_trees(
            missing,
            num_cached,
            [self._entries(slot, len(tokens)) for slot, tokens in enumerate(missing)],
            hidden,
            target.aux_indices(runner.head.config.aux_layers),
            plan,
            timer=timer,
            rng_keys=batch.draft_sampler.target_rng_keys(plan.max_depth) if plan.sampled else [],
            temperatures=[s.temperature for s in batch.sequences] if plan.sampled else [],
        )
        if trees is None:
            return None
        self._prefill.commit(missing)
        return DeviceDraft.of_trees(batch.roots, trees, timer)

    def _entries(self, slot: int, count: int) -> list[int]:
        """Where the target's hidden states of the next `count` inputs lie."""
        start, cache = len(self._runner.cache.tokens_in[slot]), self._runner.target.cache
        return [cache.physical_entry(slot, entry) for entry in range(start, start + count)]
