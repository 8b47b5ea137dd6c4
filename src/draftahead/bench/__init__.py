"""Measuring: sides interleaved in one run, medians with spread, the memory limit beside them."""
