"""The generation engine: prompts, slots, decode steps, responses and their chunks."""
