"""The device of a rank: its choice, its memory, and its measurement."""
