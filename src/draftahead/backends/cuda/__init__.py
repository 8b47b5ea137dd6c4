"""Forward passes by Triton kernels, or the model's own forward, as CUDA graphs."""
