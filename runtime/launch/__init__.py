"""Processes of a run: starting them, rendezvous between nodes, and stopping."""
