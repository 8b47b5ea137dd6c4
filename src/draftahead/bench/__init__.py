"""Measurements: configurations interleaved in one run, medians, latency by number of tokens."""
