"""Costs the choices of a stage on all sizes of pools together, or rejects them with a reason.

A candidate is a legal choice with its costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.protocol import BytesColumns, CostModel, SecondsColumns, StageQuery, bytes_of, queries_of
from meshwright.planner.plan.cost_queries import Choice
from meshwright.planner.solver import pareto
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.elementwise import BoolArray, FloatArray
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

Amounts: TypeAlias = tuple[float, float, float, float, float]
"""The amounts to minimise: seconds, tail seconds, private resident bytes, bytes of weights, transient bytes."""


class Candidate(NamedTuple):
    """A legal choice with its costs: seconds per period, and bytes on the fullest rank.

    `tail_seconds` are those after the end of the generation that the stage reads in chunks; all `seconds` if it reads
    none. `weights_bytes` are part of `resident_bytes`. `late_seconds` of a generation is the time that its rewards on
    hosts take beyond the minimum after any generation (`reward_workers.extra_reward_wait_seconds`).
    """

    layout: Layout
    schedule: Schedule
    seconds: float
    tail_seconds: float
    resident_bytes: float
    weights_bytes: float
    transient_bytes: float
    host_bytes: float = 0.0
    late_seconds: float = 0.0

    @property
    def choice(self) -> Choice:
        return Choice(self.layout, self.schedule)

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.transient_bytes

    @property
    def private_bytes(self) -> float:
        """Resident bytes that no other stage can share."""
        return self.resident_bytes - self.weights_bytes

    @property
    def device_bytes(self) -> tuple[float, float, float]:
        """Device memory: private resident bytes, bytes of weights, transient bytes."""
        return self.private_bytes, self.weights_bytes, self.transient_bytes

    @property
    def amounts(self) -> Amounts:
        """All amounts to minimise."""
        return self.seconds, self.tail_seconds, *self.device_bytes


def cost_query(model: CostModel, query: StageQuery, *, is_timed: bool = True) -> Candidate:
    """Return the candidate of a query, with the costs that the model predicts; of 0 seconds unless `is_timed`."""
    if not is_timed:
        return Candidate(query.layout, query.schedule, 0.0, 0.0, *bytes_of(model.memory(query)))
    seconds = model.seconds(query).total
    tail_seconds = model.tail_seconds(query) if query.schedule.chunk_tokens else seconds
    return Candidate(query.layout, query.schedule, seconds, tail_seconds, *bytes_of(model.memory(query)))


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other beats; of equal ones the first is kept."""
    # A generation is dominated only by one after which rewards are known no later, either.
    amounts = [(*candidate.amounts, candidate.seconds + candidate.late_seconds) for candidate in candidates]
    return tuple(candidates[index] for index in pareto.undominated(amounts))


def undominated_generations(
    candidates: Sequence[Candidate], late: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    """Return the undominated choices of a generation if training waits for its rewards.

    `late` returns a choice's `late_seconds`. Among choices with the same numbers of replicas and slots the faster one
    has its rewards sooner, so that `late` is called for few of them.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.layout.dp, candidate.schedule.generation_slots), []).append(candidate)
    kept = (generation for group in groups.values() for generation in undominated(group))
    return undominated([generation._replace(late_seconds=late(generation)) for generation in kept])


class CostedChoices(NamedTuple):
    """Choices with the amounts of `Candidate` as columns, each [choices]."""

    choices: ChoiceTable
    seconds: FloatArray
    tail_seconds: FloatArray
    resident_bytes: FloatArray
    weights_bytes: FloatArray
    transient_bytes: FloatArray
    host_bytes: FloatArray

    def where(self, is_kept: BoolArray) -> CostedChoices:
        """Return the choices for which `is_kept`, [choices], is true."""
        return CostedChoices(self.choices.filter(is_kept), *(column[is_kept] for column in self[1:]))

    def candidates(self, indices: Iterable[int]) -> tuple[Candidate, ...]:
        """Return some of the choices as candidates."""
        columns = [column.tolist() for column in self[1:]]
        return tuple(Candidate(*self.choices[index], *(column[index] for column in columns)) for index in indices)

    def undominated(self) -> list[int]:
        """Return the indices of the choices that no other beats; of equal ones the first is kept."""
        return pareto.undominated(self._amounts)

    def undominated_by_layout(self) -> list[int]:
        """Return the indices of the undominated choices of each layout.

        Interleaved pipelines that differ only in the number of model chunks (vpp) are compared with each other and with
        the plain pipeline: no other stage shares their weights, and refits do not depend on vpp.
        """
        amounts, kept = self._amounts, list[int]()
        for plain, interleaved in self._by_plain_layout():
            kept_plain = [plain[position] for position in pareto.undominated(amounts[plain])]
            kept += kept_plain
            if interleaved:
                both = [*kept_plain, *interleaved]
                kept += [both[i] for i in pareto.undominated(amounts[both]) if i >= len(kept_plain)]
        return kept

    @property
    def _amounts(self) -> FloatArray:
        """The amounts to minimise, [choices, amounts]; see `Candidate.amounts`."""
        private_bytes = self.resident_bytes - self.weights_bytes
        columns = self.seconds, self.tail_seconds, private_bytes, self.weights_bytes, self.transient_bytes
        return np.stack(columns, axis=1)

    def _by_plain_layout(self) -> Iterable[tuple[list[int], list[int]]]:
        """Return for each layout the choices without virtual pipeline stages, and those with any number of them."""
        groups: dict[Layout, tuple[list[int], list[int]]] = {}
        rows_of_layouts: dict[int, list[int]] = {}
        for row, layout_index in enumerate(self.choices.layout_index.tolist()):
            rows_of_layouts.setdefault(layout_index, []).append(row)
        for layout_index, rows in rows_of_layouts.items():
            layout = self.choices.layouts[layout_index]
            plain = replace(layout, vpp=1) if layout.vpp > 1 else layout
            groups.setdefault(plain, ([], []))[layout.vpp > 1].extend(rows)
        return groups.values()


DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its share of the host's memory"
TOO_SLOW = "too slow for a plan as fast as the best known one"


@dataclass
class QueryCounts:
    """Number of queries to a cost model: for seconds, for bytes, and simulated generations.

    A simulation depends on the numbers of replicas, pipeline stages and slots, and on how many sequences are in flight;
    each combination counts once.
    """

    num_time_costs: int = 0
    num_memory_costs: int = 0
    num_generations: int = 0


@dataclass
class CostingRecord:
    """Bookkeeping of costing one stage: queries, rejections by reason, and the choice of least peak memory by
    cluster part."""

    queries: QueryCounts = field(default_factory=QueryCounts)
    rejected: Counter[str] = field(default_factory=Counter)
    smallest: dict[int, tuple[float, Choice]] = field(default_factory=dict)
    simulated: set[Hashable] = field(default_factory=set)

    def count_timed(self, query: StageQuery, choices: ChoiceTable) -> None:
        """Count choices whose seconds are computed, and the simulations that they need."""
        self.queries.num_time_costs += len(choices)
        if query.stage.generates:
            for layout, schedule in choices:
                slots = schedule.generation_slots, schedule.batches_in_flight, schedule.overcommit
                self.simulated.add((layout.dp, layout.pp, *slots, schedule.while_waiting, schedule.draft_tokens))
            self.queries.num_generations = len(self.simulated)

    def note_smallest(self, part: int, choices: ChoiceTable, peaks: FloatArray) -> None:
        """Keep the choice of least peak memory on a part of the cluster; of equal ones the first."""
        if len(choices):
            index, smallest = int(peaks.argmin()), self.smallest.get(part)
            if smallest is None or peaks[index] < smallest[0]:
                self.smallest[part] = float(peaks[index]), Choice(*choices[index])


class TimeLimit(NamedTuple):
    """The time limits of a choice, beyond which it is rejected: on its `seconds` and on its `tail_seconds`."""

    seconds: float
    tail_seconds: float


NO_TIME_LIMIT = TimeLimit(math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class ChoiceLimits:
    """The limits of a choice: its time, by the number of its ranks, the memory of a device, and its share of the host's
    memory. Unless `is_timed`, only memory counts, and every choice takes 0 seconds."""

    time_limits: Mapping[int, TimeLimit]
    device_bytes: float
    host_bytes: float
    is_timed: bool = True

    def time_limits_of(self, choices: ChoiceTable) -> SecondsColumns:
        """Return the time limit of each choice, [choices]."""
        limits = choices.layout.expand_to_choices([self.time_limits[layout.num_ranks] for layout in choices.layouts])
        return SecondsColumns(*limits)


def cost_choices(
    model: CostModel, query: StageQuery, choices: ChoiceTable, limits: ChoiceLimits, record: CostingRecord
) -> CostedChoices:
    """Cost choices of the stage of the query `query` together, and return those within the limits.

    The others are counted in `record` by the reason why they are rejected. A generation is timed only if it fits and
    its lower bound is within the limit: a simulation takes as long as many queries for memory.
    """
    if not limits.is_timed:
        choices, memory, _ = _fitting(model, query, choices, limits, record)
        no_seconds = np.zeros(len(choices))
        return CostedChoices(choices, no_seconds, no_seconds, *memory)
    if query.stage.generates:
        choices, memory, _ = _fitting(model, query, choices, limits, record)
        is_possible = _is_possible(model, query, choices, limits)
        record.rejected[TOO_SLOW] += int((~is_possible).sum())
        choices, memory = choices.filter(is_possible), BytesColumns(*(column[is_possible] for column in memory))
        choices, seconds, in_time = _in_time(model, query, choices, limits, record)
        memory = BytesColumns(*(column[in_time] for column in memory))
        return CostedChoices(choices, *seconds, *memory)
    choices, seconds, _ = _in_time(model, query, choices, limits, record)
    choices, memory, fits = _fitting(model, query, choices, limits, record)
    seconds = SecondsColumns(*(column[fits] for column in seconds))
    return CostedChoices(choices, *seconds, *memory)


def _in_time(
    model: CostModel, query: StageQuery, choices: ChoiceTable, limits: ChoiceLimits, record: CostingRecord
) -> tuple[ChoiceTable, SecondsColumns, BoolArray]:
    """Time some choices; return those within the time limit, their seconds, and which of all choices they are."""
    record.count_timed(query, choices)
    seconds = model.seconds_of_choices(query, choices)
    longest = limits.time_limits_of(choices)
    in_time = (seconds.seconds <= longest.seconds) & (seconds.tail_seconds <= longest.tail_seconds)
    record.rejected[TOO_SLOW] += int((~in_time).sum())
    return choices.filter(in_time), SecondsColumns(*(column[in_time] for column in seconds)), in_time


def _fitting(
    model: CostModel, query: StageQuery, choices: ChoiceTable, limits: ChoiceLimits, record: CostingRecord
) -> tuple[ChoiceTable, BytesColumns, BoolArray]:
    """Compute the memory of some choices; return those that fit, their bytes, and which of all choices they are."""
    record.queries.num_memory_costs += len(choices)
    memory = model.bytes_of_choices(query, choices)
    record.note_smallest(query.part, choices, memory.peak)
    fits_host, fits_device = memory.host <= limits.host_bytes, memory.peak <= limits.device_bytes
    record.rejected[TOO_LARGE_FOR_HOST] += int((~fits_host).sum())
    record.rejected[TOO_LARGE] += int((fits_host & ~fits_device).sum())
    fits = fits_host & fits_device
    return choices.filter(fits), BytesColumns(*(column[fits] for column in memory)), fits


def _is_possible(model: CostModel, query: StageQuery, choices: ChoiceTable, limits: ChoiceLimits) -> BoolArray:
    """True for generations that are not too slow by their lower bound, without a simulation, [choices]."""
    longest = limits.time_limits_of(choices).seconds.tolist()
    return np.array(
        [
            max_seconds == math.inf or model.generation_lower_bound(one) <= max_seconds
            for one, max_seconds in zip(queries_of(query, choices), longest, strict=True)
        ],
        dtype=np.bool_,
    )
