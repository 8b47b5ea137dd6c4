"""How a forward pass is run where the model's own forward is not the fastest way."""
