"""How a replica may cut its sequences into micro-batches: by rows or by tokens.

A cap of tokens lets as many sequences meet as there is memory for, whatever their lengths; so many rows at most must
all have room when they are as long as can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.profiles.errors import nearest
from meshwright.profiles.layout import Layout, divisors, nearest_divisor
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.workload import Workload


class Wanted(NamedTuple):
    """What is to be offered beside the usual: every number of rows, these caps of tokens, and every way to deal out
    experts and layers (`rules.offered_layouts`)."""

    by_rows: bool = False
    caps: tuple[int, ...] = ()
    all_layouts: bool = False


USUAL = Wanted()
"""Nothing beside it."""


class Cuts(NamedTuple):
    """Ways to cut the sequences of a replica, none of which is longer than `longest`: by these rows or caps; and by
    which rows where they are read in chunks."""

    sizes: tuple[int, ...]
    caps: tuple[int, ...]
    sizes_in_chunks: tuple[int, ...]
    longest: int

    def schedules(self, chunk_tokens: int) -> list[Schedule]:
        """Otherwise plain, those that may take less memory first."""
        if chunk_tokens:
            return [Schedule(micro_batch_size=size, chunk_tokens=chunk_tokens) for size in self.sizes_in_chunks]
        every = (*(Schedule(micro_batch_size=size) for size in self.sizes), *map(capped, self.caps))
        return sorted(every, key=lambda cut: cut.most_tokens(self.longest))


def cuts_of(workload: Workload, stage: Stage, layout: Layout, rows: int, *, is_even: bool, wanted: Wanted) -> Cuts:
    """Those that are offered to a replica of `rows` rows.

    Without a pipeline, which may want its micro-batches smaller than memory does, a cap takes the place of the rows
    that need as much memory: it makes no more micro-batches of them. With context parallelism one sequence at a time is
    offered: of two, each of twice as many replicas would take one, which is as much work in as much memory and
    exchanges less. Several are legal where they are wanted.
    """
    usual, longest = token_caps(workload, stage, layout, rows), workload.max_tokens
    legal = (cap for cap in wanted.caps if not any(token_rules(stage, layout, capped(cap), rows, longest)))
    if layout.vpp > 1:  # a multiple of pp micro-batches
        rows //= layout.pp
    sizes = micro_batch_sizes(rows, is_even=is_even) if layout.cp == 1 or wanted.by_rows else (1,)
    is_capped = usual and layout.pp == 1 and not wanted.by_rows
    return Cuts(sizes[-1:] if is_capped else sizes, tuple(sorted({*usual, *legal})), sizes, longest)


def capped(most_tokens: int) -> Schedule:
    """An otherwise plain schedule of micro-batches of so many tokens."""
    return Schedule(micro_batch_size=0, micro_batch_tokens=most_tokens)


def micro_batch_sizes(rows: int, *, is_even: bool) -> tuple[int, ...]:
    """The rows that a replica of `rows` rows may take at a time, ascending.

    They divide its rows, where others have as many. Else none divides those of all: for each power of two, and for all
    rows, the smallest size that makes no more micro-batches of them.
    """
    if is_even:
        return divisors(rows)
    powers = (2**k for k in range(rows.bit_length()))
    return tuple(sorted({-(-rows // -(-rows // size)) for size in (*powers, rows)}))


def token_caps(workload: Workload, stage: Stage, layout: Layout, rows: int) -> tuple[int, ...]:
    """The caps that are offered to a replica of `rows` rows, ascending: tokens of a power of two of the longest
    sequences, and fewer than of all rows.

    None where all sequences are as long, of which so many rows are as many tokens, where tokens may not decide, and
    with context parallelism, for which one row at a time is enough.
    """
    longest = workload.max_tokens
    if workload.sequence_lengths.tokens[0] == longest or layout.cp > 1 or any(_no_caps(stage, layout)):
        return ()
    return tuple(2**k * longest for k in range(rows.bit_length()) if 2**k < rows)


def row_rules(layout: Layout, schedule: Schedule, rows: int, *, is_even: bool) -> Iterator[str]:
    """Rules that micro-batches of so many rows break."""
    sizes = micro_batch_sizes(rows, is_even=is_even)
    if schedule.micro_batch_size not in sizes:
        rule = "does not divide" if is_even else f"is none of {', '.join(map(str, sizes))}, which deal out"
        yield (
            f"micro_batch_size={schedule.micro_batch_size} {rule} the {rows} sequences of a replica; "
            f"use {nearest(schedule.micro_batch_size, sizes)}."
        )
    elif layout.vpp > 1 and rows // schedule.micro_batch_size % layout.pp:
        legal = nearest_divisor(schedule.micro_batch_size, rows // layout.pp)
        yield (
            f"micro_batch_size={schedule.micro_batch_size} makes {rows // schedule.micro_batch_size} micro-batches of "
            f"the {rows} sequences of a replica, and vpp={layout.vpp} needs a multiple of pp={layout.pp}; use {legal}."
        )


def token_rules(stage: Stage, layout: Layout, schedule: Schedule, rows: int, longest: int) -> Iterator[str]:
    """Rules that micro-batches of so many tokens break."""
    cap, others = schedule.micro_batch_tokens, _no_caps(stage, layout)
    if schedule.chunk_tokens:
        yield f"micro_batch_tokens={cap} with chunk_tokens={schedule.chunk_tokens}, which come row by row; use 0."
    for reason in others:
        yield f"micro_batch_tokens={cap} {reason}; use 0, and micro_batch_size."
    if cap < longest:
        yield f"micro_batch_tokens={cap} has no room for the longest sequence, of {longest} tokens; use {longest}."
    elif cap > rows * longest:
        yield (
            f"micro_batch_tokens={cap} is more than the {rows} sequences of a replica can have; use {rows * longest}."
        )


def _no_caps(stage: Stage, layout: Layout) -> Iterator[str]:
    """Why tokens may not decide how many micro-batches there are, or which sequences meet."""
    if stage.generates:
        yield "on a stage that generates, slot by slot"
    if layout.vpp > 1:
        yield f"with vpp={layout.vpp}, which needs micro-batches in multiples of pp={layout.pp}"
    if layout.expert_replicas > 1 and stage.trains:
        yield f"with ep={layout.ep}, which needs as many micro-batches on every replica"
