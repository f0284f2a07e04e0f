"""Builds the optimisation problem of a job and turns the solver's answer into a plan: legal choices, Pareto frontiers,
problem, assembled plan."""
