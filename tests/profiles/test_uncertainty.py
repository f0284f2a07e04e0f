"""The range of a prediction follows from independent errors of its inputs and laws."""

import math
import random

import pytest

from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.hardware import device_named
from meshwright.profiles.uncertainty import elasticity, interval, uncertainty


def test_eight_of_ten_samples_lie_in_the_range() -> None:
    rng, deviations = random.Random(0), (0.1, 0.2, 0.05)
    low, high = interval(10.0, deviations)
    samples = [10 * math.exp(sum(rng.gauss(0, one) for one in deviations)) for _ in range(4000)]
    assert sum(low <= sample <= high for sample in samples) / len(samples) == pytest.approx(0.8, abs=0.02)


def test_a_certain_prediction_has_no_range() -> None:
    assert interval(3.0, []) == (3.0, 3.0)
    assert elasticity(3.0, 3.0, 1.1) == 0
    assert elasticity(3.0, 3.0 * 1.1**2, 1.1) == pytest.approx(2)


def test_devices_with_constants_of_their_own_are_known_and_state_their_source() -> None:
    for name in uncertainty().measured_devices:
        device, _, _ = device_named(name)
        assert efficiency_of(device.kind, name).source
    assert len(uncertainty().source) > 100
