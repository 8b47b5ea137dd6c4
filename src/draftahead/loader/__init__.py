"""Finding and loading models: hub ids, folders, GGUF files, the embedded model."""
