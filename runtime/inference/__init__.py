"""The generation engine: continuous batching on a paged KV cache, over the ranks of one replica."""
