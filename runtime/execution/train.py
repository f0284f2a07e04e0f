"""A run from its start to its end: the launch on this node, and the main function of every rank."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from meshwright.planner.program.deadlines import collective_timeout, failing_call_seconds
from meshwright.runtime.execution.early_checks import require_nodes
from meshwright.runtime.execution.planning_again import replan_for_joined_nodes
from meshwright.runtime.execution.request import RunRequest, check, check_launched_rank
from meshwright.runtime.execution.restarting import restart_request, with_restarts
from meshwright.runtime.execution.resume import require_shared
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.launch.joining import LaunchedRank, NodeOptions, join
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.lasting_output import lasting_output
from meshwright.runtime.records.lock import locked
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.stopped import Stopped


def run_plan(
    request: RunRequest, rendezvous: Rendezvous | None = None, data: PromptData | None = None
) -> RunSummary | Stopped | None:
    """Run the plan on this node's ranks and return what rank 0 recorded, None on a node without rank 0.

    A process that torchrun has started is one of the ranks; any other process launches the ranks of its node. `data`
    is the job's if it has been read already. Raises BadInput for whatever is found wrong before anything starts.
    """
    rendezvous = rendezvous or Rendezvous()
    if seat := LaunchedRank.from_environment(os.environ):
        if seat.restarts:
            request = restart_request(request, seat.restarts)
        place = NodeOptions(
            preparation=_preparation(request),
            node_rank=rendezvous.node_rank,
            work=request.digest,
            logs=request.out,
            token=rendezvous.token,
        )
        return _outcome(
            join(seat, place, partial(check_launched_rank, request, rendezvous, seat), _run_locked, request)
        )
    require_nodes(request.plan, rendezvous)
    check(request, rendezvous, data)
    return with_restarts(_launch_node, request, rendezvous)


def _preparation(request: RunRequest) -> ProcessSetup:
    plan, job = request.plan, request.job
    away = failing_call_seconds(plan, job.rewards, job.tool)
    return ProcessSetup(plan.facts.cluster.kind, collective_timeout(plan, away))


def _launch_node(request: RunRequest, rendezvous: Rendezvous) -> RunSummary | Stopped | None:
    """Launch this node's ranks once and return their outcome."""
    cluster = request.plan.facts.cluster
    results = launch(
        _run_locked,
        replace(request, launch_time=time.monotonic()),
        num_ranks=cluster.ranks_per_node,
        setup=_preparation(request),
        rendezvous=rendezvous,
        logs=request.out,
        preload="meshwright.runtime.execution.train",
        work=request.digest,
        may_stop=True,
    )
    return _outcome(results)


def _outcome(results: Mapping[int, RunSummary | Stopped | None]) -> RunSummary | Stopped | None:
    """Return what rank 0 recorded, or that the run has stopped, which every rank reports."""
    stopped = next((result for result in results.values() if isinstance(result, Stopped)), None)
    return stopped or results.get(0)


def _run_locked(request: RunRequest) -> RunSummary | Stopped | None:
    """Run one rank; rank 0 holds the lock of the run's directory meanwhile."""
    with lasting_output(), locked(request.out) if dist.get_rank() == 0 else nullcontext():
        return _run_rank(request)


def _run_rank(request: RunRequest) -> RunSummary | Stopped | None:
    """Run one rank from the first to the last step."""
    if request.plan.facts.cluster.nodes > 1:
        require_shared(request.out)
    request = replan_for_joined_nodes(request)
    run = RankRun(request)
    # Modules are never freed; without this each garbage collection scans them, a third of a second on every rank.
    gc.freeze()
    run.recorder.open(run.steps.start)
    if run.steps.start == 0:
        run.evaluate(0)
    if run.steps:
        for turn in run.periods:
            run.run_period(turn)
            if run.after_period(max(turn + 1, run.steps.start)):
                return run.stop(turn + 1)
    elif request.export_every:  # the run ended between its last checkpoint and this
        run.export(request.steps)
    run.finish()
    if run.steps or not run.is_evaluated(request.steps):
        run.evaluate(request.steps)
    return run.close()
