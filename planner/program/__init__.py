"""The program of a plan: its instructions, their durations and deadlines, and checks before execution."""
