"""The commands about a run that has been or is under way: a plan from what it has shown, a batch that it skipped."""
