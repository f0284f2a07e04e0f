"""Proves the lower bound of a plan in a document that can be checked without the search and the solver."""
