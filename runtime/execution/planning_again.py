"""A run that goes on with fewer nodes than its plan has: planned again for those, from what it has shown so far."""

from __future__ import annotations

import socket
from dataclasses import replace

import torch.distributed as dist

from meshwright.cost_models.question import CostModel
from meshwright.planner.analysis.replan import Paced, of_run, replan, without_nodes
from meshwright.planner.analysis.shown import shown_by
from meshwright.planner.plan.calls import model_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.records.restarts import Restart, write_restart


def for_those_who_came(request: RunRequest) -> RunRequest:
    """The request under a plan for the ranks of this world, which are those of the plan or fewer whole nodes.

    Collective over the world. Raises BadInput where no plan fits them.
    """
    cluster = request.plan.facts.cluster
    num_nodes = dist.get_world_size() // cluster.ranks_per_node
    if num_nodes == cluster.nodes:
        return request
    plans = [planned_again(request, num_nodes) if dist.get_rank() == 0 else request.plan]
    dist.broadcast_object_list(plans)
    if dist.get_rank() == 0:
        before, now = request.plan.period_seconds, plans[0].period_seconds
        told = (
            f"{num_nodes} of {cluster.nodes} nodes are left and the job is planned again for them, a step of which "
            f"takes {now:.3g} s where it took {before:.3g} s as planned"
        )
        note = Restart(
            number=request.restarts, host=socket.gethostname(), reason="", reached=0, saved=0, planned_again=told
        )
        write_restart(request.out, note)
    return replace(request, plan=plans[0])


def planned_again(request: RunRequest, num_nodes: int) -> Plan:
    """The best plan near that of the request for so many nodes, at the lengths and the speeds that the run has shown.

    Pins that cannot be kept on fewer nodes are let go, all of them. Raises BadInput where no plan fits.
    """
    plan = request.plan
    if not isinstance(plan.facts.cluster, Cluster):
        raise BadInput("the nodes left are of several kinds; describe them in the job and plan it again.")
    facts, model = _as_shown(request, plan.facts.cluster.nodes - num_nodes)
    try:
        found = replan(plan, facts, model, pins=parse_pins(plan.pins, plan.graph)).plan
    except BadInput:
        found = replan(plan, facts, model).plan
    return of_run(found, model, request.table) if isinstance(model, Paced) else found


def _as_shown(request: RunRequest, lost_nodes: int) -> tuple[Facts, CostModel]:
    """Facts and costs without so many nodes, as the run has met them, or as they are where it has shown too little."""
    plan = request.plan
    try:
        shown = shown_by(plan, request.out, request.table, lost_nodes=lost_nodes)
        return shown.facts, shown.model
    except BadInput:
        facts = without_nodes(plan.facts, lost_nodes)
        return facts, model_of(facts, request.table)
