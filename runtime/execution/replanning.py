"""Re-planning of a running job: to switch to a better plan, and to continue on fewer nodes.

A run switches plans if a step becomes faster by more than the search's gap, both as predicted and as simulated, and if
the remaining steps earn back the cost of switching: moving state, a checkpoint, and restarting processes. A run that
has lost nodes gets a plan for those left. Both use the response lengths and speeds measured so far.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from typing import Self

import torch.distributed as dist

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.background_search import BackgroundSearch
from meshwright.planner.analysis.replan import (
    PacedCostModel,
    Replanned,
    observed_run,
    replan,
    with_run_records,
    without_nodes,
)
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.runtime.execution.consensus import RankRequest
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.records.restarts import NEXT_PLAN, Restart, steps_recorded, write_restart


class NextPlan:
    """Searches for a better plan in the background, and decides if the run switches to it; only on rank 0."""

    def __init__(self, request: RunRequest, first: int) -> None:
        """`first` is the number of updates that the run starts or resumes from."""
        self._request, self._first = request, first
        self._start_seconds: float | None = None
        self._search: BackgroundSearch | None = None
        self._candidate: Replanned | None = None
        self._has_requested_checkpoint, self._reason = False, ""

    @classmethod
    def for_rank(cls, request: RunRequest, first: int) -> Self | None:
        """Return a NextPlan on rank 0 of a run that may be re-planned; None otherwise."""
        return cls(request, first) if request.replan_every and dist.get_rank() == 0 else None

    def request(self, done: int, checkpoint_seconds: float | None) -> RankRequest:
        """Return rank 0's request after a period that ended with `done` updates.

        `checkpoint_seconds` is the duration of the last checkpoint. If there was none and the decision depends on it,
        one checkpoint is requested.
        """
        now = time.monotonic()
        if self._start_seconds is None:
            self._start_seconds = now - self._request.launch_time
        if not self._reason:
            self._candidate = self._candidate or self._search_result(done)
        if self._candidate is None:
            return RankRequest()
        if checkpoint_seconds is None:
            is_first, self._has_requested_checkpoint = not self._has_requested_checkpoint, True
            return RankRequest(save=is_first)
        self._reason = self._reason or self._reason_to_switch(
            self._candidate, self._request.steps - done, checkpoint_seconds
        )
        if not self._reason:
            self._candidate = None
        return RankRequest(replan=bool(self._reason))

    def write(self, done: int) -> None:
        """Write the chosen plan and the reason for it into the run's directory, when the run stops to switch."""
        assert self._candidate is not None, "ranks switch without a plan"
        out, number = self._request.out, self._request.restarts + 1
        write_plan(out / NEXT_PLAN, self._candidate.plan)
        restart = Restart(
            number=number,
            host=socket.gethostname(),
            reason="",
            reached=steps_recorded(out),
            saved=done,
            replan_note=self._reason,
        )
        write_restart(out, restart)

    def close(self) -> None:
        """End a search that is still running."""
        if self._search:
            self._search.close()
            self._search = None

    def _search_result(self, done: int) -> Replanned | None:
        """Return a faster plan once a search has found one; start a search if one is due."""
        if self._search is None:
            steps = done - self._first
            if steps > 1 and steps % self._request.replan_every == 0:
                self._search = BackgroundSearch(self._request.plan, self._request.out, self._request.table)
            return None
        if not self._search.has_ended:
            return None
        result = self._search.answer()
        self.close()
        if isinstance(result, str):
            sys.stderr.write(f"not planned again after step {done}: {result}\n")
            return None
        return result if result.payback_steps_with_pause(0.0) is not None else None

    def _reason_to_switch(self, candidate: Replanned, steps_left: int, checkpoint_seconds: float) -> str:
        """Return why the run switches to the candidate; empty if the steps left do not earn back the cost."""
        assert self._start_seconds is not None
        old, new = candidate.old_plan_seconds, candidate.plan.period_seconds
        # The start was measured up to the end of the first period, whose seconds are no part of the pause.
        pause = checkpoint_seconds + max(0.0, self._start_seconds - (old or 0.0))
        steps = candidate.payback_steps_with_pause(pause)
        if steps is None or steps >= steps_left:
            return ""
        start = f"planned again from its own measurements: a step is predicted to take {new:.3g} s"
        if old is None:
            return f"{start}, and the old plan cannot continue: {candidate.reason_not_kept}"
        return (
            f"{start} instead of {old:.3g} s under the old plan{_simulated(candidate)}; switching takes "
            f"{pause + candidate.moving_seconds:.3g} s, earned back in {steps} of the {steps_left} steps left"
        )


def _simulated(candidate: Replanned) -> str:
    comparison = candidate.simulated
    return f" (simulated: {comparison.seconds:.3g} s and {comparison.old_plan_seconds:.3g} s)" if comparison else ""


def replan_for_joined_nodes(request: RunRequest) -> RunRequest:
    """Return the request with a plan for the nodes that joined: its own if they are all of its nodes, else a new one.

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
        restart = Restart(
            number=request.restarts, host=socket.gethostname(), reason="", reached=0, saved=0, replan_note=message
        )
        write_restart(request.out, restart)
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
