"""Which tasks must run between which others: the ground of the bounds on work."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import networkx as nx

from meshwright.planner.solver.problem import Problem

_START, _STOP = "<start>", "<stop>"


class Window(NamedTuple):
    """The tasks that start after `after` ended and end before `before` starts; None is the start or end of all."""

    after: str | None
    before: str | None
    between: tuple[str, ...]


def windows(problem: Problem) -> tuple[Window, ...]:
    """Every window with two tasks or more that is not the sum of two others."""
    return _windows(problem.order, tuple((before, after) for before, after, _ in problem.precedences))


@lru_cache(maxsize=8)  # the search asks for the same tasks again and again, with fewer and fewer options
def _windows(order: tuple[str, ...], precedences: tuple[tuple[str, str], ...]) -> tuple[Window, ...]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for task in order:
        graph.add_edge(_START, task)
        graph.add_edge(task, _STOP)
    graph.add_edges_from(precedences)
    below = {node: nx.descendants(graph, node) for node in graph}
    above = {node: nx.ancestors(graph, node) for node in graph}
    found = []
    for after in (_START, *order):
        for before in (*order, _STOP):
            between = below[after] & above[before]
            splits = any(between <= below[node] | above[node] | {node} for node in between)
            if len(between) > 1 and not splits:
                inside = tuple(name for name in order if name in between)
                found.append(Window(None if after == _START else after, None if before == _STOP else before, inside))
    return tuple(found)
