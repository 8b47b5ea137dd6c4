"""The static KV cache, and the attention function that reads it."""
