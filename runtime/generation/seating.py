"""The scheduler of slots and cache blocks: it admits waiting sequences and pre-empts live ones when blocks run out.

Every rank of a replica makes the same decisions without a message.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from meshwright.planner.simulation.flight import Flight
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.generation.shared_prompts import SharedPrompts
from meshwright.runtime.generation.slots import (
    LiveGroup,
    LiveSequence,
    PartialResponse,
    Prompt,
    Response,
    split_into_batches,
)
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers

_RESERVED_ROUNDS = 4
"""A sequence is admitted only if the live ones could continue for this many rounds without another block being
freed."""

PrefillPart: TypeAlias = tuple[int, int, int]
"""A part of a prefill batch: the index of a prefilled sequence, and the first token and the end of its part."""


class ScheduledBatch(NamedTuple):
    """The sequences that were scheduled in one round: new ones, resumed ones, and those that continue in their slots
    after a tool's answer.

    `fed` are the indices of those that are prefilled; `sources` maps the index of every other one to the slot whose
    cached prompt it shares. `num_begun` of all are new. `cached` maps an index to the number of its tokens that are
    cached already.
    """

    sequences: list[LiveSequence]
    prefilled: list[int]
    shared_from: dict[int, int]
    num_new: int
    cached: dict[int, int]

    def prefill_batches(self, max_tokens: int) -> list[list[PrefillPart]]:
        """Split the tokens to prefill into batches of at most `most` tokens."""
        prefilled = [(self.sequences[index], self.cached.get(index, 0)) for index in self.prefilled]
        batches = split_into_batches(
            [len(sequence.prompt.tokens) + sequence.num_sampled - cached for sequence, cached in prefilled], max_tokens
        )
        return [
            [(row, first + prefilled[row][1], end + prefilled[row][1]) for row, first, end in batch]
            for batch in batches
        ]


NOTHING_SCHEDULED = ScheduledBatch([], [], {}, 0, {})


class Scheduler:
    """The scheduler of one generator."""

    def __init__(
        self, tables: BlockTables, prompts: SharedPrompts, flight: Flight[Prompt, LiveGroup, Response]
    ) -> None:
        self._tables, self._prompts, self._flight = tables, prompts, flight
        self.paused: list[PartialResponse] = []
        """Pre-empted sequences, the oldest first; they are resumed before anything new is admitted."""
        self.num_preempted, self.peak_blocks = 0, 0
        """The number of pre-emptions, and the most blocks that were in use at a time."""

    def release(self, slots: Sequence[int]) -> None:
        """Free the blocks of slots whose sequences have left."""
        if slots:
            self._tables.release(*slots)
            self._prompts.remove(slots)

    def pause(self, partial: PartialResponse) -> None:
        """Queue a sequence without a slot to be resumed."""
        bisect.insort(self.paused, partial, key=lambda sequence: sequence.age)

    def allocate_next(self, group: LiveGroup) -> None:
        """Allocate a block for the next token of every live sequence that needs one. If too few are free, the youngest
        sequence of this group is pre-empted and later recomputed; never one of another group, whose tokens are in the
        pipeline."""
        while True:
            slots, num_tokens = group.first_slot + group.rows, group.records.cached(group.rows) + 1
            short = self._tables.rows_short_of_blocks(slots, num_tokens).tolist()
            if all(self._tables.allocate(int(slots[index]), int(num_tokens[index])) for index in short):
                return
            youngest = max(range(len(group.live)), key=lambda index: group.live[index].age)
            self.pause(group.live[youngest].to_partial())
            self.release(group.remove([youngest]))
            self.num_preempted += 1

    def num_tokens_covered(self, slots: Numbers, num_tokens: Numbers) -> int:
        """Return how many more tokens all of `slots` have blocks for, given that they hold `num_tokens` each."""
        return self._tables.tokens_left(slots, num_tokens)

    def allocate_ahead(self, slots: Numbers, num_tokens: Numbers, max_tokens: int) -> int:
        """Allocate blocks for `most` more tokens of each slot, all or nothing, without pre-empting. Return how many
        more tokens all slots have blocks for, at most `most`."""
        if max_tokens > 0 and self._tables.allocate_all(slots, num_tokens + max_tokens):
            self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
            return max_tokens
        return min(max_tokens, self._tables.tokens_left(slots, num_tokens))

    def free_ahead(self, slots: Numbers, num_tokens: Numbers) -> None:
        """Free blocks that `grow_ahead` allocated beyond the first `num_tokens` tokens of each slot; no other slot
        shares them."""
        self._tables.truncate(slots, num_tokens)

    def resume_suspended(self, group: LiveGroup, suspended: LiveSequence) -> bool:
        """Make a parked sequence live again; it has more tokens than are cached. Return False if it was pre-empted
        because too few blocks are free."""
        if self._tables.allocate(suspended.slot, suspended.num_cached + 1):
            group.resume(suspended)
            return True
        self.pause(suspended.to_partial())
        self.release([group.free_slot(suspended)])
        self.num_preempted += 1
        return False

    def can_schedule(self, group: LiveGroup) -> bool:
        """True if a sequence waits and a slot is free."""
        return bool(self.paused or self._flight.waiting) and not group.is_full

    def schedule(self, group: LiveGroup, answered: Sequence[tuple[LiveSequence, int]] = ()) -> ScheduledBatch:
        """Schedule waiting sequences while there are slots and blocks, paused ones first. Those `answered` by a tool,
        each with the number of its cached tokens, come before them in the result."""
        scheduled = ScheduledBatch([sequence for sequence, _ in answered], list(range(len(answered))), {}, 0, {})
        scheduled.cached.update((index, cached) for index, (_, cached) in enumerate(answered))
        waiting, turn = self._flight.waiting, self._flight.turn
        if not self.can_schedule(group):
            self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
            return scheduled
        num_new, num_live = 0, sum(len(group.live) for group in self._flight.groups)
        while not group.is_full and (self.paused or waiting):
            is_new = not self.paused
            partial = PartialResponse(prompt=waiting[0], first_period=turn) if is_new else self.paused[0]
            source = self._prompts.source(partial.prompt) if is_new else None
            if not self._allocate(group.next_slot, partial, source, num_live):
                break
            if source is None:
                scheduled.prefilled.append(len(scheduled.sequences))
            else:
                scheduled.shared_from[len(scheduled.sequences)] = source
            sequence = group.add(partial)
            scheduled.sequences.append(sequence)
            if is_new:
                self._prompts.add(waiting.popleft(), sequence.slot)
            else:
                self.paused.pop(0)
            num_new, num_live = num_new + is_new, num_live + 1
        self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
        return scheduled._replace(num_new=num_new)

    def _allocate(self, slot: int, partial: PartialResponse, source: int | None, num_live: int) -> bool:
        """Allocate blocks for a sequence and its next token to the slot. Return False, with nothing allocated, if too
        few would be left for the live sequences."""
        tables, num_prompt = self._tables, len(partial.prompt.tokens)
        if source is not None:
            tables.share(source, slot, num_prompt)
        reserved = num_live * _RESERVED_ROUNDS // BLOCK_TOKENS
        num_shared = num_prompt if self._prompts.are_shared and not partial.tokens else 0
        allocated = tables.allocate(slot, num_prompt + len(partial.tokens) + 1, num_shared)
        if allocated and (tables.num_free >= reserved or not num_live):
            return True
        tables.release(slot)
        return False
