"""Parts of a model and of its config: adapters, rotary embeddings, sliding windows, fp8 weights, pipeline splits."""
