"""Choices of a layout and a schedule as a table with a column for each degree and setting, to cost all of them at once.

A column is an array, [choices]. Columns have the names of the fields of `Layout` and `Schedule`, so that a formula
of the cost models reads the same for a choice and for a table of choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.profiles.elementwise import BoolArray, FloatArray, IntArray, N_co
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Schedule


class Degrees(Protocol[N_co]):
    """The degrees of a layout, or of the layouts of several choices; see `Layout`."""

    @property
    def tp(self) -> N_co: ...

    @property
    def pp(self) -> N_co: ...

    @property
    def dp(self) -> N_co: ...

    @property
    def sp(self) -> bool | BoolArray: ...

    @property
    def cp(self) -> N_co: ...

    @property
    def ep(self) -> N_co: ...

    @property
    def etp(self) -> N_co: ...

    @property
    def vpp(self) -> N_co: ...

    @property
    def fold_size(self) -> N_co: ...

    @property
    def expert_replicas(self) -> N_co: ...

    @property
    def num_ranks(self) -> N_co: ...


class PassSettings(Protocol[N_co]):
    """The settings of a schedule that decide its passes, or those of several choices; see `Schedule`."""

    @property
    def micro_batch_size(self) -> N_co: ...

    @property
    def micro_batch_tokens(self) -> N_co: ...

    @property
    def chunk_tokens(self) -> N_co: ...

    @property
    def is_recomputed(self) -> N_co: ...

    @property
    def is_attention_recomputed(self) -> N_co: ...


class ScheduleColumns(NamedTuple):
    """Settings of several schedules, each an array; `offload` has indices into the members of `Offload`."""

    micro_batch_size: FloatArray
    micro_batch_tokens: FloatArray
    chunk_tokens: FloatArray
    is_recomputed: FloatArray
    is_attention_recomputed: FloatArray
    offload: FloatArray


_OFFLOADS = tuple(Offload)


@dataclass(frozen=True, eq=False)
class ScheduleTable:
    """Schedules of one stage, in a fixed order; many layouts share one table."""

    schedules: tuple[Schedule, ...]

    def __len__(self) -> int:
        return len(self.schedules)

    @cached_property
    def columns(self) -> ScheduleColumns:
        """The settings that decide the costs of each schedule of a stage that does not generate, each [schedules]."""
        rows = np.array([_settings_of(schedule) for schedule in self.schedules], dtype=np.float64)
        return ScheduleColumns(*np.ascontiguousarray(rows.T))

    @cached_property
    def batch_splits(self) -> tuple[Schedule, ...]:
        """One schedule for each different way to split a batch into micro-batches or chunks: the first that has it."""
        first: dict[tuple[int, int, int], Schedule] = {}
        for schedule in self.schedules:
            first.setdefault(_split_of(schedule), schedule)
        return tuple(first.values())

    @cached_property
    def batch_split_index(self) -> IntArray:
        """For each schedule, the index in `batch_splits` of the schedule with the same split, [schedules]."""
        positions = {_split_of(schedule): position for position, schedule in enumerate(self.batch_splits)}
        return np.array([positions[_split_of(schedule)] for schedule in self.schedules])

    @cached_property
    def has_chunk_size(self) -> dict[int, BoolArray]:
        """For each chunk size of a schedule that streams, which schedules have it, [schedules]."""
        sizes = sorted({schedule.chunk_tokens for schedule in self.schedules} - {0})
        return {size: np.array([schedule.chunk_tokens == size for schedule in self.schedules]) for size in sizes}


def _split_of(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.chunk_tokens


def _settings_of(schedule: Schedule) -> tuple[float, ...]:
    """Return the settings of a schedule in the order of `ScheduleColumns`."""
    return (
        schedule.micro_batch_size,
        schedule.micro_batch_tokens,
        schedule.chunk_tokens,
        schedule.is_recomputed,
        schedule.is_attention_recomputed,
        _OFFLOADS.index(schedule.offload),
    )


class LayoutColumns:
    """The layouts of some choices: `layouts[index[i]]` is the layout of choice i."""

    def __init__(self, layouts: Sequence[Layout], index: IntArray) -> None:
        self.layouts, self._index = layouts, index
        degrees = np.array(
            [(one.tp, one.pp, one.dp, one.sp, one.cp, one.ep, one.etp, one.vpp) for one in layouts], dtype=np.float64
        ).reshape(-1, 8)
        self.tp, self.pp, self.dp, sp, self.cp, self.ep, self.etp, self.vpp = np.ascontiguousarray(degrees[index].T)
        self.sp: BoolArray = sp > 0
        self.fold_size: FloatArray = self.tp // self.etp
        self.expert_replicas: FloatArray = self.ep // self.fold_size
        self.num_ranks: FloatArray = self.tp * self.pp * self.dp * self.cp

    def expand_to_choices(self, amounts: Sequence[Sequence[float]]) -> FloatArray:
        """Return for each choice the amounts of its layout, [amounts, choices]; `amounts` are [layouts][amounts]."""
        expanded: FloatArray = np.array(amounts, dtype=np.float64)[self._index].T
        return expanded


def field_values(record: object) -> list[float]:
    """Return the fields of a dataclass of numbers, in order."""
    return list(vars(record).values())


@dataclass(frozen=True, eq=False)
class ChoiceTable:
    """Choices of one stage: each layout with the schedules of its own table, or with some of them.

    Choice i has the layout `layouts[layout_index[i]]` and the schedule at `schedule_index[i]` of that layout's table.
    """

    layouts: tuple[Layout, ...]
    tables: tuple[ScheduleTable, ...]
    layout_index: IntArray
    schedule_index: IntArray

    @classmethod
    def from_product(cls, layouts: Sequence[Layout], tables: Sequence[ScheduleTable]) -> ChoiceTable:
        """Return the table of every layout with every schedule of its own table."""
        lengths = np.array([len(table) for table in tables], dtype=np.int64)
        layout_index = np.repeat(np.arange(len(layouts)), lengths)
        schedule_index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(tuple(layouts), tuple(tables), layout_index, schedule_index)

    @classmethod
    def concatenate(cls, tables: Sequence[ChoiceTable]) -> ChoiceTable:
        """Return the choices of one table after the other."""
        starts = np.cumsum([0, *(len(table.layouts) for table in tables)])
        indices = [start + table.layout_index for start, table in zip(starts, tables, strict=False)]
        return cls(
            tuple(layout for table in tables for layout in table.layouts),
            tuple(schedules for table in tables for schedules in table.tables),
            np.concatenate(indices) if tables else np.zeros(0, dtype=np.int64),
            np.concatenate([table.schedule_index for table in tables]) if tables else np.zeros(0, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.layout_index)

    def __getitem__(self, choice: int) -> tuple[Layout, Schedule]:
        layout = self.layout_index[choice]
        return self.layouts[layout], self.tables[layout].schedules[self.schedule_index[choice]]

    def __iter__(self) -> Iterator[tuple[Layout, Schedule]]:
        return (self[choice] for choice in range(len(self)))

    def filter(self, is_kept: BoolArray) -> ChoiceTable:
        """Return the choices for which `is_kept`, [choices], is true."""
        return ChoiceTable(self.layouts, self.tables, self.layout_index[is_kept], self.schedule_index[is_kept])

    def gather_by_schedule(self, of_layouts: Sequence[FloatArray]) -> FloatArray:
        """Return for each choice the amounts of its layout and schedule, [amounts, choices].

        `of_layouts` has for each layout the amounts of the schedules of its table, [amounts, schedules].
        """
        starts = np.cumsum([0, *(len(table) for table in self.tables[:-1])])
        rows: FloatArray = np.concatenate(of_layouts, axis=-1)[..., starts[self.layout_index] + self.schedule_index]
        return rows

    @cached_property
    def layout(self) -> LayoutColumns:
        return LayoutColumns(self.layouts, self.layout_index)

    @cached_property
    def _settings(self) -> ScheduleColumns:
        return ScheduleColumns(*self.gather_by_schedule([np.stack(table.columns) for table in self.tables]))

    @property
    def micro_batch_size(self) -> FloatArray:
        return self._settings.micro_batch_size

    @property
    def micro_batch_tokens(self) -> FloatArray:
        return self._settings.micro_batch_tokens

    @property
    def chunk_tokens(self) -> FloatArray:
        return self._settings.chunk_tokens

    @property
    def is_recomputed(self) -> FloatArray:
        """1 where whole layers are recomputed, and 0 elsewhere, [choices]."""
        return self._settings.is_recomputed

    @property
    def is_attention_recomputed(self) -> FloatArray:
        """1 where core attention alone is recomputed, and 0 elsewhere, [choices]."""
        return self._settings.is_attention_recomputed

    @cached_property
    def offloads(self) -> tuple[Offload, ...]:
        """The kinds of offload that some choice has."""
        return tuple(offload for offload in _OFFLOADS if self.has_offload(offload).any())

    def has_offload(self, offload: Offload) -> BoolArray:
        """True where a choice offloads this state, [choices]."""
        is_offloaded: BoolArray = self._settings.offload == _OFFLOADS.index(offload)
        return is_offloaded
