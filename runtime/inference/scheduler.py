"""Scheduling of slots and KV blocks: it admits waiting sequences, shares the prompt blocks of the samples of one
prompt, and pre-empts live sequences when blocks run out.

Every rank of a replica makes the same decisions without communicating.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.planner.simulation.flight import Flight
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.inference.slots import (
    LiveGroup,
    LiveSequence,
    PartialResponse,
    Prompt,
    Response,
    split_into_batches,
)
from meshwright.runtime.model.block_tables import BlockTables, Numbers

PromptGroup = tuple[int, int]
"""The step of a prompt batch, and the index of the prompt in it."""


class SharedPrompts:
    """The prompts of one generator that are cached, so that further samples can share their blocks.

    With a group size of one nothing is shared.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._slots: dict[PromptGroup, list[int]] = {}
        """The slots of live samples whose prompt was cached with the weights of this period, by group."""
        self._prompt_logits: dict[PromptGroup, Tensor | None] = {}
        """Logits [V / tp] of the last prompt token, by group; None before the last pipeline stage."""

    @property
    def are_shared(self) -> bool:
        """True if prompts have several samples."""
        return self._group_size > 1

    def forget(self) -> None:
        """Forget everything, before the weights may change."""
        self._slots.clear()
        self._prompt_logits.clear()

    def source(self, prompt: Prompt) -> int | None:
        """Return the slot of a live sample whose cached prompt can be shared, or None."""
        slots = self._slots.get(self._group(prompt))
        return slots[0] if slots else None

    def add(self, prompt: Prompt, slot: int) -> None:
        """Record that a sample of the prompt starts in the slot, whether its prompt is prefilled or shared."""
        if self.are_shared:
            self._slots.setdefault(self._group(prompt), []).append(slot)

    def remove(self, slots: Iterable[int]) -> None:
        """Forget the sequences in these slots, which have ended or been pre-empted."""
        for slot in slots:
            for group, live in list(self._slots.items()):
                if slot in live:
                    live.remove(slot)
                if not live:
                    del self._slots[group]
                    self._prompt_logits.pop(group, None)

    def all_logits(self, admitted: Sequence[LiveSequence], fed: Sequence[int], logits: Tensor | None) -> Tensor | None:
        """Return logits [B, V / tp] of all admitted sequences, given those of the prefilled ones, whose indices are
        `fed`; None except on the last stage."""
        prefilled = dict.fromkeys(fed) if logits is None else dict(zip(fed, logits, strict=True))
        for index in fed if self._slots else ():
            group = self._group(admitted[index].prompt)
            if not admitted[index].num_sampled and admitted[index].slot in self._slots.get(group, ()):
                self._prompt_logits[group] = prefilled[index]
        if len(fed) == len(admitted):
            return logits
        all_logits = (
            prefilled[i] if i in prefilled else self._prompt_logits[self._group(sequence.prompt)]
            for i, sequence in enumerate(admitted)
        )
        rows = [row for row in all_logits if row is not None]
        return torch.stack(rows) if rows else None

    def keep_for(self, waiting: Sequence[Prompt]) -> None:
        """Forget every group that no waiting prompt belongs to; prompts of a group are consecutive in the queue."""
        next_group = self._group(waiting[0]) if waiting else None
        for by_group in (self._slots, self._prompt_logits):
            for group in [group for group in by_group if group != next_group]:
                del by_group[group]

    def _group(self, prompt: Prompt) -> PromptGroup:
        return prompt.step, prompt.row // self._group_size


_RESERVED_ROUNDS = 4
"""A sequence is admitted only if the live ones could continue for this many decode rounds if no block were freed."""

PrefillPart: TypeAlias = tuple[int, int, int]
"""Tokens of one sequence in a prefill batch: the index of the sequence, and the first token and end of the range."""


class ScheduledBatch(NamedTuple):
    """The sequences that were scheduled in one round: new ones, resumed ones, and those that continue in their slots
    after a tool's answer.

    `prefilled` are the indices of those that are prefilled; `shared_from` maps the index of every other one to the
    slot whose cached prompt it shares. `num_new` of the sequences are new. `cached` maps an index to the number
    of its tokens that are cached already.
    """

    sequences: list[LiveSequence]
    prefilled: list[int]
    shared_from: dict[int, int]
    num_new: int
    cached: dict[int, int]

    def prefill_batches(self, max_tokens: int) -> list[list[PrefillPart]]:
        """Split the tokens to prefill into batches of at most `max_tokens` tokens."""
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
        """The number of pre-emptions, and the largest number of blocks that were in use at once."""

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
        """Allocate blocks for `max_tokens` more tokens of each slot, all or nothing, without pre-empting. Return how
        many more tokens all slots have blocks for, at most `max_tokens`."""
        if max_tokens > 0 and self._tables.allocate_all(slots, num_tokens + max_tokens):
            self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
            return max_tokens
        return min(max_tokens, self._tables.tokens_left(slots, num_tokens))

    def allocate_drafts(self, slots: Numbers, num_tokens: Numbers, num_drafted: Numbers) -> Numbers:
        """Allocate blocks for the drafts of slots that hold `num_tokens` tokens; return how many of the `num_drafted`
        tokens of each have blocks, [B].

        New blocks are allocated for all or for none, and only while as many stay free as there are live sequences, so
        that a draft pre-empts no sequence.
        """
        num_live = sum(len(group.live) for group in self._flight.groups)
        fits = self._tables.blocks_missing(slots, num_tokens + num_drafted) + num_live <= self._tables.num_free
        if fits and self._tables.allocate_all(slots, num_tokens + num_drafted):
            self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
            return num_drafted
        return np.minimum(num_drafted, self._tables.tokens_left_in_each(slots, num_tokens))

    def free_ahead(self, slots: Numbers, num_tokens: Numbers) -> None:
        """Free blocks that `allocate_ahead` or `allocate_drafts` allocated beyond the first `num_tokens` tokens of
        each slot; no other slot shares them."""
        self._tables.truncate(slots, num_tokens)

    def resume_suspended(self, group: LiveGroup, suspended: LiveSequence) -> bool:
        """Make a suspended sequence live again; it has more tokens than are cached. Return False if it was pre-empted
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
        """Schedule waiting sequences while there are slots and blocks, paused ones first. Sequences `answered` by
        a tool, each with the number of its cached tokens, come first in the result."""
        scheduled = ScheduledBatch([sequence for sequence, _ in answered], list(range(len(answered))), {}, 0, {})
        scheduled.cached.update((index, cached) for index, (_, cached) in enumerate(answered))
        waiting, period = self._flight.waiting, self._flight.period
        if not self.can_schedule(group):
            self.peak_blocks = max(self.peak_blocks, self._tables.num_used)
            return scheduled
        num_new, num_live = 0, sum(len(group.live) for group in self._flight.groups)
        while not group.is_full and (self.paused or waiting):
            is_new = not self.paused
            partial = PartialResponse(prompt=waiting[0], first_period=period) if is_new else self.paused[0]
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
