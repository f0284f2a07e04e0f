"""How many sequences a replica may hold back beyond a batch in a turn: the overcommit grows from nothing.

A turn that overcommits delivers the sequences that end first, so the long ones are held back. Once as many are held
back as ever will be, what is delivered is what is drawn: every sequence is delivered, and as many begin as are
delivered. Until then it is not. Of the n batches that were delivered first, all tokens together are those drawn less
those of the sequences held back, whose mean is the length-biased one (the inspection paradox: a sequence that is met
under way is long in proportion to its length; Cox, Renewal Theory, 1962, section 5). Whatever the order of delivery,
the tokens that are held back are therefore missing from the first batches: a start that overcommits in full takes all
of them from the first few, whose responses have a third of the mean length, and the same holds of partial rollouts
(Kimi k1.5, arXiv:2501.12599, section 2.6; APRIL, arXiv:2509.18521).

What can be chosen is how many batches they are spread over. In each step a replica holds back at most one of
`ROWS_PER_DEFERRAL` of its rows more than in the step before.
"""

from __future__ import annotations

ROWS_PER_DEFERRAL = 32
"""The longest of 32 geometric lengths is four times as long as the mean: while the overcommit grows, which takes 32
steps where it is a whole batch, a batch then lacks 3 to 10 % of what is drawn, and nothing afterwards."""


def held_back(step: int, before: int, most: int, num_rows: int) -> int:
    """Sequences that a replica of `num_rows` rows has in flight beyond its batch in the turn that delivers `step`.

    `before` were left by the turn before it, `most` are allowed now.
    """
    more = num_rows * (step + 1) // ROWS_PER_DEFERRAL - num_rows * step // ROWS_PER_DEFERRAL
    return min(most, before + more)


def steps_to_grow(most: int, num_rows: int) -> int:
    """Steps until a replica that begins with nothing in flight holds back as many as it may."""
    return -(-most * ROWS_PER_DEFERRAL // num_rows)
