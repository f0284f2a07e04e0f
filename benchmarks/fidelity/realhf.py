"""PPO steps of ReaL under one symmetric layout, which its rows do not state: the quickest that fits is answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.intervals import Doubt, Shift
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Tally, total
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import Framework, framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Role, Stage
from meshwright.profiles.workload import Workload

_STAGES = ("actor_generate", "reward_score", "ref_logprob", "critic_value", "actor_train", "critic_train")
_TRAINED = {Role.ACTOR, Role.CRITIC}
_BATCHES = (1, 2, 4, 8, 16)
"""Multiples of the default number of micro-batches that are tried; fewer need more memory."""

_MEMORY_SHARE = 0.9


class Step(NamedTuple):
    layout: Layout
    cost: Cost


def real_heuristic(_stem: str, row: Row) -> Answer:
    """The quickest symmetric layout that fits, all models sharing all ranks."""
    experiment = experiment_of(row)
    found = experiment.best(framework_named("realhf"))
    cluster, workload = experiment.cluster, experiment.workload
    label = f"{row['model_actor']} {row['model_critic']} x{cluster.num_ranks} "
    label += f"{workload.prompt.max}+{workload.response.max} -> {found.layout}"
    framework = framework_named("realhf")

    def ask(shift: Shift) -> float:
        shifted = replace(experiment, cluster=shift.cluster(cluster))
        return shifted.best(shift.framework(framework)).cost.total

    return Answer(
        label=label,
        measured=number(row, "step_time_s"),
        predicted=found.cost.total,
        terms=found.cost,
        ask=ask,
        doubt=Doubt(device=cluster.device.name),
    )


def experiment_of(row: Row) -> Experiment:
    """What the row asks: sequences of one length, every model with its size."""
    prompt, response = count(row, "prompt_len_tok"), count(row, "response_len_tok")
    workload = Workload(
        batch_size=count(row, "batch_prompts"),
        prompt=LengthSpec(max=prompt, fixed=prompt),
        response=LengthSpec(max=response, fixed=response),
        num_minibatches=assumed().real.num_minibatches,
    )
    models = {
        Role.ACTOR: model_named(row["model_actor"]),
        Role.REF: model_named(row["model_ref"]),
        Role.CRITIC: replace(model_named(row["model_critic"]), scalar_head=True),
        Role.REWARD: replace(model_named(row["model_reward"]), scalar_head=True),
    }
    return Experiment(cluster_of(row["gpu"], count(row, "num_gpus")), workload, models)


@dataclass(frozen=True)
class Experiment:
    cluster: Cluster
    workload: Workload
    models: dict[Role, ModelSpec]

    def best(self, framework: Framework) -> Step:
        """The quickest layout; skips the row when none fits in memory."""
        steps = [step for layout in self._layouts if (step := self._step(layout, framework))]
        if not steps:
            raise Skip("no single layout fits in memory")
        return min(steps, key=lambda step: step.cost.total)

    @cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        """Tensor parallelism inside a node and pipeline stages across nodes, as the rows say of the hand rule."""
        return tuple(self._legal())

    def _legal(self) -> Iterator[Layout]:
        cluster, workload = self.cluster, self.workload
        for tp in divisors(cluster.ranks_per_node):
            for pp in divisors(cluster.num_ranks // tp):
                dp = cluster.num_ranks // tp // pp
                if pp % cluster.nodes == 0 and workload.batch_size % (dp * workload.num_minibatches) == 0:
                    yield Layout(tp=tp, pp=pp, dp=dp)

    def _step(self, layout: Layout, framework: Framework) -> Step | None:
        """All calls one after the other, each with the fewest micro-batches that fit; None when nothing fits."""
        model = AnalyticModel(self.cluster, self.workload, "bf16", framework=framework)
        stages = [self._choices(PPO_GRAPH.by_name[name], layout) for name in _STAGES]
        try:
            owners = [calls[0] for calls in stages if calls[0].stage.trains or calls[0].stage.role not in _TRAINED]
            resident = sum(model.memory(query).resident_bytes for query in owners)
            fitting = [[query for query in calls if self._fits(model, query, resident)] for calls in stages]
            if not all(fitting):
                return None
            costs = [min(map(model.seconds, calls), key=lambda cost: cost.total) for calls in fitting]
        except BadInput:
            return None
        tally = Tally()
        tally.add("function calls", len(_STAGES) * framework.call_seconds)
        return Step(layout, total([*costs, tally.cost()]).merged())

    def _choices(self, stage: Stage, layout: Layout) -> list[StageQuery]:
        """Training recomputes; generation has a slot for every row and takes turns over the pipeline stages."""
        rows, model = -(-self.workload.batch_size // layout.dp), self.models[stage.role]
        if stage.generates:
            return [StageQuery(stage=stage, model=model, layout=layout, schedule=Schedule(generation_slots=rows))]
        if stage.trains:
            rows = -(-rows // self.workload.num_minibatches)
        recompute = Recompute.FULL if stage.trains else Recompute.NONE
        sizes = {-(-rows // (times * _num_batches(stage, layout))) for times in _BATCHES}
        schedules = [Schedule(micro_batch_size=size, recompute=recompute) for size in sorted(sizes)]
        return [StageQuery(stage=stage, model=model, layout=layout, schedule=schedule) for schedule in schedules]

    def _fits(self, model: AnalyticModel, query: StageQuery, resident: int) -> bool:
        return resident + model.memory(query).transient.total < _MEMORY_SHARE * self.cluster.device.memory_bytes


def _num_batches(stage: Stage, layout: Layout) -> int:
    if layout.pp == 1:
        return 1
    real = assumed().real
    return layout.pp * (real.train_batches_per_stage if stage.trains else real.forward_batches_per_stage)
