"""Early exit: the target's first layers draft, with an optional trained adapter."""
