"""What-if settings that change the number of ranks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.plan.settings import Setting
from meshwright.profiles.cluster import AnyCluster, require_uniform
from meshwright.profiles.errors import BadInput


def size_settings(cluster: AnyCluster, sizes: Sequence[int]) -> tuple[Setting, ...]:
    """Return the setting for each number of ranks: whole nodes, or a part of one. Raises BadInput for any other number,
    and for a cluster of several kinds of nodes."""
    per_node = require_uniform(cluster, "--sizes").ranks_per_node
    settings: list[Setting] = []
    for size in sizes:
        if size < 1 or (size > per_node and size % per_node):
            below, above = size // per_node * per_node, -(-size // per_node) * per_node
            hint = f"use {below} or {above}" if size > per_node else "use 1 or more"
            raise BadInput(f"--sizes {size} is not a number of whole nodes of {per_node} ranks; {hint}.")
        nodes, ranks = (size // per_node, per_node) if size >= per_node else (1, size)
        settings.append({"cluster.nodes": nodes, "cluster.ranks_per_node": ranks})
    return tuple(settings)
