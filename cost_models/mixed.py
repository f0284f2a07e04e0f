"""Costs on a mixed cluster: each part (nodes of one kind) has its own cost model, and a fabric joins the parts.

Transfers between parts take the slower of the fabric and the links inside.

A stage on a pair of neighbouring parts has whole replicas on nodes of each kind:

    seconds = the passes of the kind that finishes its rows last
            + for each term of the updates, at which all replicas synchronize, the slower kind's
    bytes   = those of the kind that takes more

Each kind's seconds and bytes come from a cost model of as many nodes as the pair has, all of that kind, joined by the
slowest fabric.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import ge

import numpy as np

from meshwright.cost_models import communication
from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.kernels import element_bytes
from meshwright.cost_models.pipeline import UPDATE
from meshwright.cost_models.protocol import (
    BytesColumns,
    CostModel,
    LayoutCosts,
    QueriedLayoutCosts,
    QueryLoop,
    RefitQuery,
    RefitTable,
    SecondsColumns,
    StageQuery,
)
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.elementwise import FloatArray
from meshwright.profiles.frameworks import Engine, own_framework
from meshwright.profiles.hardware import Cluster, Link, MixedCluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.workload import Workload


class MixedModel(QueryLoop):
    """A cost model of a mixed cluster, which delegates each query to the cost model of its part or pair of parts.

    `models` are the cost models of the cluster's parts, `pairs` those of every two neighbouring parts, in order.
    """

    def __init__(
        self,
        cluster: MixedCluster,
        models: Sequence[CostModel],
        pairs: Sequence[PairModel],
        precision: str,
        engine: Engine | None = None,
    ) -> None:
        self._cluster, self._models, self._size = cluster, tuple(models), element_bytes(precision)
        self._by_part: tuple[CostModel | PairModel, ...] = (*models, *pairs)
        self._engine = engine

    @property
    def seconds_are_monotone(self) -> bool:
        return all(model.seconds_are_monotone for model in self._models)

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self._by_part[part].lower_bound_seconds(stage, model, num_ranks, 0)

    def with_row_split(self, query: StageQuery) -> Schedule:
        return self._by_part[query.part].with_row_split(query)

    def generation_lower_bound(self, query: StageQuery) -> float:
        return self._models[query.part].generation_lower_bound(query)

    def seconds(self, query: StageQuery) -> Cost:
        return self._by_part[query.part].seconds(query)

    def tail_seconds(self, query: StageQuery) -> float:
        return self._by_part[query.part].tail_seconds(query)

    def memory(self, query: StageQuery) -> Memory:
        return self._by_part[query.part].memory(query)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return self._by_part[query.part].on_layout(query)

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        return self._by_part[query.part].seconds_of_choices(query, choices)

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        return self._by_part[query.part].bytes_of_choices(query, choices)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        """Return the seconds of a refit, over the fabric if it goes between parts or involves a pair of parts."""
        if move.source_part == move.target_part < len(self._cluster.parts):
            return self._models[move.target_part].refit_seconds(move)
        ends = self._ends(move.source_part, move.target_part)
        return max((self._refit_between(move, part) for part in ends), key=lambda cost: cost.total)

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        """Return the seconds of several refits, [refits]; those between the same two parts are costed together."""
        seconds = np.empty(len(refits))
        source_part = np.array([source.part for source in refits.sources])[refits.source_index]
        target_part = np.array([target.part for target in refits.targets])[refits.target_index]
        for source, target in {*zip(source_part.tolist(), target_part.tolist(), strict=True)}:
            are_these = (source_part == source) & (target_part == target)
            seconds[are_these] = self._seconds_between(refits.filter(are_these), source, target)
        return seconds

    def _seconds_between(self, refits: RefitTable, source: int, target: int) -> FloatArray:
        """Return the seconds of refits between two parts, as `refit_seconds` does, [refits]."""
        if source == target < len(self._cluster.parts):
            return self._models[target].seconds_of_refits(refits)
        slowest = np.zeros(len(refits))
        for part in self._ends(source, target):
            efficiency = efficiency_of(part.kind, part.device.name)
            found = communication.seconds_of_refits(
                refits,
                self._over_fabric(part),
                efficiency,
                self._size,
                trainer=own_framework(part.kind),
                engine=self._engine,
            )
            slowest = np.maximum(slowest, found)
        return slowest

    def _ends(self, source: int, target: int) -> tuple[Cluster, ...]:
        """Return the parts of the cluster that the two pools of a refit are on, each once."""
        sources = self._cluster.parts_of(source)
        return (*sources, *(part for part in self._cluster.parts_of(target) if part not in sources))

    def transfer_seconds(self, num_bytes: float) -> Cost:
        """Return the seconds of the slowest path: between parts, or within the slowest part."""
        across = (
            communication.experience_seconds(
                num_bytes, self._over_fabric(part), efficiency_of(part.kind, part.device.name)
            )
            for part in self._cluster.parts
        )
        inside = (model.transfer_seconds(num_bytes) for model in self._models)
        return max((*across, *inside), key=lambda cost: cost.total)

    def _refit_between(self, move: RefitQuery, part: Cluster) -> Cost:
        efficiency = efficiency_of(part.kind, part.device.name)
        return communication.refit_seconds(
            move,
            self._over_fabric(part),
            efficiency,
            self._size,
            trainer=own_framework(part.kind),
            engine=self._engine,
        )

    def _over_fabric(self, part: Cluster) -> Cluster:
        """Return the part with the slower of its network and the fabric between parts for every link."""
        slower = _slowest(self._cluster.between, part.inter_node)
        return part.model_copy(update={"intra_node": slower, "inter_node": slower})


@dataclass(frozen=True)
class PairModel(QueryLoop):
    """A cost model of stages on two kinds of nodes.

    For each kind, `models` has a cost model of the cluster built by `homogeneous_cluster`, and `num_ranks` the ranks
    of that kind.
    """

    models: tuple[CostModel, CostModel]
    num_ranks: tuple[int, int]
    workload: Workload

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """Return a bound for arbitrarily divisible work: two kinds of nodes that would take a and b seconds alone take
        1 / (1/a + 1/b) together."""
        del num_ranks, part
        pairs = zip(self.models, self.num_ranks, strict=True)
        each = [one.lower_bound_seconds(stage, model, num_here, 0) for one, num_here in pairs]
        return 1 / sum(1 / least for least in each) if all(each) else 0.0

    def with_row_split(self, query: StageQuery) -> Schedule:
        """Return the schedule with the split of rows that ends soonest.

        A binary search finds the fewest rows per replica with which the first kind finishes last; the better of that
        number and one row fewer is taken. It is exact because more rows never take less time.
        """
        num_rows, (first, other) = self._rows_at_once(query.stage), self._replicas(query.layout)

        def rows_with(each: int) -> tuple[int, int]:
            mine = min(each * first, num_rows - other)
            return mine, num_rows - mine

        def seconds_with(each: int) -> tuple[float, float]:
            split_query = replace(query, schedule=replace(query.schedule, rows=rows_with(each)))
            mine, others = (_pass_seconds(cost) for cost in self._costs(split_query))
            return mine, others

        candidates = range(1, -(-(num_rows - other) // first) + 1)
        last = bisect_left(candidates, x=True, key=lambda each: ge(*seconds_with(each)))
        best = min((each for each in (last, last + 1) if each in candidates), key=lambda each: max(seconds_with(each)))
        return replace(query.schedule, rows=rows_with(best))

    def seconds(self, query: StageQuery) -> Cost:
        costs = self._costs(query)
        passes = tuple(term for term in max(costs, key=_pass_seconds).terms if term.name not in UPDATE)
        update_terms = [[term for cost in costs for term in cost.terms if term.name == name] for name in UPDATE]
        return Cost((*passes, *(max(terms, key=lambda term: term.amount) for terms in update_terms if terms)))

    def tail_seconds(self, query: StageQuery) -> float:
        return self.seconds(query).total

    def memory(self, query: StageQuery) -> Memory:
        memories = (model.memory(mine) for model, mine in zip(self.models, self._queries_by_kind(query), strict=True))
        return max(memories, key=lambda memory: memory.peak_bytes)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def _costs(self, query: StageQuery) -> list[Cost]:
        """Return the seconds of the replicas of each kind."""
        return [model.seconds(mine) for model, mine in zip(self.models, self._queries_by_kind(query), strict=True)]

    def _queries_by_kind(self, query: StageQuery) -> Iterator[StageQuery]:
        """Yield the query for each kind, with the rows of its fullest replica."""
        schedule = replace(query.schedule, rows=())
        for rows, number in zip(query.schedule.rows, self._replicas(query.layout), strict=True):
            yield replace(query, part=0, schedule=schedule, replica_rows=-(-rows // number))

    def _replicas(self, layout: Layout) -> tuple[int, int]:
        """Return the number of replicas of a layout on nodes of each kind."""
        first, other = (num_ranks // (layout.num_ranks // layout.dp) for num_ranks in self.num_ranks)
        return first, other

    def _rows_at_once(self, stage: Stage) -> int:
        """Return the rows that all replicas process at once."""
        return self.workload.batch_size // (self.workload.num_minibatches if stage.trains else 1)


def homogeneous_cluster(one: Cluster, other: Cluster, between: Link) -> Cluster:
    """Return a cluster of as many nodes as both parts have, all like those of `one`, joined by the slowest fabric."""
    slowest = _slowest(between, one.inter_node, other.inter_node)
    return one.model_copy(update={"nodes": one.nodes + other.nodes, "inter_node": slowest})


def _pass_seconds(cost: Cost) -> float:
    """Return the seconds that replicas spend without synchronizing."""
    return cost.total - cost.amount(*UPDATE)


def _slowest(*links: Link) -> Link:
    return Link(
        seconds=max(link.seconds for link in links),
        bytes_per_second=min(link.bytes_per_second for link in links),
    )
