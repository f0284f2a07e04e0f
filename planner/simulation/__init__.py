"""Simulation of a plan's program in virtual time, with sampled lengths."""
