"""GPU kernels run by Triton's interpreter on the CPU, beside plain torch.

    TRITON_INTERPRET=1 pytest tests/interpreted

Triton must be told before it is imported, so test_gpu_interpreted.py runs these in processes of
their own; without the variable nothing here is collected.
"""
