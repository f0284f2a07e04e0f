"""Formulates a job as an optimisation problem, and assembles plans from the solver's answers."""
