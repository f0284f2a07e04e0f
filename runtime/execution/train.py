"""A run from its start to its end: what is launched, and what every rank does then."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from meshwright.planner.program.deadlines import away_seconds, patience_seconds
from meshwright.runtime.execution.early_checks import require_nodes
from meshwright.runtime.execution.planning_again import for_those_who_came
from meshwright.runtime.execution.request import RunRequest, check, check_seat
from meshwright.runtime.execution.restarting import again, with_restarts
from meshwright.runtime.execution.resume import require_shared
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.launch.joining import NodePlace, Seat, join
from meshwright.runtime.launch.launch import Preparation, launch
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.lasting_output import lasting_output
from meshwright.runtime.records.lock import locked
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.stopped import Stopped


def run_plan(
    request: RunRequest, rendezvous: Rendezvous | None = None, data: PromptData | None = None
) -> RunSummary | Stopped | None:
    """Runs the plan on this node's ranks and returns what rank 0 recorded, None on a node without rank 0.

    A process that torchrun has started is one of the ranks; any other launches those of its node. Raises BadInput for
    whatever can be known to be wrong before anything starts. `data` are the job's, where they have been read.
    """
    rendezvous = rendezvous or Rendezvous()
    if seat := Seat.of(os.environ):
        if seat.restarts:
            request = again(request, seat.restarts)
        place = NodePlace(
            preparation=_preparation(request),
            node_rank=rendezvous.node_rank,
            work=request.digest,
            logs=request.out,
            token=rendezvous.token,
        )
        return _outcome(join(seat, place, partial(check_seat, request, rendezvous, seat), _work_alone, request))
    require_nodes(request.plan, rendezvous)
    check(request, rendezvous, data)
    return with_restarts(_launched, request, rendezvous)


def _preparation(request: RunRequest) -> Preparation:
    plan, job = request.plan, request.job
    away = away_seconds(plan, job.rewards, job.tool)
    return Preparation(plan.facts.cluster.kind, patience_seconds(plan, away))


def _launched(request: RunRequest, rendezvous: Rendezvous) -> RunSummary | Stopped | None:
    """The outcome of this node's ranks, started once."""
    cluster = request.plan.facts.cluster
    results = launch(
        _work_alone,
        replace(request, launched=time.monotonic()),
        num_ranks=cluster.ranks_per_node,
        preparation=_preparation(request),
        rendezvous=rendezvous,
        logs=request.out,
        preload="meshwright.runtime.execution.train",
        work=request.digest,
        may_stop=True,
    )
    return _outcome(results)


def _outcome(results: Mapping[int, RunSummary | Stopped | None]) -> RunSummary | Stopped | None:
    """Of this node: what rank 0 recorded, or that the run has stopped, which every rank knows."""
    stopped = next((result for result in results.values() if isinstance(result, Stopped)), None)
    return stopped or results.get(0)


def _work_alone(request: RunRequest) -> RunSummary | Stopped | None:
    """What one rank does; the first keeps other runs out of the directory meanwhile."""
    with lasting_output(), locked(request.out) if dist.get_rank() == 0 else nullcontext():
        return _work(request)


def _work(request: RunRequest) -> RunSummary | Stopped | None:
    """What one rank does from the first to the last step."""
    if request.plan.facts.cluster.nodes > 1:
        require_shared(request.out)
    request = for_those_who_came(request)
    run = RankRun(request)
    # All modules, which are there to stay, or a collection would look at them, for a third of a second on every rank.
    gc.freeze()
    run.recorder.open(run.steps.start)
    if run.steps.start == 0:
        run.evaluate(0)
    if run.steps:
        for turn in run.turns:
            run.turn(turn)
            if run.behind_turn(max(turn + 1, run.steps.start)):
                return run.stop(turn + 1)
    elif request.export_every:  # the run ended between its last checkpoint and this
        run.export(request.steps)
    run.finish()
    if run.steps or not run.is_evaluated(request.steps):
        run.evaluate(request.steps)
    return run.close()
