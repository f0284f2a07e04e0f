"""A plan as a configuration of another trainer: what each can say, the best plan within that, and the files."""
