"""The job that a user writes: its keys, their limits and rules, its rewards and tools, and its graph of stages."""
