"""A run from start to end: what every rank does, instruction by instruction, on a device or rehearsed."""
