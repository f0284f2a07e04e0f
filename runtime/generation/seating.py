"""Who has a slot and blocks of the cache: what waits is admitted, and what has too few blocks gives way.

Every rank of a replica decides the same without a message.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from meshwright.planner.simulation.flight import Flight
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.generation.shared_prompts import SharedPrompts
from meshwright.runtime.generation.slots import LiveGroup, LiveSequence, Partial, Prompt, Response, packs
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers

_ROUNDS_AHEAD = 4
"""A sequence is admitted where the live ones could go on for so many rounds without another block being freed."""

Part: TypeAlias = tuple[int, int, int]
"""Of a pack: a place among what is fed, and the first token and the end of what goes in."""


class Seated(NamedTuple):
    """Sequences that have just got a slot, or go on in theirs behind an answer: all of them, by their places those
    whose tokens go through the model, and for the others the slot whose prompt they read; how many of all begin; and by
    place, how many tokens of a sequence are cached already."""

    sequences: list[LiveSequence]
    fed: list[int]
    sources: dict[int, int]
    num_begun: int
    cached: dict[int, int]

    def parts(self, most: int) -> list[list[Part]]:
        """What is fed, in packs of so many tokens at most."""
        fed = [(self.sequences[index], self.cached.get(index, 0)) for index in self.fed]
        found = packs([len(one.prompt.tokens) + one.num_drawn - cached for one, cached in fed], most)
        return [[(row, first + fed[row][1], end + fed[row][1]) for row, first, end in pack] for pack in found]


NOBODY = Seated([], [], {}, 0, {})


class Seating:
    """The slots and blocks of one generator."""

    def __init__(
        self, tables: BlockTables, prompts: SharedPrompts, flight: Flight[Prompt, LiveGroup, Response]
    ) -> None:
        self._tables, self._prompts, self._flight = tables, prompts, flight
        self.paused: list[Partial] = []
        """Sequences that had to give way, the oldest first: they go on before anything else begins."""
        self.num_preempted, self.most_blocks = 0, 0
        """How often a sequence gave way (pre-emption), and the most blocks that were held at a time."""

    def release(self, slots: Sequence[int]) -> None:
        """Sequences have left these slots."""
        if slots:
            self._tables.release(*slots)
            self._prompts.leave(slots)

    def pause(self, partial: Partial) -> None:
        """A sequence without a slot is to go on."""
        bisect.insort(self.paused, partial, key=lambda one: one.age)

    def grow(self, group: LiveGroup) -> None:
        """Blocks for the next token of every live sequence. Where too few are free the youngest of the group gives way,
        to be computed anew: a group's own, for the others' tokens are on their way."""
        while True:
            slots, needed = group.first_slot + group.rows, group.records.cached(group.rows) + 1
            short = self._tables.short(slots, needed).tolist()
            if all(self._tables.take(int(slots[index]), int(needed[index])) for index in short):
                return
            youngest = max(range(len(group.live)), key=lambda index: group.live[index].age)
            self.pause(group.live[youngest].kept())
            self.release(group.leave([youngest]))
            self.num_preempted += 1

    def left(self, slots: Numbers, num_tokens: Numbers) -> int:
        """How many more tokens all of `slots` have blocks for, of which so many are held already."""
        return self._tables.left(slots, num_tokens)

    def grow_ahead(self, slots: Numbers, num_tokens: Numbers, most: int) -> int:
        """Blocks for `most` more tokens of each, or those that are held where too few are free for all; for how many
        more tokens all of them have blocks then, `most` at most. Nobody gives way."""
        if most > 0 and self._tables.take_all(slots, num_tokens + most):
            self.most_blocks = max(self.most_blocks, self._tables.num_used)
            return most
        return min(most, self._tables.left(slots, num_tokens))

    def give_back(self, slots: Numbers, num_tokens: Numbers) -> None:
        """Frees blocks behind so many tokens of each, which nobody else reads: they were taken ahead."""
        self._tables.give_back(slots, num_tokens)

    def go_on(self, group: LiveGroup, parked: LiveSequence) -> bool:
        """A sequence that kept its slot has more tokens than are cached: it is live again, or gives way where too few
        blocks are free."""
        if self._tables.take(parked.slot, parked.num_cached + 1):
            group.go_on(parked)
            return True
        self.pause(parked.kept())
        self.release([group.free(parked)])
        self.num_preempted += 1
        return False

    def may_admit(self, group: LiveGroup) -> bool:
        """Whether something waits and a slot is free."""
        return bool(self.paused or self._flight.waiting) and not group.is_full

    def admit(self, group: LiveGroup, answered: Sequence[tuple[LiveSequence, int]] = ()) -> Seated:
        """Seats what waits while there are slots and blocks, what is paused first, behind those that are `answered`,
        each with its tokens that are cached."""
        admitted = Seated([one for one, _ in answered], list(range(len(answered))), {}, 0, {})
        admitted.cached.update((index, cached) for index, (_, cached) in enumerate(answered))
        waiting, turn = self._flight.waiting, self._flight.turn
        if not self.may_admit(group):
            self.most_blocks = max(self.most_blocks, self._tables.num_used)
            return admitted
        num_begun, num_live = 0, sum(len(group.live) for group in self._flight.groups)
        while not group.is_full and (self.paused or waiting):
            begins = not self.paused
            partial = Partial(prompt=waiting[0], first_turn=turn) if begins else self.paused[0]
            source = self._prompts.source(partial.prompt) if begins else None
            if not self._holds(group.next_slot, partial, source, num_live):
                break
            if source is None:
                admitted.fed.append(len(admitted.sequences))
            else:
                admitted.sources[len(admitted.sequences)] = source
            seated = group.seat(partial)
            admitted.sequences.append(seated)
            if begins:
                self._prompts.seat(waiting.popleft(), seated.slot)
            else:
                self.paused.pop(0)
            num_begun, num_live = num_begun + begins, num_live + 1
        self.most_blocks = max(self.most_blocks, self._tables.num_used)
        return admitted._replace(num_begun=num_begun)

    def _holds(self, slot: int, partial: Partial, source: int | None, num_live: int) -> bool:
        """Whether the slot has got blocks for a sequence and its next token, and enough are left for the live ones."""
        tables, num_prompt = self._tables, len(partial.prompt.tokens)
        if source is not None:
            tables.share(source, slot, num_prompt)
        left = num_live * _ROUNDS_AHEAD // BLOCK_TOKENS
        to_share = num_prompt if self._prompts.are_shared and not partial.tokens else 0
        taken = tables.take(slot, num_prompt + len(partial.tokens) + 1, to_share)
        if taken and (tables.num_free >= left or not num_live):
            return True
        tables.release(slot)
        return False
