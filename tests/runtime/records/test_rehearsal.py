"""A rehearsal knows when the machine was its limit."""

from __future__ import annotations

import pytest

from meshwright.planner.simulation.simulate import StepTimes
from meshwright.runtime.records.results import Rehearsal


def rehearsal(processor_seconds: float, speed: float) -> Rehearsal:
    times = StepTimes(seconds=(2.0, 2.0), mean=2.0, p50=2.0, p90=2.0, p99=2.0)
    return Rehearsal(
        clock="rehearsed",
        durations="planned",
        speed=speed,
        num_processes=2,
        ranks_per_process=1,
        steps=times,
        simulated=times,
        overhead_wall_seconds=0.0,
        num_instructions=7,
        message_bytes=0.0,
        processor_seconds=processor_seconds,
        num_processors=2,
        error=0.0,
        excess_seconds=0.0,
    )


@pytest.mark.parametrize(("processor_seconds", "speed", "share"), [(2.0, 1.0, 0.5), (2.0, 0.5, 1.0), (0.0, 1.0, 0.0)])
def test_the_share_of_the_processors_is_of_the_wall_time_of_a_step(
    processor_seconds: float, speed: float, share: float
) -> None:
    assert rehearsal(processor_seconds, speed).processor_share == pytest.approx(share)
