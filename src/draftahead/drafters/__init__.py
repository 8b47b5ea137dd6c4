"""The drafters: one file each, or one folder with all that belongs to it."""
