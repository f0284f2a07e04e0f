"""Samples of one prompt: the first that is admitted is prefilled, the others get a copy of its keys and values.

A copy is taken from the slot of a sample that is still live, and each sample keeps its own: a cache that several rows
read is not built. What the prompt's last token says is kept for as long as samples of it wait, and no longer than the
weights stay what they are. Every rank of a replica decides the same without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.runtime.generation.slots import LiveSequence, Prompt

Group = tuple[int, int]
"""The step of a prompt batch, and which of its prompts."""


class Copied(NamedTuple):
    """The first `num_tokens` of one slot go to another."""

    source: int
    target: int
    num_tokens: int


class Parted(NamedTuple):
    """Of sequences that are admitted, by their place among them: those that are prefilled, and what others copy."""

    fresh: tuple[int, ...]
    copies: tuple[Copied, ...]


class SharedPrompts:
    """Of one generator; with a group of one nothing is shared."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._said: dict[Group, Tensor | None] = {}
        """Of prompts that are cached: logits [V / tp] of the last token, which only the last pipeline stage has."""

    def forget(self) -> None:
        """The weights may change."""
        self._said.clear()

    def parted(
        self, admitted: Sequence[LiveSequence], first_slot: int, live: Iterable[tuple[int, LiveSequence]]
    ) -> Parted:
        """Which of the sequences in consecutive slots from `first_slot` on are prefilled. `live` are the sequences in
        all slots, these included."""
        if self._group_size == 1:
            return Parted(tuple(range(len(admitted))), ())
        slots = range(first_slot, first_slot + len(admitted))
        cached = {self._group(one.prompt): slot for slot, one in live if slot not in slots}
        sources = {group: slot for group, slot in cached.items() if group in self._said}
        fresh, copies = [], []
        for index, one in enumerate(admitted):
            group, slot = self._group(one.prompt), slots[index]
            if group in sources:
                copies.append(Copied(sources[group], slot, len(one.prompt.tokens)))
            else:
                fresh.append(index)
                sources[group] = slot
        return Parted(tuple(fresh), tuple(copies))

    def of_all(self, admitted: Sequence[LiveSequence], fresh: Sequence[int], logits: Tensor | None) -> Tensor | None:
        """Logits [B, V / tp] of all admitted sequences from those of the fresh ones; None before the last stage."""
        if self._group_size == 1:
            return logits
        for place, index in enumerate(fresh):
            self._said[self._group(admitted[index].prompt)] = None if logits is None else logits[place]
        said = [self._said[self._group(one.prompt)] for one in admitted]
        rows = [row for row in said if row is not None]
        return torch.stack(rows) if rows else None

    def keep_for(self, waiting: Sequence[Prompt]) -> None:
        """Lets go of what no waiting prompt needs; those of a group stand one behind the other."""
        front = self._group(waiting[0]) if waiting else None
        self._said = {group: said for group, said in self._said.items() if group == front}

    def _group(self, prompt: Prompt) -> Group:
        return prompt.step, prompt.row // self._group_size
