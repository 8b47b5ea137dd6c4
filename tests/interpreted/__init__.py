"""GPU kernels run by Triton's interpreter on the CPU, beside plain torch.

    TRITON_INTERPRET=1 pytest tests/interpreted

Triton must be told before it is imported, so tests/backends/cuda/test_interpreted_kernels.py runs
these in a process of its own; without the variable nothing here is collected.
"""
