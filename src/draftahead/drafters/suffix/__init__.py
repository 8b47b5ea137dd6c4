"""Suffix matching: trees of what followed the longest matching end of the text."""
