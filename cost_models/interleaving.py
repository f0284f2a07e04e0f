"""Seconds of a pipeline that passes every rank several times, from those of the plain one."""

from __future__ import annotations

from meshwright.cost_models.cost import Cost, Term
from meshwright.cost_models.pipeline import BUBBLE, MESSAGES
from meshwright.profiles.layout import Layout


def interleaved(plain: Cost, layout: Layout, num_batches: int) -> Cost:
    """A training stage whose ranks hold v = `layout.vpp` chunks each, from its `plain` cost by 1F1B on the same ranks.

    Each micro-batch is sent v times as often. The first one passes a v-th of the other stages' layers before the
    slowest stage has work, and as many messages as before (Narayanan et al., arXiv:2104.04473, section 2.2.2).
    """
    once = sum(term.amount for term in plain.terms if term.name == MESSAGES) / num_batches
    passed = (layout.pp - 1) * once
    return Cost(tuple(_term(term, layout.vpp, passed) for term in plain.terms))


def _term(term: Term, vpp: int, passed: float) -> Term:
    if term.name == MESSAGES:
        return Term(term.name, vpp * term.amount, term.source)
    if term.name == BUBBLE:
        return Term(term.name, passed + (term.amount - passed) / vpp, term.source)
    return term
