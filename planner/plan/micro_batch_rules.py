"""Micro-batch rules: how a replica may split its sequences into micro-batches, by rows or by tokens.

A token cap lets as many sequences into a micro-batch as memory allows, whatever their lengths. A row count must fit in
memory even if all of its sequences have the maximum length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.profiles.errors import nearest
from meshwright.profiles.layout import Layout, divisors, nearest_divisor
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.workload import Workload


class ExtraChoices(NamedTuple):
    """Choices to offer besides the usual ones: all row counts, these token caps, and all layouts of experts and layers
    (`layout_and_schedule_rules.offered_layouts`)."""

    by_rows: bool = False
    caps: tuple[int, ...] = ()
    all_layouts: bool = False


NO_EXTRA_CHOICES = ExtraChoices()
"""Only the usual choices."""


class MicroBatchOptions(NamedTuple):
    """The micro-batches offered to a replica: row counts, token caps, and the row counts where responses are read in
    chunks. No sequence is longer than `longest` tokens."""

    sizes: tuple[int, ...]
    caps: tuple[int, ...]
    streaming_sizes: tuple[int, ...]
    longest: int

    def schedules(self, chunk_tokens: int) -> list[Schedule]:
        """Return a default schedule for each micro-batch, ascending in the memory that it may need."""
        if chunk_tokens:
            return [Schedule(micro_batch_size=size, chunk_tokens=chunk_tokens) for size in self.streaming_sizes]
        all_schedules = (
            *(Schedule(micro_batch_size=size) for size in self.sizes),
            *map(token_capped_schedule, self.caps),
        )
        return sorted(all_schedules, key=lambda schedule: schedule.max_tokens(self.longest))


def offered_micro_batches(
    workload: Workload, stage: Stage, layout: Layout, rows: int, *, is_even: bool, extra_choices: ExtraChoices
) -> MicroBatchOptions:
    """Return the micro-batches that are offered to a replica of `rows` rows.

    Without pipeline parallelism, a token cap replaces the row count that needs as much memory, since it never makes
    more micro-batches; a pipeline may want micro-batches smaller than memory requires. With context parallelism a
    micro-batch is one sequence: instead of two in a micro-batch, twice as many replicas could take one each, with the
    same work and memory and less communication. Larger ones are legal, and offered with `extra_choices.by_rows`.
    """
    usual, longest = token_caps(workload, stage, layout, rows), workload.max_tokens
    legal = (
        cap
        for cap in extra_choices.caps
        if not any(token_rules(stage, layout, token_capped_schedule(cap), rows, longest))
    )
    if layout.vpp > 1:  # a multiple of pp micro-batches
        rows //= layout.pp
    sizes = micro_batch_sizes(rows, is_even=is_even) if layout.cp == 1 or extra_choices.by_rows else (1,)
    is_capped = usual and layout.pp == 1 and not extra_choices.by_rows
    # Token caps replace all row counts but the largest: every cap is below the tokens of all rows.
    return MicroBatchOptions(sizes[-1:] if is_capped else sizes, tuple(sorted({*usual, *legal})), sizes, longest)


def token_capped_schedule(max_tokens: int) -> Schedule:
    """A default schedule with micro-batches of up to `max_tokens` tokens."""
    return Schedule(micro_batch_size=0, micro_batch_tokens=max_tokens)


def micro_batch_sizes(rows: int, *, is_even: bool) -> tuple[int, ...]:
    """The legal micro-batch sizes of a replica of `rows` rows, ascending.

    With `is_even`, when all replicas have the same number of rows, they are its divisors. Else they are, for each power
    of two and for `rows`, the smallest size with the same number of micro-batches.
    """
    if is_even:
        return divisors(rows)
    powers = (2**k for k in range(rows.bit_length()))
    return tuple(sorted({-(-rows // -(-rows // size)) for size in (*powers, rows)}))


def token_caps(workload: Workload, stage: Stage, layout: Layout, rows: int) -> tuple[int, ...]:
    """The token caps that are offered to a replica of `rows` rows, ascending: powers of two times the longest sequence,
    below that of all rows.

    There are none if all sequences have the same length (row counts do the same), if token caps are not legal, and with
    context parallelism, for which one row at a time is enough.
    """
    longest = workload.max_tokens
    if (
        workload.sequence_lengths.tokens[0] == longest
        or layout.cp > 1
        or any(_reasons_against_token_caps(stage, layout))
    ):
        return ()
    return tuple(2**k * longest for k in range(rows.bit_length()) if 2**k < rows)


def row_rules(layout: Layout, schedule: Schedule, rows: int, *, is_even: bool) -> Iterator[str]:
    """Messages on the rules that a schedule with a row count breaks."""
    sizes = micro_batch_sizes(rows, is_even=is_even)
    if schedule.micro_batch_size not in sizes:
        rule = "does not divide" if is_even else f"is not one of {', '.join(map(str, sizes))}, which split"
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
    """Messages on the rules that a schedule with a token cap breaks."""
    cap, reasons = schedule.micro_batch_tokens, _reasons_against_token_caps(stage, layout)
    if schedule.chunk_tokens:
        yield f"micro_batch_tokens={cap} with chunk_tokens={schedule.chunk_tokens}, which are read row by row; use 0."
    for reason in reasons:
        yield f"micro_batch_tokens={cap} {reason}; use 0, and micro_batch_size."
    if cap < longest:
        yield f"micro_batch_tokens={cap} has no room for the longest sequence, of {longest} tokens; use {longest}."
    elif cap > rows * longest:
        yield (
            f"micro_batch_tokens={cap} is more than the {rows} sequences of a replica can have; use {rows * longest}."
        )


def _reasons_against_token_caps(stage: Stage, layout: Layout) -> Iterator[str]:
    """The reasons why micro-batches of a stage may not be capped by tokens, as clauses."""
    if stage.generates:
        yield "on a stage that generates, slot by slot"
    if stage.judges:
        yield "on a stage that generates verdicts, on so many sequences at a time"
    if layout.vpp > 1:
        yield f"with vpp={layout.vpp}, which needs micro-batches in multiples of pp={layout.pp}"
    if layout.expert_replicas > 1 and stage.trains:
        yield f"with ep={layout.ep}, which needs equally many micro-batches on every replica"
