"""Samples of one prompt: the first that is admitted is prefilled, the others read the same blocks of the cache.

A block that the prompt does not fill is copied, for its rows go on in it differently. What the prompt's last token says
is kept for as long as samples of it wait, and no longer than the weights stay what they are. Every rank of a replica
decides the same without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from meshwright.runtime.generation.slots import LiveSequence, Prompt

Group = tuple[int, int]
"""The step of a prompt batch, and which of its prompts."""


class SharedPrompts:
    """Of one generator; with a group of one nothing is shared."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._slots: dict[Group, list[int]] = {}
        """Of prompts that are cached with the weights of this turn: those of the live samples."""
        self._said: dict[Group, Tensor | None] = {}
        """Of the same: logits [V / tp] of the last token, which only the last pipeline stage has."""

    @property
    def are_shared(self) -> bool:
        """Whether a prompt that begins is one that others are to read."""
        return self._group_size > 1

    def forget(self) -> None:
        """The weights may change."""
        self._slots.clear()
        self._said.clear()

    def source(self, prompt: Prompt) -> int | None:
        """The slot of a live sample whose prompt can be read."""
        slots = self._slots.get(self._group(prompt))
        return slots[0] if slots else None

    def seat(self, prompt: Prompt, slot: int) -> None:
        """A sample of the prompt begins in the slot: its prompt is fed, or it reads what `source` has."""
        if self.are_shared:
            self._slots.setdefault(self._group(prompt), []).append(slot)

    def leave(self, slots: Iterable[int]) -> None:
        """Sequences in these slots have ended, or had to give way."""
        for slot in slots:
            for group, live in list(self._slots.items()):
                if slot in live:
                    live.remove(slot)
                if not live:
                    del self._slots[group]
                    self._said.pop(group, None)

    def of_all(self, admitted: Sequence[LiveSequence], fed: Sequence[int], logits: Tensor | None) -> Tensor | None:
        """Logits [B, V / tp] of all admitted sequences from those of the ones that were fed, by their places among
        them; None before the last stage."""
        own = dict.fromkeys(fed) if logits is None else dict(zip(fed, logits, strict=True))
        for index in fed if self._slots else ():
            group = self._group(admitted[index].prompt)
            if not admitted[index].num_drawn and admitted[index].slot in self._slots.get(group, ()):
                self._said[group] = own[index]
        if len(fed) == len(admitted):
            return logits
        said = (own[i] if i in own else self._said[self._group(one.prompt)] for i, one in enumerate(admitted))
        rows = [row for row in said if row is not None]
        return torch.stack(rows) if rows else None

    def keep_for(self, waiting: Sequence[Prompt]) -> None:
        """Lets go of what no waiting prompt needs; those of a group stand one behind the other."""
        front = self._group(waiting[0]) if waiting else None
        for kept in (self._slots, self._said):
            for group in [group for group in kept if group != front]:
                del kept[group]

    def _group(self, prompt: Prompt) -> Group:
        return prompt.step, prompt.row // self._group_size
