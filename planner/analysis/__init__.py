"""Analyses of a plan: explanation, what-if, alternatives, re-planning, and predictions against measurements."""
