"""Sequences in flight on a replica: when they start, and how many tokens they hold in the KV cache."""
