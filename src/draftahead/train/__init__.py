"""Making drafters: the target's own answers, its states, and a loop that goes by acceptance."""
