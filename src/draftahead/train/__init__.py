"""Trains drafters: generated data, hidden states, one loop that selects by simulated acceptance."""
