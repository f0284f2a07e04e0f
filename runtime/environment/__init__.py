"""Rewards on host workers: functions in processes of their own, and judges behind a URL."""
