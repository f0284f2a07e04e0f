"""The files that a run writes: metrics, traces, evaluations, restarts, samples and its lock."""
