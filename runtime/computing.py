"""The device of a rank that computes: the stages' bodies and the refits, on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from meshwright.runtime import host
from meshwright.runtime.actions import Actions
from meshwright.runtime.batch import Batch
from meshwright.runtime.memory import peak_bytes, reset_peak
from meshwright.runtime.refit import Refit


class Computing:
    """One rank's.

    Peaks of memory are counted in every turn where that is free, and on a CPU in one turn, for there its allocator has
    to give back what it keeps before each.
    """

    def __init__(
        self,
        actions: Actions,
        refits: Mapping[tuple[str, str], Refit],
        *,
        bytes_before: int,
        measured_turn: int,
    ) -> None:
        """`refits` are by source and target stage; `bytes_before` were in use before there were models."""
        self._actions, self._refits, self._bytes_before = actions, refits, bytes_before
        self._measured_turn, self._measures = measured_turn, False

    def begin(self, turn: int) -> None:
        self._measures = torch.cuda.is_available() or turn == self._measured_turn
        self._actions.begin(turn)

    def run_stage(self, stage: str, batch: Batch) -> Mapping[str, float]:
        with self._peak() as facts:
            done = self._actions.run(stage, batch)
        return {**done, **facts}

    def refit(self, source: str, target: str) -> Mapping[str, float]:
        with self._peak() as facts:
            self._refits[source, target].run()
        return facts

    @contextmanager
    def _peak(self) -> Iterator[dict[str, float]]:
        """Gives the facts, which are complete when it is left."""
        facts: dict[str, float] = {}
        if not self._measures:
            yield facts
            return
        reset_peak()
        yield facts
        facts["memory_bytes"] = float(peak_bytes() - self._bytes_before)

    def synchronise(self) -> None:
        host.synchronise()
