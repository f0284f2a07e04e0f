"""The environment of rollouts: latencies of rewards and tools, multi-turn lengths, and dynamic sampling."""
