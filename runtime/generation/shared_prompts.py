"""Prefix sharing of the samples of one prompt: the first one admitted is prefilled, the others share its cache blocks.

A block that the prompt does not fill is copied, because its samples continue differently in it. The logits of the
prompt's last token are kept while samples of it wait, and not beyond a change of the weights. Every rank of a replica
makes the same decisions without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from meshwright.runtime.generation.slots import LiveSequence, Prompt

PromptGroup = tuple[int, int]
"""The step of a prompt batch, and the index of the prompt in it."""


class SharedPrompts:
    """The shared prompts of one generator; with a group size of one nothing is shared."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._slots: dict[PromptGroup, list[int]] = {}
        """Slots of live samples, by group, whose prompt is cached with the weights of this period."""
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
        """Record that a sample of the prompt starts in the slot, prefilled or sharing."""
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
        `fed`; None before the last stage."""
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
        """Forget every group that no waiting prompt belongs to; prompts of a group wait consecutively."""
        front = self._group(waiting[0]) if waiting else None
        for by_group in (self._slots, self._prompt_logits):
            for group in [group for group in by_group if group != front]:
                del by_group[group]

    def _group(self, prompt: Prompt) -> PromptGroup:
        return prompt.step, prompt.row // self._group_size
