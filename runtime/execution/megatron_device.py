"""The device of a rank that computes: the stages' bodies and the refits, on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from meshwright.runtime.device import host
from meshwright.runtime.device.used_memory import peak_bytes, reset_peak
from meshwright.runtime.execution.actions import Actions
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.outcome import Findings
from meshwright.runtime.training.refit import RefitCopy


class MegatronDevice:
    """One rank's.

    Weights that another pool takes leave as soon as they are trained, if a turn follows that takes them, and while they
    are on their way this rank goes on with what does not train them.

    Peaks of memory are counted in every turn where that is free, and on a CPU in one turn, for there its allocator has
    to give back what it keeps before each.
    """

    def __init__(
        self,
        actions: Actions,
        refits: Mapping[tuple[str, str], RefitCopy],
        *,
        bytes_before: int,
        steps: range,
    ) -> None:
        """`refits` are by source and target stage; `bytes_before` were in use before there were models."""
        self._actions, self._refits, self._bytes_before = actions, refits, bytes_before
        self._steps, self._turn, self._measures = steps, steps.start, False

    def begin(self, turn: int) -> None:
        """A turn begins."""
        self._turn = turn
        self._measures = host.on_cuda() or turn == self._steps.start
        self._actions.begin(turn)

    def run_stage(self, stage: str, batch: StepExperience) -> Findings:
        """Runs a stage; weights that others take are settled before it and given after it, if a turn follows."""
        taken = [refit for (source, _), refit in self._refits.items() if source == stage]
        for refit in taken:
            refit.settle()
        with self._peak() as facts:
            findings = self._actions.run(stage, batch)
        if self._turn + 1 in self._steps:
            for refit in taken:
                refit.give()
        return findings.with_facts(facts)

    def refit(self, source: str, target: str) -> Findings:
        """Takes this rank's part in copying the weights of `source` into `target`."""
        with self._peak() as facts:
            self._refits[source, target].run()
        return Findings(facts=facts)

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
        """Waits until the device has done everything asked of it."""
        host.synchronise()
