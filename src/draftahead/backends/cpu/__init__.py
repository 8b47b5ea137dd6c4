"""Forward passes by C++ kernels, in one call."""
