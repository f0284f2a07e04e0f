"""Where tensors live: the device of a rank, its memory, and how it is watched."""
