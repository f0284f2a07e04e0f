"""The device of a rank that computes: the stages' bodies and the refits, on Megatron-core."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.runtime import host
from meshwright.runtime.actions import Actions
from meshwright.runtime.batch import Batch
from meshwright.runtime.refit import Refit


class Computing:
    """`refits` are by source and target stage."""

    def __init__(self, actions: Actions, refits: Mapping[tuple[str, str], Refit]) -> None:
        self._actions, self._refits = actions, refits

    def begin(self, turn: int) -> None:
        self._actions.begin(turn)

    def run_stage(self, stage: str, batch: Batch) -> Mapping[str, float]:
        return self._actions.run(stage, batch)

    def refit(self, source: str, target: str) -> None:
        self._refits[source, target].run()

    def synchronise(self) -> None:
        host.synchronise()
