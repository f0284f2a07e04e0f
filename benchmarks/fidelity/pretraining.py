"""Seconds of one Megatron training iteration: the training stage of PPO with sequences of one length.

Every equation is the stages' own; this file only puts the question.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One optimizer update on `batch_size` sequences of `num_tokens` tokens each.

    `linear_format` is the number format of the linears of layers, where it is not the precision.
    """

    model: ModelSpec
    layout: Layout
    schedule: Schedule
    batch_size: int
    num_tokens: int
    framework: Framework
    linear_format: str | None = None


def iteration_seconds(
    iteration: Iteration, cluster: Cluster, precision: str, efficiency: Efficiency | None = None
) -> Cost:
    """Forward, backward and update; raises BadInput for a layout that does not divide the model."""
    return _model(iteration, cluster, precision, efficiency).seconds(_call(iteration))


def iteration_memory(iteration: Iteration, cluster: Cluster, precision: str) -> Memory:
    """Bytes on the fullest rank; raises as `iteration_seconds`."""
    return _model(iteration, cluster, precision, None).memory(_call(iteration))


def last_stage_memory(iteration: Iteration, cluster: Cluster, precision: str) -> Memory:
    """Bytes on a rank of the last pipeline stage; raises as `iteration_seconds`."""
    return _model(iteration, cluster, precision, None).last_stage_memory(_call(iteration))


def _model(iteration: Iteration, cluster: Cluster, precision: str, efficiency: Efficiency | None) -> AnalyticModel:
    prompt = LengthSpec(max=1, fixed=1)
    response = LengthSpec(max=iteration.num_tokens - 1, fixed=iteration.num_tokens - 1)
    workload = Workload(batch_size=iteration.batch_size, prompt=prompt, response=response)
    return AnalyticModel(
        cluster,
        workload,
        precision,
        framework=iteration.framework,
        efficiency=efficiency,
        linear_format=iteration.linear_format,
    )


def _call(iteration: Iteration) -> StageQuery:
    return StageQuery(
        stage=PPO_GRAPH.by_name["actor_train"],
        model=iteration.model,
        layout=iteration.layout,
        schedule=iteration.schedule,
    )
