"""Checks of the GPU code on a machine without a GPU: kernels compiled for sm_90, kernels run by
Triton's interpreter, and CUDA graphs emulated on the CPU."""
