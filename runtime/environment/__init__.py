"""Rewards and tools on host workers: functions in worker processes, and judges over HTTP."""
