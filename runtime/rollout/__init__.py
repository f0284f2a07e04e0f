"""The generation stage of a run: prompts in, responses and their chunks out, across periods and changes of plan."""
