"""Forward passes by C++ kernels (csrc/), each in one call."""
