"""Rewards and tools on host workers: their settings in a job, their latencies, and the reward tail of a generation."""
