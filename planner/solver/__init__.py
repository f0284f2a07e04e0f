"""Solves a scheduling problem to optimality or to a proven gap.

It knows neither stages nor seconds, and is the only part of the planner that imports OR-Tools.
"""
