"""Peak memory of stage bodies that were not profiled, beside what the cost model says of them.

One micro-batch of the run's longest sequences, at the model's own depth and the run's shard, on every rank at once;
measured as growth of the resident set from an allocator that holds nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.table import Measurement, Point, Table, TimedPass, shape_of
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench

_SHARED = ("kv cache", "refit buffer", "gathered weights")
"""Transient terms that are no part of a timed pass's working memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    run: str
    stage: str
    shape: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def memory_rows(name: str, plan: Plan, table: Table | None) -> tuple[MemoryRow, ...]:
    """The forward and training stages of a plan, each shape once."""
    calls = _calls(plan)
    cluster = plan.facts.cluster
    preparation = ProcessSetup(cluster.kind)
    measured = launch(_measure, plan.facts, list(calls), num_ranks=cluster.num_ranks, setup=preparation)[0]
    model = cost_model_of(plan.facts, table)
    rows = []
    for (point, query), found in zip(calls.items(), measured, strict=True):
        transient = model.memory(query).transient
        assert found.peak_bytes is not None, found.reason
        rows.append(
            MemoryRow(
                run=name,
                stage=query.stage.name,
                shape=f"tp{query.layout.tp}, {point.rows} x {point.tokens}",
                predicted_bytes=sum(term.amount for term in transient.terms if term.name not in _SHARED),
                measured_bytes=found.peak_bytes,
            )
        )
    return tuple(rows)


def _calls(plan: Plan) -> dict[Point, StageQuery]:
    """The stages' bodies without pipeline and recomputation, which the bodies alone do not show."""
    found = {}
    for p in plan.placements:
        stage, spec = plan.stage(p.stage), plan.facts.models.spec(plan.stage(p.stage).role)
        if stage.generates:
            continue
        longest = plan.facts.workload.max_tokens
        rows = max(1, p.schedule.max_tokens(longest) // longest)
        point = Point(
            shape=shape_of(spec, p.layout.tp),
            num_layers=spec.num_layers,
            timed_pass=TimedPass.TRAIN if stage.trains else TimedPass.FORWARD,
            rows=rows,
            tokens=longest,
            context=0,
        )
        schedule = Schedule(micro_batch_size=rows, recompute=Recompute.NONE)
        found.setdefault(point, StageQuery(stage=stage, model=spec, layout=Layout(tp=p.layout.tp), schedule=schedule))
    return found


def _measure(facts: Facts, wanted: Sequence[Point]) -> list[Measurement]:
    meshes = [build_mesh(Layout(), rank) for rank in range(dist.get_world_size())]
    longest = facts.workload.max_tokens
    bench = Bench(meshes[dist.get_rank()], instruments(), precision=facts.precision, max_positions=longest)
    return [bench.measure_point(point, repeats=3, budget_seconds=1.0) for point in wanted]
