"""A run from its start to its end: the launch on this node, restarts, and the main function of every rank.

A failed run restarts from its last checkpoint, a bounded number of times and with growing pauses. Every node
decides this by itself: a lost rank ends the run on all nodes, and they meet again at the same rendezvous. A node that
does not return is lost for good, and the run continues without it under a new plan. Bad input and a run that the user
has stopped are not retried.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.program.durations import collective_timeout, failing_call_seconds
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.early_checks import require_nodes
from meshwright.runtime.execution.replanning import replan_for_joined_nodes
from meshwright.runtime.execution.request import RunRequest, check, check_launched_rank
from meshwright.runtime.execution.resume import latest_step, require_shared
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.launch.interruption import stop_requested_within
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.launch.torchrun import LaunchedRank, NodeOptions, join
from meshwright.runtime.records.lasting_output import lasting_output
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.restarts import (
    NEXT_PLAN,
    Restart,
    Stopped,
    read_restarts,
    steps_recorded,
    write_restart,
)
from meshwright.runtime.records.run_directory import locked
from meshwright.runtime.rollout.prompts import PromptData

T = TypeVar("T")

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
"""Pause before the first restart, and the longest pause; it doubles while no new checkpoint appears."""


def with_restarts(
    launch: Callable[[RunRequest, Rendezvous], T | Stopped], request: RunRequest, rendezvous: Rendezvous
) -> T | Stopped:
    """Launch the run until it ends or is asked to stop, and return what that launch returns.

    A run that stops to continue under another plan is started again at once and does not count as a failure. Raises
    the RunFailed of the last permitted attempt.
    """
    failures, failures_in_a_row, previous = 0, 0, latest_step(request.out)
    # Restart numbers continue from those before the user resumed the run.
    number = max((restart.number for restart in read_restarts(request.out)), default=0)
    request = replace(request, restarts=number)
    while True:
        number, next_request, wait = number + 1, restart_request, 0.0
        try:
            outcome = launch(request, rendezvous)
            if not isinstance(outcome, Stopped) or not outcome.continues:
                return outcome
            next_request = next_plan_request
            sys.stderr.write(f"{read_restarts(request.out)[-1].message}\n")
        except RunFailed as error:
            if failures == request.max_restarts:
                raise
            failures, saved = failures + 1, latest_step(request.out)
            failures_in_a_row, previous = (failures_in_a_row + 1 if saved == previous else 1), saved
            wait = pause_seconds(failures_in_a_row)
            message = _record_restart(request, number, str(error))
            sys.stderr.write(f"{message}; starting again in {wait:.0f} s ({failures} of {request.max_restarts})\n")
        if stop_requested_within(wait):
            saved = latest_step(request.out)
            return Stopped(done=saved or 0, saved=saved)
        request, rendezvous = next_request(request, number), rendezvous.next_attempt(request.plan.facts.cluster.nodes)


def _record_restart(request: RunRequest, number: int, reason: str) -> str:
    """Write the restart to the run's record and return its message."""
    restart = Restart(
        number=number,
        host=socket.gethostname(),
        reason=reason,
        reached=steps_recorded(request.out),
        saved=latest_step(request.out) or 0,
    )
    try:
        write_restart(request.out, restart)
    except OSError as error:  # the disk may be what failed
        return f"{restart.message} (not written down: {error.strerror})"
    return restart.message


def pause_seconds(number: int) -> float:
    """Return the pause before the `number`-th restart (from 1) since the last new checkpoint."""
    return min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (number - 1))


def restart_request(request: RunRequest, number: int) -> RunRequest:
    """Return the request that continues the run under its latest plan."""
    path = request.out / "plan.json"
    plan = read_plan(path) if path.exists() else request.plan
    return replace(request, plan=plan, resume=latest_step(request.out) is not None, resample=False, restarts=number)


def next_plan_request(request: RunRequest, number: int) -> RunRequest:
    """Return the request that continues the run under the new plan, for which it has stopped."""
    return replace(restart_request(request, number), plan=read_plan(request.out / NEXT_PLAN))


def run_plan(
    request: RunRequest, rendezvous: Rendezvous | None = None, data: PromptData | None = None
) -> RunSummary | Stopped | None:
    """Run the plan on this node's ranks and return what rank 0 recorded, None on a node without rank 0.

    A process that torchrun has started is one of the ranks; any other process launches the ranks of its node. `data`
    is the job's if it has been read already. Raises BadInput for whatever is found wrong before anything starts.
    """
    rendezvous = rendezvous or Rendezvous()
    if launched := LaunchedRank.from_environment(os.environ):
        if launched.restarts:
            request = restart_request(request, launched.restarts)
        node_options = NodeOptions(
            preparation=_preparation(request),
            node_rank=rendezvous.node_rank,
            work=request.digest,
            logs=request.out,
            token=rendezvous.token,
        )
        return _outcome(
            join(
                launched,
                node_options,
                partial(check_launched_rank, request, rendezvous, launched),
                _run_locked,
                request,
            )
        )
    require_nodes(request.plan, rendezvous)
    check(request, rendezvous, data)
    return with_restarts(_launch_node, request, rendezvous)


def _preparation(request: RunRequest) -> ProcessSetup:
    plan, job = request.plan, request.job
    failing_seconds = failing_call_seconds(plan, job.all_rewards, job.tool)
    return ProcessSetup(plan.facts.cluster.kind, collective_timeout(plan, failing_seconds))


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
    """Return the `Stopped` that a rank reports, if one does, else what rank 0 recorded."""
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
    # Modules are never freed; without this each garbage collection scans them, a third of a second on every rank, and
    # so does the count of the models' tensors, which copies every page that is shared with the process it came from.
    gc.freeze()
    run = RankRun(request)
    gc.freeze()  # the models and what they are trained with
    run.recorder.open(run.steps.start)
    if run.steps.start == 0:
        run.evaluate(0)
    if run.steps:
        for period in run.periods:
            run.run_period(period)
            if run.after_period(max(period + 1, run.steps.start)):
                return run.stop(period + 1)
    elif request.export_every:  # no steps are left; the run may have ended before its last export
        run.export(request.steps)
    run.finish()
    run.evaluate(request.steps, None if run.steps else run.not_evaluated(request.steps))
    return run.close()
