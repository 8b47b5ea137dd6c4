"""The decoding loop: which sequences run, and one step over all of them."""
