"""The generation engine: prompts in, slots, decode steps, responses and their chunks out."""
