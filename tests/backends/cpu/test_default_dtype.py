"""torch's default dtype is the user's: it must not reach memory that the kernels read and write."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftahead.backends.cpu import linear
from llama_shaped import needs_kernels

# In a process of its own, which memory of another size than the kernels take would kill.
SCRIPT = """
import torch
from draftahead import LLM, SamplingParams

torch.set_num_threads(1)
params = SamplingParams(temperature=0, max_tokens=8)
prompts = ["The capital of France is", "One, two, three, four,"]


def texts(llm):
    return [out.text for out in llm.generate(prompts, params)]


llm = LLM("smollm2", device="cpu", max_batch=2, max_context=256)
expected = texts(llm)
for dtype in (torch.bfloat16, torch.float64):
    torch.set_default_dtype(dtype)
    assert texts(llm) == expected, dtype
    made_so = LLM("smollm2", device="cpu", max_batch=2, max_context=256)
    assert made_so.engine.verifier.runner.batch_invariant
    assert texts(made_so) == expected, dtype
print("alive")
"""


@needs_kernels
@pytest.mark.model
def test_texts_and_the_process_survive_another_default_dtype() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()[-5:]) == (0, "alive"), done.stderr[-2000:]


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_a_linear_layer_of_no_rows(shape: tuple[int, ...]) -> None:
    for layer in (torch.nn.Linear(64, 48), linear.Int8Linear(torch.nn.Linear(64, 48))):
        found = linear.run_linear(layer, torch.zeros(shape))
        assert found.shape == (*shape[:-1], 48)
        with linear.SmallBatchLinears(layer).patched():
            assert layer(torch.zeros(shape)).shape == (*shape[:-1], 48)
