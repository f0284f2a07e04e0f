"""One node of two is lost: how soon the other goes on under a new plan, and whether steps take what that plan says.

The nodes are network namespaces of this machine, with a core each, so that the one left computes as fast as before. How
long a step takes depends on what else the machine does, so the new plan is run once more from its beginning, in the
minutes behind.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.hosts import BIN, Agent, free_port, namespaces_refused, two_namespaces
from benchmarks.survival.job import Case, planned, write_job, write_models
from meshwright.planner.plan.plan import Plan, read_plan, write_plan

CASE = Case(name="two nodes", num_ranks=2, nodes=2, pins=("actor_train.layout=dp2", "critic_train.layout=dp2"))
LEFT = Case(name="one node", num_ranks=1)
STEPS, LOST_BEHIND = 44, 24
MOST_SECONDS = 60.0
"""From the loss to the first step behind it."""
MOST_OFF = 0.15
"""Of the seconds of a step."""
_WARM_STEPS = 2
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """Seconds from the loss of a node until its ranks' absence was noted, until there was a plan for the one left, and
    until the first step under it was done; then of a step: as the new plan says, as it was, and as it is under the same
    plan in a run that began with it."""

    noticed: float
    planned: float
    first_step: float
    lost_steps: int
    said: float
    measured: float
    fresh: float

    @property
    def off_plan(self) -> float:
        """By how much steps took longer than the plan says, as a fraction."""
        return self.measured / self.said - 1.0

    @property
    def off_fresh(self) -> float:
        """By how much they took longer than those of a run that began with the plan."""
        return self.measured / self.fresh - 1.0

    @property
    def holds(self) -> bool:
        """Whether the run went on in time, and with steps as they are under that plan."""
        return self.first_step < MOST_SECONDS and abs(self.off_plan) < MOST_OFF


def measure(scratch: Path) -> LostNode:
    """Raises RuntimeError where this machine makes no network namespaces, and where a run fails."""
    if why := namespaces_refused():
        raise RuntimeError(why)
    write_models(scratch, hidden_size=128)
    job, out = write_job(scratch, CASE), scratch / "run"
    write_plan(scratch / "plan.json", planned(job, CASE.pins)[1])
    with two_namespaces() as both:
        hosts = [replace(host, inside=(*host.inside, "taskset", "-c", str(core))) for core, host in enumerate(both)]
        place = ("--nodes", 2, "--rendezvous", f"{hosts[0].address}:{free_port()}", "--max-restarts", 1)
        commands = [_run(scratch / "plan.json", job, out, *place, "--node-rank", node) for node in range(2)]
        left, lost = (host.start(command) for host, command in zip(hosts, commands, strict=True))
        _wait(left, lambda: len(_lines(out)) >= LOST_BEHIND)
        lost.kill()
        at = time.monotonic()
        noticed = _wait(left, (out / "restarts.jsonl").exists)
        replanned, recorded = _wait(left, lambda: _plan_of(out).facts.cluster.nodes == 1), len(_lines(out))
        first = _wait(left, lambda: len(_lines(out)) > recorded)
        _end(left)
        fresh = scratch / "fresh"
        _end(hosts[0].start(_run(out / "plan.json", write_job(scratch, LEFT), fresh)))
    restarts = json.loads((out / "summary.json").read_text())["restarts"]
    return LostNode(
        noticed=noticed - at,
        planned=replanned - at,
        first_step=first - at,
        lost_steps=sum(one["reached"] - one["saved"] for one in restarts),
        said=_plan_of(out).period_seconds,
        measured=_step_seconds(_lines(out)[recorded:]),
        fresh=_step_seconds(_lines(fresh)),
    )


def report(found: LostNode) -> str:
    """As a list of Markdown."""
    return "\n".join(
        (
            f"- after the loss: noted {found.noticed:.1f} s, planned again {found.planned:.1f} s, first step done "
            f"{found.first_step:.1f} s (of {MOST_SECONDS:g}); steps done again: {found.lost_steps};",
            f"- a step takes {found.measured:.3f} s, where the new plan says {found.said:.3f}: {found.off_plan:+.1%} "
            f"(of {MOST_OFF:.0%});",
            f"- in a run that begins with that plan it takes {found.fresh:.3f} s: {found.off_fresh:+.1%}.",
        )
    )


def _run(plan: Path, job: Path, out: Path, *options: object) -> list[object]:
    return [
        *(BIN / "meshwright", "run", plan, job, "--steps", STEPS, "--out", out),
        *("--checkpoint-every", 1, *options),
    ]


def _wait(agent: Agent, until: Callable[[], bool]) -> float:
    """The moment when it is so."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not until():
        if agent.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(agent.end(1.0).err)
        time.sleep(0.02)
    return time.monotonic()


def _end(agent: Agent) -> None:
    ended = agent.end(_PATIENCE_SECONDS)
    if ended.code:
        raise RuntimeError(ended.err)


def _plan_of(out: Path) -> Plan:
    return read_plan(out / "plan.json")


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def _step_seconds(lines: Sequence[Mapping[str, float]]) -> float:
    """The median, without the first steps, in which libraries connect and allocate."""
    return statistics.median(line["seconds"] for line in lines[_WARM_STEPS:])
