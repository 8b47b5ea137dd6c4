"""EAGLE-3 heads: the drafter, the head, its files, and how its forward is run."""
