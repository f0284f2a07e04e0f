"""The queries to a cost model (`StageQuery`, `RefitQuery`), the protocol of a cost model, and a cache for its answers.

A query holds facts and one choice, so a cost model knows nothing of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from meshwright.cost_models.cost import WEIGHTS, Cost, Memory
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.elementwise import BoolArray, FloatArray, IntArray
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageQuery:
    """A query for the cost of one stage with one layout and schedule, on as many neighbouring ranks as the layout has.

    `max_deferral` is the number of periods beyond its first that a sequence may stay in flight when the schedule
    overcommits. `part` is the index of the cluster part (nodes of one kind), or pair of parts, with the ranks. With
    `recomputes_cache`, every period recomputes the keys and values of the sequences in flight. `replica_rows` is the
    number of rows of the fullest replica (of a batch, or of a minibatch if the stage trains) when the `dp` replicas do
    not share them equally, and 0 otherwise.
    """

    stage: Stage
    model: ModelSpec
    layout: Layout
    schedule: Schedule
    max_deferral: int = 0
    part: int = 0
    recomputes_cache: bool = False
    replica_rows: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """A hash of the fields that distinguish most calls; hashing the whole model each time slows the search."""
        schedule = self.schedule
        return hash(
            (
                self.stage.name,
                self.layout,
                self.max_deferral,
                self.replica_rows,
                schedule.rows,
                schedule.micro_batch_size,
                schedule.micro_batch_tokens,
                str.__hash__(schedule.recompute),
                str.__hash__(schedule.offload),
                schedule.chunk_tokens,
                schedule.generation_slots,
                schedule.batches_in_flight,
                schedule.overcommit,
                str.__hash__(schedule.while_waiting),
                schedule.draft_tokens,
            )
        )


@dataclass(frozen=True, kw_only=True)
class RefitQuery:
    """A query for the cost of a refit, the transfer of one role's weights between two layouts; `overlap` is the number
    of ranks that are in both pools.

    The cost depends on the ranks of the source, the slices that it sends to the target, the sharding of the target,
    and whether the two layouts are equal. `source_part` and `target_part` are the indices of the cluster parts of the
    pools. If the target `generates`, its engine loads the weights, and converts them to 8-bit floats if it
    `quantises`.
    """

    model: ModelSpec
    source: Layout
    target: Layout
    overlap: int
    source_part: int = 0
    target_part: int = 0
    generates: bool = False
    quantises: bool = False


class PlacedLayout(NamedTuple):
    """A layout on a part of the cluster."""

    part: int
    layout: Layout


@dataclass(frozen=True, eq=False)
class RefitTable:
    """Refits of one role's weights from several sources to several targets, to cost all of them at once.

    Refit i goes from `sources[source_index[i]]` to `targets[target_index[i]]`, and `overlap[i]` ranks are in both
    pools, all [refits]. The other fields are those of `RefitQuery`.
    """

    model: ModelSpec
    sources: tuple[PlacedLayout, ...]
    targets: tuple[PlacedLayout, ...]
    source_index: IntArray
    target_index: IntArray
    overlap: IntArray
    generates: bool = False
    quantises: bool = False

    def __len__(self) -> int:
        return len(self.overlap)

    def __iter__(self) -> Iterator[RefitQuery]:
        """Yield each refit as a query."""
        rows = zip(self.source_index.tolist(), self.target_index.tolist(), self.overlap.tolist(), strict=True)
        for source, target, overlap in rows:
            yield RefitQuery(
                model=self.model,
                source=self.sources[source].layout,
                target=self.targets[target].layout,
                overlap=overlap,
                source_part=self.sources[source].part,
                target_part=self.targets[target].part,
                generates=self.generates,
                quantises=self.quantises,
            )

    def filter(self, is_kept: BoolArray) -> RefitTable:
        """Return the refits for which `is_kept`, [refits], is true."""
        return replace(
            self,
            source_index=self.source_index[is_kept],
            target_index=self.target_index[is_kept],
            overlap=self.overlap[is_kept],
        )


class Memo(Generic[K, T]):
    """A cache of answers by key; an answer must not be None."""

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[K, T] = {}

    def memoize(self, key: K, make: Callable[[], T]) -> T:
        """Return the answer for a key, calling `make` the first time."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = make()
        return answer


class Bytes(NamedTuple):
    """Bytes on the fullest rank: `resident` at all times (of which `weights`), `transient` only while the stage runs,
    and `host` in the memory of its host."""

    resident: float
    weights: float
    transient: float
    host: float

    @property
    def peak(self) -> float:
        return self.resident + self.transient


class SecondsColumns(NamedTuple):
    """Seconds of several choices, and their seconds after the last token is sampled, each [choices]."""

    seconds: FloatArray
    tail_seconds: FloatArray


class BytesColumns(NamedTuple):
    """The fields of `Bytes` for several choices, each [choices]."""

    resident: FloatArray
    weights: FloatArray
    transient: FloatArray
    host: FloatArray

    @property
    def peak(self) -> FloatArray:
        return self.resident + self.transient


class LayoutCosts(Protocol):
    """Total seconds and bytes of one stage on one layout under any schedule, without terms, for speed in proofs."""

    def seconds(self, schedule: Schedule) -> float: ...

    def tail_seconds(self, schedule: Schedule) -> float: ...

    def bytes(self, schedule: Schedule) -> Bytes: ...


class RefitCosts(Protocol):
    """Seconds of single refits."""

    def refit_seconds(self, move: RefitQuery) -> Cost: ...


class ChoiceCosts(Protocol):
    """Seconds and bytes of single choices."""

    def seconds(self, query: StageQuery) -> Cost: ...

    def tail_seconds(self, query: StageQuery) -> float: ...

    def memory(self, query: StageQuery) -> Memory: ...


class QueryLoop:
    """A mixin for cost models that have a method for one choice or refit only: it asks for several one by one."""

    def has_mixed_batches(self, query: StageQuery) -> bool:
        """Return False: a prefill and a decode step are two passes."""
        del query
        return False

    def seconds_of_refits(self: RefitCosts, refits: RefitTable) -> FloatArray:
        """Return the seconds of several refits, [refits]."""
        return np.array([self.refit_seconds(refit).total for refit in refits], dtype=np.float64)

    def seconds_of_choices(self: ChoiceCosts, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        """Return the seconds of choices of the query's stage, each in place of the query's layout and schedule."""
        queries = list(queries_of(query, choices))
        seconds = [self.seconds(one).total for one in queries]
        tails = [
            self.tail_seconds(one) if one.schedule.chunk_tokens else whole_seconds
            for one, whole_seconds in zip(queries, seconds, strict=True)
        ]
        return SecondsColumns(np.array(seconds, dtype=np.float64), np.array(tails, dtype=np.float64))

    def bytes_of_choices(self: ChoiceCosts, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        """Return the bytes of choices of the query's stage."""
        rows = [bytes_of(self.memory(one)) for one in queries_of(query, choices)]
        return BytesColumns(*np.array(rows, dtype=np.float64).reshape(-1, len(Bytes._fields)).T)


def queries_of(query: StageQuery, choices: ChoiceTable) -> Iterator[StageQuery]:
    """Yield the query with each choice's layout and schedule; `max_deferral` is 0 where nothing is overcommitted."""
    for layout, schedule in choices:
        deferral = query.max_deferral if schedule.overcommit else 0
        yield replace(query, layout=layout, schedule=schedule, max_deferral=deferral)


def bytes_of(memory: Memory) -> Bytes:
    """Return the totals of a memory."""
    return Bytes(memory.resident.total, memory.resident.amount(WEIGHTS), memory.transient.total, memory.host.total)


class CostModel(Protocol):
    """Seconds and bytes of a choice, for one cluster, workload and precision fixed at construction."""

    @property
    def seconds_are_monotone(self) -> bool:
        """True if recomputation and offload never make a stage faster; it holds for equations, not for measurements."""
        ...

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """Return a lower bound on the seconds of any choice of the stage on `num_ranks` ranks; 0 if none is known."""
        ...

    def generation_lower_bound(self, query: StageQuery) -> float:
        """Return a lower bound on the seconds of a generation, without simulating its periods; 0 if none is known."""
        ...

    def with_row_split(self, query: StageQuery) -> Schedule:
        """Return the query's schedule; on two kinds of nodes, with the split of rows that ends the stage soonest."""
        ...

    def seconds(self, query: StageQuery) -> Cost:
        """Return the seconds of the whole stage for one step on its pool."""
        ...

    def tail_seconds(self, query: StageQuery) -> float:
        """Return the seconds of the stage after the last token is sampled: all of them, unless the stage streams."""
        ...

    def memory(self, query: StageQuery) -> Memory:
        """Return the bytes on the fullest rank of the pool.

        Bytes in the host's memory depend neither on the micro-batch nor on the slots.
        """
        ...

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        """Return the totals of `seconds`, `tail_seconds` and `memory` for any schedule in place of the query's.

        The call's `max_deferral` applies to schedules that overcommit.
        """
        ...

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        """Return the totals of `seconds` and `tail_seconds` of several choices of the query's stage.

        Each choice takes the place of the query's layout and schedule; the query's `max_deferral` applies to those that
        overcommit.
        """
        ...

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        """Return the totals of `memory` of several choices of the query's stage."""
        ...

    def has_mixed_batches(self, query: StageQuery) -> bool:
        """Return True if a prefill and a decode step in one round of this generation are one pass."""
        ...

    def refit_seconds(self, move: RefitQuery) -> Cost:
        """Return the seconds that a refit takes on the ranks of both pools."""
        ...

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        """Return the totals of `refit_seconds` of several refits, [refits]."""
        ...

    def transfer_seconds(self, num_bytes: float) -> Cost:
        """Return the seconds to transfer experience of this size from one pool to another."""
        ...


@dataclass(frozen=True)
class QueriedLayoutCosts:
    """Layout costs for a cost model without a faster way: each schedule is one query, of which only totals are kept."""

    model: ChoiceCosts
    query: StageQuery

    def seconds(self, schedule: Schedule) -> float:
        return self.model.seconds(self._with(schedule)).total

    def tail_seconds(self, schedule: Schedule) -> float:
        return self.model.tail_seconds(self._with(schedule))

    def bytes(self, schedule: Schedule) -> Bytes:
        return bytes_of(self.model.memory(self._with(schedule)))

    def _with(self, schedule: Schedule) -> StageQuery:
        deferral = self.query.max_deferral if schedule.overcommit else 0
        return replace(self.query, schedule=schedule, max_deferral=deferral)


@dataclass(frozen=True)
class DelegatingCostModel:
    """A cost model that delegates to another; subclasses override what differs."""

    model: CostModel

    @property
    def seconds_are_monotone(self) -> bool:
        return self.model.seconds_are_monotone

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self.model.lower_bound_seconds(stage, model, num_ranks, part)

    def generation_lower_bound(self, query: StageQuery) -> float:
        return self._delegate().generation_lower_bound(query)

    def with_row_split(self, query: StageQuery) -> Schedule:
        return self._delegate().with_row_split(query)

    def seconds(self, query: StageQuery) -> Cost:
        return self._delegate().seconds(query)

    def tail_seconds(self, query: StageQuery) -> float:
        return self._delegate().tail_seconds(query)

    def memory(self, query: StageQuery) -> Memory:
        return self._delegate().memory(query)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return self._delegate().on_layout(query)

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        return self._delegate().seconds_of_choices(query, choices)

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        return self._delegate().bytes_of_choices(query, choices)

    def has_mixed_batches(self, query: StageQuery) -> bool:
        return self._delegate().has_mixed_batches(query)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        return self._delegate().refit_seconds(move)

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        return self._delegate().seconds_of_refits(refits)

    def transfer_seconds(self, num_bytes: float) -> Cost:
        return self._delegate().transfer_seconds(num_bytes)

    def _delegate(self) -> CostModel:
        """Return the cost model that answers; subclasses may prepare it first."""
        return self.model
