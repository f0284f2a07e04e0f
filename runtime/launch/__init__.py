"""Processes: how they start, find each other, and are asked to stop."""
