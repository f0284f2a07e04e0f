"""Costs on nodes of several kinds: every part has a model of its own, and a fabric joins them.

What passes between parts takes the slower of the fabric and the links inside.

A stage on a pair of neighbouring parts has whole replicas on nodes of each kind:

    seconds = the passes of the kind that is done last with its rows
            + of each term of the updates, at which all replicas meet, the slower kind's
    bytes   = those of the kind that takes more

Each kind's are by a model of as many nodes as the pair has, all of its own kind, joined by the slowest fabric.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import ge

from meshwright.cost_models import transfer
from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.pipeline import UPDATE
from meshwright.cost_models.precision import element_bytes
from meshwright.cost_models.question import Call, CostModel, LayoutCosts, Move, Summed
from meshwright.profiles.cluster import Cluster, Link, MixedCluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.frameworks import Engine
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.workload import Workload


class MixedModel:
    """The answers of the part that a question is about; `models` are those of the cluster's parts, and `pairs` those of
    two neighbouring ones each, in their order."""

    def __init__(
        self,
        cluster: MixedCluster,
        models: Sequence[CostModel],
        pairs: Sequence[PairModel],
        precision: str,
        engine: Engine | None = None,
    ) -> None:
        self._cluster, self._models, self._size = cluster, tuple(models), element_bytes(precision)
        self._numbered: tuple[CostModel | PairModel, ...] = (*models, *pairs)
        self._engine = engine

    @property
    def memory_grows(self) -> bool:
        return all(model.memory_grows for model in self._models)

    @property
    def seconds_grow(self) -> bool:
        return all(model.seconds_grow for model in self._models)

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self._numbered[part].least_seconds(stage, model, num_ranks, 0)

    def dealt(self, call: Call) -> Schedule:
        return self._numbered[call.part].dealt(call)

    def least_generation_seconds(self, call: Call) -> float:
        return self._models[call.part].least_generation_seconds(call)

    def seconds(self, call: Call) -> Cost:
        return self._numbered[call.part].seconds(call)

    def tail_seconds(self, call: Call) -> float:
        return self._numbered[call.part].tail_seconds(call)

    def memory(self, call: Call) -> Memory:
        return self._numbered[call.part].memory(call)

    def on_layout(self, call: Call) -> LayoutCosts:
        return self._numbered[call.part].on_layout(call)

    def move_seconds(self, move: Move) -> Cost:
        """Between parts, each receiving rank drives its own device and both ends share the fabric; so they do on a
        pair, wherever a rank's weights come from."""
        if move.source_part == move.target_part < len(self._cluster.parts):
            return self._models[move.target_part].move_seconds(move)
        ends = (*self._cluster.parts_of(move.source_part), *self._cluster.parts_of(move.target_part))
        return max((self._across(move, part) for part in ends), key=lambda cost: cost.total)

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
        slower = _slowest(self._cluster.between, part.inter_node)
        return part.model_copy(update={"intra_node": slower, "inter_node": slower})


@dataclass(frozen=True)
class PairModel:
    """The answers about stages on two kinds of nodes; of each kind `models` has one of a cluster of all the nodes as
    `as_one_kind` has it, and `num_ranks` how many are of that kind."""

    models: tuple[CostModel, CostModel]
    num_ranks: tuple[int, int]
    workload: Workload

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """As if work could be cut at will: two kinds that alone take a and b seconds take 1 / (1/a + 1/b) together."""
        del num_ranks, part
        pairs = zip(self.models, self.num_ranks, strict=True)
        each = [one.least_seconds(stage, model, num_here, 0) for one, num_here in pairs]
        return 1 / sum(1 / least for least in each) if all(each) else 0.0

    def dealt(self, call: Call) -> Schedule:
        """So many rows to each replica of the first kind that it is done last, or first with one fewer: the better of
        the two, found by halving, for more rows never take less time."""
        every, (first, other) = self._rows_at_once(call.stage), self._replicas(call.layout)

        def rows_with(each: int) -> tuple[int, int]:
            mine = min(each * first, every - other)
            return mine, every - mine

        def done_at(each: int) -> tuple[float, float]:
            asked = replace(call, schedule=replace(call.schedule, rows=rows_with(each)))
            mine, others = (_passing_seconds(cost) for cost in self._costs(asked))
            return mine, others

        numbers = range(1, -(-(every - other) // first) + 1)
        last = bisect_left(numbers, x=True, key=lambda each: ge(*done_at(each)))
        best = min((each for each in (last, last + 1) if each in numbers), key=lambda each: max(done_at(each)))
        return replace(call.schedule, rows=rows_with(best))

    def seconds(self, call: Call) -> Cost:
        costs = self._costs(call)
        passes = tuple(term for term in max(costs, key=_passing_seconds).terms if term.name not in UPDATE)
        met = [[term for cost in costs for term in cost.terms if term.name == name] for name in UPDATE]
        return Cost((*passes, *(max(terms, key=lambda term: term.amount) for terms in met if terms)))

    def tail_seconds(self, call: Call) -> float:
        return self.seconds(call).total

    def memory(self, call: Call) -> Memory:
        found = (model.memory(mine) for model, mine in zip(self.models, self._of_kinds(call), strict=True))
        return max(found, key=lambda memory: memory.peak_bytes)

    def on_layout(self, call: Call) -> LayoutCosts:
        return Summed(self, call)

    def _costs(self, call: Call) -> list[Cost]:
        """Seconds of the stage as the replicas of each kind alone decide them."""
        return [model.seconds(mine) for model, mine in zip(self.models, self._of_kinds(call), strict=True)]

    def _of_kinds(self, call: Call) -> Iterator[Call]:
        """The question about each kind, with the rows of its fullest replica."""
        schedule = replace(call.schedule, rows=())
        for rows, number in zip(call.schedule.rows, self._replicas(call.layout), strict=True):
            yield replace(call, part=0, schedule=schedule, replica_rows=-(-rows // number))

    def _replicas(self, layout: Layout) -> tuple[int, int]:
        """How many of a layout are on nodes of each kind."""
        first, other = (num_ranks // (layout.num_ranks // layout.dp) for num_ranks in self.num_ranks)
        return first, other

    def _rows_at_once(self, stage: Stage) -> int:
        """Of all replicas."""
        return self.workload.batch_size // (self.workload.num_minibatches if stage.trains else 1)


def as_one_kind(one: Cluster, other: Cluster, between: Link) -> Cluster:
    """As many nodes as both parts have, all like those of the first, joined by the slowest fabric on the way."""
    slowest = _slowest(between, one.inter_node, other.inter_node)
    return one.model_copy(update={"nodes": one.nodes + other.nodes, "inter_node": slowest})


def _passing_seconds(cost: Cost) -> float:
    """Of what the replicas do on their own."""
    return cost.total - cost.amount(*UPDATE)


def _slowest(*links: Link) -> Link:
    return Link(
        seconds=max(link.seconds for link in links),
        bytes_per_second=min(link.bytes_per_second for link in links),
    )
