"""Measurements: configurations interleaved in one run, medians, latency by number of tokens."""

PLAIN = "none"  # the configuration that speed-ups refer to
OVERALL = "overall"  # the task of results over all prompts
