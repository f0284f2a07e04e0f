"""The plan: which stage runs where, how, and at what predicted cost. A document that loads without a solver.

A plan describes one period of the steady state. In period n, a stage that is `a` steps ahead works on step n + a.
Steps ahead never increase along the edges of the stage graph. Where a producer is further ahead than its consumer, the
consumer reads what an earlier period wrote, and the two may run at the same time on different pools. A plan whose
stages are all 0 steps ahead is synchronous.

Costs are `Cost` records: named terms in seconds or bytes, each with its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshwright.cost_models.cost import Cost, Source
from meshwright.planner.job.job import Facts, Job, require_job
from meshwright.planner.job.limits import require_within_limits
from meshwright.planner.job.rewards_and_tools import HostWorkers
from meshwright.planner.plan.pins import Ranks, Value, value_of
from meshwright.profiles.documents import Document, VersionedDocument, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import replicas_of_parts
from meshwright.profiles.html_tables import html_paragraphs, html_table
from meshwright.profiles.layout import Layout
from meshwright.profiles.packing import ReplicaAssignment
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role, Stage, StageGraph


class Pool(Document):
    """Consecutive ranks on which stages run one at a time."""

    name: str
    first_rank: int = Field(ge=0)
    num_ranks: int = Field(gt=0)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


class Placement(Document):
    """One stage: its pool, layout and schedule, when it runs within a period, and its predicted costs."""

    stage: str
    pool: str
    layout: Layout
    stage_layers: tuple[int, ...] = Field(
        default=(), description="decoder layers of each pipeline stage; empty if all stages have equally many"
    )
    schedule: Schedule
    steps_ahead: int = Field(default=0, ge=0, description="steps by which the stage works ahead of the training")
    start_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    cost: Cost = Field(description="seconds")
    tail_seconds: float = Field(default=0.0, ge=0, description="time that a streaming stage takes after the last token")
    resident: Cost = Field(description="bytes on the fullest rank, while any stage runs")
    transient: Cost = Field(description="bytes on the fullest rank, only while this stage runs")
    host: Cost = Field(default=Cost(), description="bytes in host memory for each rank")
    pace: float = Field(default=1.0, gt=0, description="measured seconds over predicted seconds, from a run")


class Edge(Document):
    """Experience transferred from one stage to another."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    bytes: float = Field(ge=0)
    cost: Cost = Field(description="seconds")


class Refit(Document):
    """Weights moved from the training copy of a role to another stage's copy, before that stage runs."""

    role: Role
    source: str
    target: str
    start_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    bytes: float = Field(ge=0)
    cost: Cost = Field(description="seconds")


class SearchWork(Document):
    """Counts of the work of a search. A search that no time limit ends has the same counts on every machine."""

    num_time_costs: int = Field(default=0, ge=0, description="choices whose seconds were computed")
    num_memory_costs: int = Field(default=0, ge=0, description="choices whose bytes were computed")
    num_generations: int = Field(default=0, ge=0, description="simulated generation choices, over all search cases")
    num_too_slow: int = Field(default=0, ge=0, description="choices pruned as slower than a known plan")
    num_models: int = Field(default=0, ge=0, description="models that the solver was given")
    deterministic_time: float = Field(
        default=0.0, ge=0, description="deterministic time of the solver, in its own unit"
    )


ROUNDING_TOLERANCE = 1e-3
"""The share of a plan's seconds that rounding to the solver's whole ticks may lose: a hundred tasks lose one tick each,
and a step has at least 100,000."""


class Solver(Document):
    """The solver's record of how the plan was found and how good it is: `gap` = (objective - bound) / objective."""

    name: str
    version: str
    seed: int
    num_workers: int = Field(gt=0)
    max_deterministic_time: float = Field(ge=0)
    requested_gap: float = Field(default=0.0, ge=0, le=1, description="gap at which the search may end")
    status: Literal["optimal", "feasible", "pinned"]
    objective_seconds: float
    bound_seconds: float
    gap: float = Field(ge=0)
    work: SearchWork = SearchWork()

    @property
    def has_requested_gap(self) -> bool:
        """True if the gap is at most the requested one, up to rounding."""
        return self.gap <= self.requested_gap + ROUNDING_TOLERANCE


def _range_text(pool: Pool) -> str:
    ranks = pool.ranks
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"


class EngineOption(Document):
    """An engine that the job allows: its fastest plan, or the reason why there is none."""

    engine: EngineName
    period_seconds: float | None = Field(default=None, gt=0, description="predicted seconds per step")
    source: Source | None = Field(default=None, description="source of the seconds of generation")
    reason: str | None = Field(default=None, description="why the engine has no plan")

    @model_validator(mode="after")
    def _require_plan_or_reason(self) -> Self:
        if (self.period_seconds is None) == (self.reason is None):
            raise ValueError("give period_seconds for an engine with a plan, or the reason for one without")
        return self


class Plan(VersionedDocument):
    """The decision: which stage runs where, how and when, for which facts, and the proven gap to the best plan."""

    remedy: ClassVar[str] = "plan the job again"

    digests: dict[str, str] = Field(description="SHA-256 of each input the plan was computed from")
    facts: Facts
    staleness: int = Field(
        ge=0, description="largest number of actor updates between sampling a token and training on it"
    )
    pins: tuple[str, ...] = Field(default=(), description="choices that the user fixed or forbade")
    engine_options: tuple[EngineOption, ...] | None = Field(
        default=None, min_length=1, description="the engines that the plan was chosen among"
    )
    solver: Solver
    pools: tuple[Pool, ...]
    workers: tuple[HostWorkers, ...] = Field(default=(), description="workers of each reward that runs on hosts")
    placements: tuple[Placement, ...]
    edges: tuple[Edge, ...]
    refits: tuple[Refit, ...]
    period_seconds: float = Field(gt=0, description="predicted seconds per step")
    peak_bytes_per_rank: tuple[int, ...]

    def _repr_html_(self) -> str:
        """The plan in a notebook: its step with its gap, and a row for each stage."""
        bound = f"no plan in the space is faster than {self.solver.bound_seconds:.3f} s, by this cost model"
        step = (
            f"A step takes {self.period_seconds:.3f} s on {self.facts.cluster.name}; "
            f"{'no bound is known, since nothing was searched' if self.solver.status == 'pinned' else bound}."
        )
        rows = (
            (
                placement.stage,
                _range_text(self.pool(placement.pool)),
                str(placement.layout),
                f"{placement.start_seconds:.3f}",
                f"{placement.cost.total:.3f}",
            )
            for placement in sorted(self.placements, key=lambda placement: placement.start_seconds)
        )
        return html_paragraphs([step]) + html_table(("stage", "ranks", "layout", "start s", "seconds"), rows)

    @property
    def origins(self) -> dict[str, str]:
        """The digests of inputs that the plan does not contain; `verify.ORIGINS` lists the possible ones."""
        own_digests = self.facts.digests()
        return {name: digest for name, digest in self.digests.items() if name not in own_digests}

    @property
    def lengths_are_observed(self) -> bool:
        """True if the lengths of the workload were observed in a trace rather than stated by the job."""
        return "trace" in self.digests

    def require_made_for(self, job: Job, directory: Path) -> None:
        """Raises BadInput unless this is a plan of the job, whose paths are relative to `directory`."""
        require_job(self.facts, job, directory, lengths_are_observed=self.lengths_are_observed)

    @property
    def graph(self) -> StageGraph:
        """The stages of a step of the plan's job."""
        return self.facts.graph

    def stage(self, name: str) -> Stage:
        return self.graph.by_name[name]

    def placement(self, stage: str) -> Placement:
        return next(p for p in self.placements if p.stage == stage)

    def part_of(self, stage: str) -> int:
        """The index of the cluster part, or of the pair of parts, that a stage runs on."""
        return self.facts.cluster.part_of_pool(self.pool_of(stage).ranks)

    def replicas_of(self, stage: str) -> tuple[int, ...]:
        """The number of replicas of a stage on each kind of node."""
        placement = self.placement(stage)
        if not placement.schedule.rows:
            return (placement.layout.dp,)
        replica_ranks = placement.layout.num_ranks // placement.layout.dp
        return replicas_of_parts(self.facts.cluster, self.part_of(stage), replica_ranks)

    def row_split_of(self, stage: str) -> ReplicaAssignment:
        """The split of the rows of a stage over its replicas, for rows that all exist when the stage starts.

        If micro-batches are capped by tokens, memory allows a replica any number of rows. Pipelines are the exception:
        their micro-batches in flight grow with the rows.
        """
        placement, model = self.placement(stage), self.facts.models.spec(self.stage(stage).role)
        any_number = placement.schedule.micro_batch_tokens > 0 and placement.layout.pp == 1
        return ReplicaAssignment(model, self.replicas_of(stage), placement.schedule.rows, any_number)

    @property
    def ahead(self) -> dict[str, int]:
        return {placement.stage: placement.steps_ahead for placement in self.placements}

    def reads_same_period(self, producer: str, consumer: str) -> bool:
        """True if the consumer reads what the producer writes in the same period."""
        return self.placement(producer).steps_ahead == self.placement(consumer).steps_ahead

    def pool(self, name: str) -> Pool:
        return next(p for p in self.pools if p.name == name)

    def pool_of(self, stage: str) -> Pool:
        return self.pool(self.placement(stage).pool)

    def choice(self, stage: str, key: str) -> Value:
        """The value of a stage under a pin's key: its pool, its layout, a degree of it, or a field of its schedule."""
        placement, pool = self.placement(stage), self.pool_of(stage)
        if key == "pool":
            return Ranks(pool.first_rank, pool.num_ranks)
        return value_of(placement.layout, placement.schedule, key)

    def copy_of(self, stage: str) -> str:
        """The stage that owns the copy of the weights that this stage uses.

        Stages of one role with the same pool and layout share a copy: that of the training stage, else of the first
        that needs an adapter, else of the first. A stage with weights in 8-bit floats shares none.
        """
        if self.stage(stage).is_quantised:
            return stage
        placement, role = self.placement(stage), self.stage(stage).copied_role
        colocated = {p.stage for p in self.placements if (p.pool, p.layout) == (placement.pool, placement.layout)}
        return next(name for name in self.graph.sharers(role) if name in colocated)


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file. Raises BadInput for another schema version and for anything malformed."""
    plan = read_json(Plan, path, "plan")
    require_within_limits(plan.facts.models.by_name, plan.facts.cluster, plan.facts.workload, f"plan {path}")
    return plan


def read_run_plan(directory: Path) -> Plan:
    """The plan of the run in a directory. Raises BadInput for a directory that holds none, and like `read_plan`."""
    if not (directory / "plan.json").exists():
        what = "holds no plan.json" if directory.is_dir() else "is not a directory"
        raise BadInput(f"{directory} {what}; give the --out of `meshwright run`.")
    return read_plan(directory / "plan.json")


def write_plan(path: Path, plan: Plan) -> None:
    """Write the plan's canonical bytes."""
    write_atomically(path, canonical_json(plan))
