"""GPU kernels checked without a GPU: compiled for sm_90 as the real code launches them. See also
tests/interpreted (the kernels run by Triton's interpreter) and tests/emulated_gpu.py."""
