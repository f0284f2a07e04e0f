"""What can be asked of a plan: why, what if, what else, and how it compares with what was measured."""
