"""What a cost model is asked, the protocol that answers, and how answers are kept.

A question carries only facts and one choice; a model answers it without knowing any search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

from meshwright.cost_models.cost import WEIGHTS, Cost, Memory
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One stage under one choice: its model, layout and schedule, on the smallest block of ranks that holds them.

    `max_deferral` counts the turns beyond its first that a sequence may take when the schedule overcommits; `part` is
    the number of the cluster's part that the ranks are in, or of the pair of them. With `recomputes_cache`, generation
    computes the keys and values of sequences in flight anew in every turn. `replica_rows` are those that the fullest
    replica takes at once, of a batch or of a minibatch to train on, where it is not one of `dp` that take as many.
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
        """Of what tells most calls apart: a search asks too often to hash a whole model each time."""
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
                schedule.micro_batch_tokens,
                schedule.generation_slots,
                schedule.batches_in_flight,
                schedule.overcommit,
                str.__hash__(schedule.while_waiting),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Move:
    """Weights of one role going from one layout to another. `overlap` counts the ranks that are in both pools.

    Of the source only its ranks matter, its slices for the target, and whether the two layouts are the same; of the
    target its cut: see `Layout`. The parts are the numbers of the cluster's parts that the pools are in. Weights that
    go to what `generates` are taken by its engine, and made 8-bit floats there where it `quantises`.
    """

    model: ModelSpec
    source: Layout
    target: Layout
    overlap: int
    source_part: int = 0
    target_part: int = 0
    generates: bool = False
    quantises: bool = False


class Once(Generic[K, T]):
    """Answers that are computed once, by what they depend on; none of them is None."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[K, T] = {}

    def of(self, key: K, make: Callable[[], T]) -> T:
        """What `make` answered when this key was first asked about."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known


class Bytes(NamedTuple):
    """On the fullest rank: `resident` always, of it the `weights`, `transient` only while the stage runs; `host` in the
    memory of its host."""

    resident: float
    weights: float
    transient: float
    host: float

    @property
    def peak(self) -> float:
        return self.resident + self.transient


class LayoutCosts(Protocol):
    """What one stage takes on one layout under any schedule, as sums alone: a search asks about very many of them."""

    def seconds(self, schedule: Schedule) -> float: ...

    def tail_seconds(self, schedule: Schedule) -> float: ...

    def bytes(self, schedule: Schedule) -> Bytes: ...


class Answers(Protocol):
    """What is known of single choices."""

    def seconds(self, call: Call) -> Cost: ...

    def tail_seconds(self, call: Call) -> float: ...

    def memory(self, call: Call) -> Memory: ...


class CostModel(Protocol):
    """Seconds and bytes of a choice, for one cluster, workload and precision fixed at construction."""

    @property
    def memory_grows(self) -> bool:
        """Whether a larger micro-batch, more slots, or a pipeline in several chunks of the same layers never take less
        memory: a search then counts no larger ones than the first that do not fit. It is a law of the equations, and
        not one of what was measured."""
        ...

    @property
    def seconds_grow(self) -> bool:
        """Whether recomputation and offload never make a stage quicker; a law of the equations too."""
        ...

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """Seconds below which no choice of the stage on so many ranks of a part is; 0 where none are known."""
        ...

    def least_generation_seconds(self, call: Call) -> float:
        """Seconds below which a generation is not, told without playing its turns; 0 where none are known."""
        ...

    def dealt(self, call: Call) -> Schedule:
        """The call's schedule, on two kinds of nodes with rows so dealt that the stage ends soonest."""
        ...

    def seconds(self, call: Call) -> Cost:
        """Seconds that the whole stage takes for one step on its pool."""
        ...

    def tail_seconds(self, call: Call) -> float:
        """Of those, the seconds that remain after the last token was drawn: all, unless the stage streams."""
        ...

    def memory(self, call: Call) -> Memory:
        """Bytes on the fullest rank of the pool; what waits in the host's memory depends neither on the micro-batch nor
        on the slots."""
        ...

    def on_layout(self, call: Call) -> LayoutCosts:
        """The sums of what the three above answer, for every schedule in place of the call's; its deferral is of those
        that overcommit."""
        ...

    def move_seconds(self, move: Move) -> Cost:
        """Seconds that a refit takes on the ranks of both pools."""
        ...

    def handover_seconds(self, num_bytes: float) -> Cost:
        """Seconds to hand experience of this size from one pool to another."""
        ...


@dataclass(frozen=True)
class Summed:
    """The sums of what a cost model answers about one schedule after the other."""

    model: Answers
    call: Call

    def seconds(self, schedule: Schedule) -> float:
        return self.model.seconds(self._with(schedule)).total

    def tail_seconds(self, schedule: Schedule) -> float:
        return self.model.tail_seconds(self._with(schedule))

    def bytes(self, schedule: Schedule) -> Bytes:
        memory = self.model.memory(self._with(schedule))
        return Bytes(memory.resident.total, memory.resident.amount(WEIGHTS), memory.transient.total, memory.host.total)

    def _with(self, schedule: Schedule) -> Call:
        deferral = self.call.max_deferral if schedule.overcommit else 0
        return replace(self.call, schedule=schedule, max_deferral=deferral)


@dataclass(frozen=True)
class PassedOn:
    """A cost model that passes its questions on to another; what differs is said by whoever inherits it."""

    model: CostModel

    @property
    def memory_grows(self) -> bool:
        return self.model.memory_grows

    @property
    def seconds_grow(self) -> bool:
        return self.model.seconds_grow

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self.model.least_seconds(stage, model, num_ranks, part)

    def least_generation_seconds(self, call: Call) -> float:
        return self._asked().least_generation_seconds(call)

    def dealt(self, call: Call) -> Schedule:
        return self._asked().dealt(call)

    def seconds(self, call: Call) -> Cost:
        return self._asked().seconds(call)

    def tail_seconds(self, call: Call) -> float:
        return self._asked().tail_seconds(call)

    def memory(self, call: Call) -> Memory:
        return self._asked().memory(call)

    def on_layout(self, call: Call) -> LayoutCosts:
        return self._asked().on_layout(call)

    def move_seconds(self, move: Move) -> Cost:
        return self._asked().move_seconds(move)

    def handover_seconds(self, num_bytes: float) -> Cost:
        return self._asked().handover_seconds(num_bytes)

    def _asked(self) -> CostModel:
        """The other one."""
        return self.model
