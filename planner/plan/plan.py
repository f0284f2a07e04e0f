"""The plan: which stage runs where, how, and at what predicted cost. A document that loads without a solver.

A turn is one period of the steady state. In turn n a stage that is a steps ahead works on step n + a. Steps ahead never
rise along the edges of the stage graph. Where they fall from a producer to its consumer, the consumer reads what an
earlier turn wrote, and the two may run at the same time on different pools. A plan whose stages are all 0 steps ahead
is synchronous.

Costs are `Cost` records: named terms in seconds or bytes, each with its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from meshwright.cost_models.cost import Cost
from meshwright.planner.environment.rewards import HostWorkers
from meshwright.planner.plan.job import Facts, Job, require_job
from meshwright.planner.plan.job_limits import require_possible
from meshwright.planner.plan.pins import Ranks, Value, value_of
from meshwright.profiles.cluster import replicas_of_parts
from meshwright.profiles.documents import Document, canonical_json, parse, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.packing import ReplicaDeal
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role, Stage, StageGraph
from meshwright.profiles.values import MOST_JSON_BYTES, json_value, read_text

SCHEMA_VERSION: Final = 2
"""Of the plans that are read and written; another one is refused, and the job planned again."""


class Pool(Document):
    """Consecutive ranks on which stages take turns."""

    name: str
    first_rank: int = Field(ge=0)
    num_ranks: int = Field(gt=0)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


class Placement(Document):
    """One stage: its pool, layout and schedule, when it runs within a turn, and what that costs."""

    stage: str
    pool: str
    layout: Layout
    stage_layers: tuple[int, ...] = Field(
        default=(), description="decoder layers of each pipeline stage, where some hold more than others; see layout"
    )
    schedule: Schedule
    steps_ahead: int = Field(default=0, ge=0, description="steps by which the stage works ahead of the training")
    start_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    cost: Cost = Field(description="seconds")
    tail_seconds: float = Field(default=0.0, ge=0, description="of a stage that streams: left after the last token")
    resident: Cost = Field(description="bytes on the fullest rank, while any stage runs")
    transient: Cost = Field(description="bytes on the fullest rank, only while this stage runs")
    host: Cost = Field(default=Cost(), description="bytes in host memory for each rank")
    pace: float = Field(default=1.0, gt=0, description="times longer than by the cost model, as a run has shown it")

    @model_serializer(mode="wrap")
    def _without_usual(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Nothing is said of stages that hold as many layers as each other, and of the cost model's own pace."""
        usual = {"stage_layers": (), "pace": 1.0}
        return {key: value for key, value in written(self).items() if key not in usual or value != usual[key]}


class Edge(Document):
    """Experience handed from one stage to another."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    bytes: float = Field(ge=0)
    cost: Cost = Field(description="seconds")


class Refit(Document):
    """Weights moved from the training copy of a role to the copy of another stage, before that stage runs."""

    role: Role
    source: str
    target: str
    start_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    bytes: float = Field(ge=0)
    cost: Cost = Field(description="seconds")


class SearchWork(Document):
    """What a search did, in numbers that no clock moves: a search that ends by itself has them on every machine."""

    timed: int = Field(default=0, ge=0, description="questions of a choice's seconds")
    weighed: int = Field(default=0, ge=0, description="questions of a choice's bytes")
    generations: int = Field(default=0, ge=0, description="ways to generate that were played, for each scope")
    too_slow: int = Field(default=0, ge=0, description="choices left out as slower than a plan that is known")
    models: int = Field(default=0, ge=0, description="models that the solver was given")
    deterministic_time: float = Field(default=0.0, ge=0, description="that it took for them, in its own unit")


ROUNDED = 1e-3
"""Of a plan's seconds: what its tasks may lose where a solver counts them in whole ticks, a hundred tasks of a tick
each where a step has 100,000 ticks."""


class Solver(Document):
    """How the plan was found and how good it is: `gap` = (objective - bound) / objective."""

    name: str
    version: str
    seed: int
    num_workers: int = Field(gt=0)
    max_deterministic_time: float = Field(ge=0)
    asked_gap: float = Field(default=0.0, ge=0, le=1, description="at which the search was to end")
    status: Literal["optimal", "feasible", "pinned"]
    objective_seconds: float
    bound_seconds: float
    gap: float = Field(ge=0)
    work: SearchWork = SearchWork()

    @property
    def has_asked_gap(self) -> bool:
        """Whether the plan is as near to its bound as was asked."""
        return self.gap <= self.asked_gap + ROUNDED


class Plan(Document):
    """The decision: which stage runs where, how and when, for which facts, and how near to the best it is proven."""

    schema_version: Literal[2] = 2
    digests: dict[str, str] = Field(description="SHA-256 of each input the plan was computed from")
    facts: Facts
    staleness: int = Field(ge=0, description="most actor updates between sampling a token and its use")
    pins: tuple[str, ...] = Field(default=(), description="what the user fixed")
    solver: Solver
    pools: tuple[Pool, ...]
    workers: tuple[HostWorkers, ...] = Field(default=(), description="of the rewards on hosts")
    placements: tuple[Placement, ...]
    edges: tuple[Edge, ...]
    refits: tuple[Refit, ...]
    period_seconds: float = Field(gt=0, description="predicted seconds per step")
    peak_bytes_per_rank: tuple[int, ...]

    @model_serializer(mode="wrap")
    def _without_workers(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans without rewards on hosts are written as they were before there were any."""
        return {key: value for key, value in written(self).items() if key != "workers" or value}

    @property
    def origins(self) -> dict[str, str]:
        """The digests of what it was computed from and does not hold: the job, the measured table, the trace."""
        held = self.facts.digests()
        return {name: digest for name, digest in self.digests.items() if name not in held}

    @property
    def lengths_are_seen(self) -> bool:
        """Whether its workload's lengths are those of a trace, rather than what the job expects."""
        return "trace" in self.digests

    def require_of(self, job: Job, directory: Path) -> None:
        """Raises BadInput unless this is a plan of the job, whose relative paths start at `directory`: see
        `require_job`."""
        require_job(self.facts, job, directory, lengths_are_seen=self.lengths_are_seen)

    @property
    def graph(self) -> StageGraph:
        """The stages of a step of the plan's job."""
        return self.facts.graph

    def stage(self, name: str) -> Stage:
        return self.graph.by_name[name]

    def placement(self, stage: str) -> Placement:
        return next(p for p in self.placements if p.stage == stage)

    def part_of(self, stage: str) -> int:
        """The number of the cluster's part that a stage runs in, or of the pair of them."""
        return self.facts.cluster.part_of_pool(self.pool_of(stage).ranks)

    def replicas_of(self, stage: str) -> tuple[int, ...]:
        """How many replicas of a stage are on nodes of each kind."""
        placement = self.placement(stage)
        if not placement.schedule.rows:
            return (placement.layout.dp,)
        replica_ranks = placement.layout.num_ranks // placement.layout.dp
        return replicas_of_parts(self.facts.cluster, self.part_of(stage), replica_ranks)

    def deal_of(self, stage: str) -> ReplicaDeal:
        """How the rows that a stage takes at once are dealt to its replicas, where they are all there when it begins.

        Tokens that cap micro-batches bound memory for any number of rows, but of the passes that a pipeline has in
        flight, which are as many as its rows may make.
        """
        placement, model = self.placement(stage), self.facts.models.spec(self.stage(stage).role)
        any_number = placement.schedule.micro_batch_tokens > 0 and placement.layout.pp == 1
        return ReplicaDeal(model, self.replicas_of(stage), placement.schedule.rows, any_number)

    @property
    def ahead(self) -> dict[str, int]:
        return {placement.stage: placement.steps_ahead for placement in self.placements}

    def waits(self, producer: str, consumer: str) -> bool:
        """Whether the consumer reads what the producer writes in the same turn."""
        return self.placement(producer).steps_ahead == self.placement(consumer).steps_ahead

    def pool(self, name: str) -> Pool:
        return next(p for p in self.pools if p.name == name)

    def pool_of(self, stage: str) -> Pool:
        return self.pool(self.placement(stage).pool)

    def choice(self, stage: str, key: str) -> Value:
        """What a stage has of what a pin is about: its pool, its layout or a degree of it, or a setting."""
        placement, pool = self.placement(stage), self.pool_of(stage)
        if key == "pool":
            return Ranks(pool.first_rank, pool.num_ranks)
        return value_of(placement.layout, placement.schedule, key)

    def copy_of(self, stage: str) -> str:
        """The stage whose weights this stage uses.

        Stages that copies of one role may serve, with one pool and one layout, share a copy: the training stage's, else
        that of the first that needs an adapter, else the first one's. What has its
        linears in 8-bit floats shares none.
        """
        if self.stage(stage).is_quantised:
            return stage
        mine, role = self.placement(stage), self.stage(stage).copied_role
        alike = {p.stage for p in self.placements if (p.pool, p.layout) == (mine.pool, mine.layout)}
        return next(name for name in self.graph.sharers(role) if name in alike)


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file. Raises BadInput for another schema version and for anything malformed."""
    text = read_text(path, "plan", MOST_JSON_BYTES)
    _refuse_other_versions(path, json_value(text, f"plan {path}"))
    plan = parse(Plan, text, f"plan {path}")
    require_possible(plan.facts.models.by_name, plan.facts.cluster, plan.facts.workload, f"plan {path}")
    return plan


def write_plan(path: Path, plan: Plan) -> None:
    """Writes the canonical bytes."""
    write_atomically(path, canonical_json(plan))


def _refuse_other_versions(path: Path, value: Any) -> None:
    """A plan of another schema version is refused in words that say so, before its keys are read."""
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version is not None and version != SCHEMA_VERSION:
        raise BadInput(
            f"plan {path}: schema_version={version} is not the {SCHEMA_VERSION} this program reads; plan the job again."
        )
