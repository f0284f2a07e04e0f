"""The runtime's own bodies and collectives, timed on this machine."""
