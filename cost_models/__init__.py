"""Predicted seconds and bytes of a stage under a layout and schedule: pure arithmetic, as named terms with sources."""
