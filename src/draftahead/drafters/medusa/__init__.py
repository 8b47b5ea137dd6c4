"""Medusa heads: the drafter, the heads and their files."""
