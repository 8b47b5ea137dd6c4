"""What flows through the engine: drafts, batches, verdicts, counts; and the device seam."""
