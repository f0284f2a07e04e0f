"""Commands about a running or finished run: watch it, re-plan it, replay a batch that it skipped."""
