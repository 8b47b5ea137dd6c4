"""Every GPU kernel compiles for sm_90 as the real code launches it, and fits into the device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", "3.7", reason="Triton 3.7 is not installed: see extra gpu-check")

from draftahead.backends.cuda import kernels as forward_kernels
from draftahead.drafters.eagle import cuda_kernels as tree_kernels
from gpu_check.record import differences, plain
from gpu_check.sm90 import SHARED_MEMORY, Launch, compiled_launches
from gpu_check.variants import uncaptured, variants

# To compile all variants takes twice as long; scripts/gpu_hashes.py does.
CHOSEN = (
    "llama bfloat16",
    "llama float16, one node",
    "qwen2 bfloat16, one node",
    "qwen3 bfloat16, three trees",
    "head bfloat16, greedy",
    "head bfloat16, sampled",
    "large llama, many nodes",
    "large head",
)


@pytest.fixture(scope="module")
def launches() -> dict[str, list[Launch]]:
    found = {}
    for name, _, run in variants():
        if name.startswith(CHOSEN):
            with compiled_launches() as launched, uncaptured():
                run()
            found[name] = launched
    return found


def kernels() -> set[str]:
    """All of our modules; names of functions that kernels call begin with an underscore."""
    modules = vars(forward_kernels) | vars(tree_kernels)
    return {name for name, value in modules.items() if hasattr(value, "warmup") and name[0] != "_"}


def test_every_kernel_compiles(launches: dict[str, list[Launch]]) -> None:
    assert {launch.kernel for found in launches.values() for launch in found} == kernels()
    assert len(kernels()) == 13


def test_shared_memory_is_within_the_bound_of_the_device(
    launches: dict[str, list[Launch]],
) -> None:
    for name, found in launches.items():
        for launch in found:
            assert launch.shared <= SHARED_MEMORY, (name, launch.kernel, launch.shared)
    assert max(launch.shared for found in launches.values() for launch in found) > 128 * 1024


def test_a_record_shows_arguments_in_each_others_place(launches: dict[str, list[Launch]]) -> None:
    found = launches["llama bfloat16, one node"]
    record = {"it": plain(found, checksums=False)}
    assert not differences(record, {"it": plain(found, checksums=False)})
    linear = next(launch for launch in found if launch.kernel == "linear")
    linear.arguments[3], linear.arguments[4] = linear.arguments[4], linear.arguments[3]
    (difference, *_) = differences(record, {"it": plain(found, checksums=False)})
    assert "linear" in difference and "arguments: [3]" in difference
