"""Sequences of a replica that are generated at a time: when they begin, and the tokens that they hold."""
