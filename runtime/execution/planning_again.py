"""Re-planning of a run that has lost nodes, with the response lengths and speeds measured so far."""

from __future__ import annotations

import socket
from dataclasses import replace

import torch.distributed as dist

from meshwright.cost_models.question import CostModel
from meshwright.planner.analysis.replan import PacedCostModel, replan, with_run_records, without_nodes
from meshwright.planner.analysis.shown import observed_run
from meshwright.planner.plan.calls import cost_model_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.records.restarts import Restart, write_restart


def replan_for_joined_nodes(request: RunRequest) -> RunRequest:
    """Return the request with a plan for the ranks that joined, which are those of its plan or fewer whole nodes.

    Collective over the world. Raises BadInput if no plan fits them.
    """
    cluster = request.plan.facts.cluster
    num_nodes = dist.get_world_size() // cluster.ranks_per_node
    if num_nodes == cluster.nodes:
        return request
    plans = [replan_for_nodes(request, num_nodes) if dist.get_rank() == 0 else request.plan]
    dist.broadcast_object_list(plans)
    if dist.get_rank() == 0:
        before, now = request.plan.period_seconds, plans[0].period_seconds
        message = (
            f"{num_nodes} of {cluster.nodes} nodes are left and the job is planned again for them; a step is "
            f"predicted to take {now:.3g} s instead of {before:.3g} s"
        )
        note = Restart(
            number=request.restarts, host=socket.gethostname(), reason="", reached=0, saved=0, planned_again=message
        )
        write_restart(request.out, note)
    return replace(request, plan=plans[0])


def replan_for_nodes(request: RunRequest, num_nodes: int) -> Plan:
    """Return the best plan in the neighbourhood of the request's for `num_nodes` nodes, at measured lengths and speeds.

    If the pins cannot be kept on fewer nodes, all of them are dropped. Raises BadInput if no plan fits.
    """
    plan = request.plan
    if not isinstance(plan.facts.cluster, Cluster):
        raise BadInput("the nodes left are of several kinds; describe them in the job and plan it again.")
    facts, model = _measured_facts(request, plan.facts.cluster.nodes - num_nodes)
    try:
        new_plan = replan(plan, facts, model, pins=parse_pins(plan.pins, plan.graph)).plan
    except BadInput:
        new_plan = replan(plan, facts, model).plan
    return with_run_records(new_plan, model, request.table) if isinstance(model, PacedCostModel) else new_plan


def _measured_facts(request: RunRequest, lost_nodes: int) -> tuple[Facts, CostModel]:
    """Return facts and cost model without the lost nodes, as measured by the run, or as planned if it is too short."""
    plan = request.plan
    try:
        measured = observed_run(plan, request.out, request.table, lost_nodes=lost_nodes)
        return measured.facts, measured.model
    except BadInput:
        facts = without_nodes(plan.facts, lost_nodes)
        return facts, cost_model_of(facts, request.table)
