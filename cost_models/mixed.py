"""Costs on nodes of several kinds: every part has a model of its own, and a fabric joins them.

What passes between parts takes the slower of the fabric and the links inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost_models import transfer
from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.precision import element_bytes
from meshwright.cost_models.question import Call, CostModel, LayoutCosts, Move
from meshwright.profiles.cluster import Cluster, Link, MixedCluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.frameworks import Engine
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Stage


class MixedModel:
    """The answers of the part that a question is about; `models` are those of the cluster's parts, in their order."""

    def __init__(
        self, cluster: MixedCluster, models: Sequence[CostModel], precision: str, engine: Engine | None = None
    ) -> None:
        self._cluster, self._models, self._size = cluster, tuple(models), element_bytes(precision)
        self._engine = engine

    @property
    def memory_grows(self) -> bool:
        return all(model.memory_grows for model in self._models)

    @property
    def seconds_grow(self) -> bool:
        return all(model.seconds_grow for model in self._models)

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self._models[part].least_seconds(stage, model, num_ranks, 0)

    def least_generation_seconds(self, call: Call) -> float:
        return self._models[call.part].least_generation_seconds(call)

    def seconds(self, call: Call) -> Cost:
        return self._models[call.part].seconds(call)

    def tail_seconds(self, call: Call) -> float:
        return self._models[call.part].tail_seconds(call)

    def memory(self, call: Call) -> Memory:
        return self._models[call.part].memory(call)

    def on_layout(self, call: Call) -> LayoutCosts:
        return self._models[call.part].on_layout(call)

    def move_seconds(self, move: Move) -> Cost:
        """Between parts, each receiving rank drives its own device and both ends share the fabric."""
        if move.source_part == move.target_part:
            return self._models[move.target_part].move_seconds(move)
        return max(
            (self._across(move, self._cluster.parts[part]) for part in (move.source_part, move.target_part)),
            key=lambda cost: cost.total,
        )

    def handover_seconds(self, num_bytes: float) -> Cost:
        """Over the slowest way that experience may have to take: between parts, or within the slowest part."""
        across = (
            transfer.handover_seconds(num_bytes, self._joined(part), efficiency_of(part.kind, part.device.name))
            for part in self._cluster.parts
        )
        inside = (model.handover_seconds(num_bytes) for model in self._models)
        return max((*across, *inside), key=lambda cost: cost.total)

    def _across(self, move: Move, part: Cluster) -> Cost:
        efficiency = efficiency_of(part.kind, part.device.name)
        return transfer.refit_seconds(move, self._joined(part), efficiency, self._size, self._engine)

    def _joined(self, part: Cluster) -> Cluster:
        """The part as one end of the fabric between parts sees it."""
        return part.model_copy(update={"intra_node": self._slower(part), "inter_node": self._slower(part)})

    def _slower(self, part: Cluster) -> Link:
        between, inside = self._cluster.between, part.inter_node
        return Link(
            seconds=max(between.seconds, inside.seconds),
            bytes_per_second=min(between.bytes_per_second, inside.bytes_per_second),
        )
