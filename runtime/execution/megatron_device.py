"""The device of a rank that computes: stages and refits on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from meshwright.runtime.device import host
from meshwright.runtime.device.used_memory import peak_bytes, reset_peak
from meshwright.runtime.execution.actions import StageRunner
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.outcome import InstructionResult
from meshwright.runtime.training.refit import RefitCopy


class MegatronDevice:
    """The device of one rank.

    Weights that another pool receives are sent as soon as they are trained, if a later period uses them. The sends are
    asynchronous: this rank continues with whatever does not train these weights.

    Peak memory is measured in every period on CUDA. On a CPU it is measured in the first period only, since its
    allocator has to return cached memory before each measurement.
    """

    def __init__(
        self,
        actions: StageRunner,
        refits: Mapping[tuple[str, str], RefitCopy],
        *,
        bytes_before: int,
        steps: range,
    ) -> None:
        """`refits` are keyed by source and target stage; `bytes_before` were in use before the models were built."""
        self._actions, self._refits, self._bytes_before = actions, refits, bytes_before
        self._steps, self._turn, self._measures = steps, steps.start, False

    def begin(self, period: int) -> None:
        """Begin a period."""
        self._turn = period
        self._measures = host.on_cuda() or period == self._steps.start
        self._actions.begin(period)

    def run_stage(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Run a stage; before it, wait for earlier sends of its weights, and after it, start those of the new ones."""
        outgoing = [refit for (source, _), refit in self._refits.items() if source == stage]
        for refit in outgoing:
            refit.wait()
        with self._peak() as facts:
            findings = self._actions.run(stage, batch)
        if self._turn + 1 in self._steps:
            for refit in outgoing:
                refit.start_send()
        return findings.with_facts(facts)

    def refit(self, source: str, target: str) -> InstructionResult:
        """Take this rank's part in copying the weights of `source` into `target`."""
        with self._peak() as facts:
            self._refits[source, target].run()
        return InstructionResult(facts=facts)

    @contextmanager
    def _peak(self) -> Iterator[dict[str, float]]:
        """Yield the facts of an instruction, which get its peak memory on exit."""
        facts: dict[str, float] = {}
        if not self._measures:
            yield facts
            return
        reset_peak()
        yield facts
        facts["memory_bytes"] = float(peak_bytes() - self._bytes_before)

    def synchronise(self) -> None:
        """Wait until all work submitted to the device is done."""
        host.synchronise()
