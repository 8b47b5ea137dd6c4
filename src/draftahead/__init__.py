"""draftahead: speculative decoding of transformers models with provably the same output."""
