"""How much to draft, and when not to."""
