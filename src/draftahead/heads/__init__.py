"""The trained parts that draft from the target's own states, and the files they come in."""
