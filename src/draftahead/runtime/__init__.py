"""How passes run fast: kernels of our own where they pay, torch's elsewhere."""
