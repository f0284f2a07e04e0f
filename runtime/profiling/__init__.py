"""Profiling of the runtime's own stage functions and collectives on this machine."""
