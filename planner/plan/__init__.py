"""The job, the plan for it, and the rules that a plan must keep."""
