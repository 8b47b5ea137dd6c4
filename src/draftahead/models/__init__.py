"""A transformers model with a KV cache: one forward, and the verification of drafts."""
