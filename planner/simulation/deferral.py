"""The ramp-up of the overcommit: how many sequences a replica may keep in flight beyond a batch in each period.

A period that overcommits delivers the sequences that end first and defers the long ones. Once the number of deferred
sequences is constant, the delivered lengths have the sampled distribution: every sequence is delivered, and as many
start as are delivered. Before that they do not: the first n batches lack the tokens of the deferred sequences, whose
mean length is biased (inspection paradox: the probability to be in flight is proportional to length; Cox, Renewal
Theory, 1962, section 5). Whatever the order of delivery, these tokens are missing from the first batches. With full
overcommit from the start they are missing from the first few, whose responses have a third of the mean length; the same
is true of partial rollouts (Kimi k1.5, arXiv:2501.12599, section 2.6; APRIL, arXiv:2509.18521).

What can be chosen is the number of batches that they are spread over. In each step a replica defers at most
1/`ROWS_PER_DEFERRAL` of its rows more than in the step before.
"""

from __future__ import annotations

ROWS_PER_DEFERRAL = 32
"""Rows of a replica per additional deferred sequence and step.

The longest of 32 geometric lengths is four times the mean. While the overcommit grows, which takes 32 steps if it is a
whole batch, a batch therefore lacks 3 to 10 % of the sampled tokens, and nothing afterwards.
"""


def num_deferred(step: int, before: int, limit: int, num_rows: int) -> int:
    """Return the sequences that a replica has in flight beyond its `num_rows` rows in the period that delivers `step`.

    `before` is their number in the previous period, `most` the current limit.
    """
    more = num_rows * (step + 1) // ROWS_PER_DEFERRAL - num_rows * step // ROWS_PER_DEFERRAL
    return min(limit, before + more)


def ramp_up_steps(limit: int, num_rows: int) -> int:
    """Return the steps until a replica that starts with nothing in flight has `most` sequences beyond its batch."""
    return -(-limit * ROWS_PER_DEFERRAL // num_rows)
