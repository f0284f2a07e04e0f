"""The explorer: a local page on which the facts of a job are changed and its plan answers."""
