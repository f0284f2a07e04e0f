"""How fast virtual time runs: events per second, and 50 steps of a job on 1,024 ranks.

    python -m benchmarks.pipeline.speed

The job is made up by hand (no search): a 70B actor of 128 replicas, so that drawn responses end on 128 different
times in every step. The first line counts what the simulator does when no two ranks behave alike.
"""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import Choice, cost_model_of, stage_transfers
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.program.durations import Planned, StepWork, transfer_delays
from meshwright.planner.program.program import lower
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.simulation.events import group_ranks, simulate_events
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role, Stage

JOB = Path(__file__).parents[2] / "examples" / "70b-64xh100" / "job.yaml"
NODES = 128
EVENTS = 1_000_000


def main() -> None:
    plan = plan_by_hand(facts_of_1024_ranks())
    began = time.perf_counter()
    num_events = count_events(plan)
    seconds = time.perf_counter() - began
    print(f"{num_events:,} events, every rank for itself: {seconds:.2f} s, {num_events / seconds:,.0f} a second")
    for name in ("planned", "sampled"):
        began = time.perf_counter()
        durations = Planned(plan) if name == "planned" else Sampled(plan, cost_model_of, seed=0)
        simulated = simulate(plan, durations, steps=50)
        seconds = time.perf_counter() - began
        print(f"1,024 ranks, 50 {name} steps: {seconds:.2f} s, {simulated.num_events:,} events")


def count_events(plan: Plan) -> int:
    """Runs steps in which each rank is a group of its own until there were enough events."""
    program, num_ranks = lower(plan), plan.facts.cluster.num_ranks
    names = frozenset(instruction.name for instruction in program.instructions)
    parts = group_ranks(program, num_ranks, names, lambda _name, rank: rank)
    work = Planned(plan).of_step(0)
    alone = StepWork(seconds={name: seconds * num_ranks for name, seconds in work.seconds.items()}, num_tokens=0.0)
    steps = -(-EVENTS // sum(map(len, parts.streams)))
    return sum(1 for _ in simulate_events(parts, [alone] * steps, transfer_delays(plan)))


def facts_of_1024_ranks() -> Facts:
    facts = resolve(read_job(JOB), JOB.parent)
    workload = facts.workload.model_copy(update={"batch_size": 4096})
    return facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"nodes": NODES}), "workload": workload})


def plan_by_hand(facts: Facts) -> Plan:
    """Generation on all ranks; scoring and training on halves."""
    model = cost_model_of(facts)
    solver = Solver(
        name="by hand",
        version="0",
        seed=0,
        num_workers=1,
        max_deterministic_time=0.0,
        status="pinned",
        objective_seconds=1.0,
        bound_seconds=0.0,
        gap=1.0,
    )
    return assemble(
        facts,
        model,
        transfers=stage_transfers(facts, model),
        picks={stage.name: pick(stage) for stage in PPO_GRAPH.stages},
        order=(
            "refit actor_generate",
            "refit actor_logprob",
            "refit critic_value",
            *(stage.name for stage in PPO_GRAPH.stages),
        ),
        origin=Origin(digests=facts.digests(), pins=(), solver=solver),
    )


def pick(stage: Stage) -> Pick:
    ranks = Ranks(0, 1024) if stage.generates else Ranks(0 if stage.role in (Role.ACTOR, Role.REWARD) else 512, 512)
    layout = Layout(tp=8, pp=1, dp=ranks.num_ranks // 8)
    schedule = Schedule(generation_slots=32) if stage.generates else Schedule(micro_batch_size=2)
    return Pick(ranks, Choice(layout, schedule))


if __name__ == "__main__":
    main()
