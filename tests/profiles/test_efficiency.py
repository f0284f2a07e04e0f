"""Every family of devices has its constants, with where they come from."""

import pytest

from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import device_names


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_efficiencies_are_sourced(kind: str) -> None:
    assert len(efficiency_of(kind).source) > 40


@pytest.mark.parametrize("name", device_names())
def test_a_known_device_has_the_constants_of_a_family(name: str) -> None:
    found = efficiency_of("cuda", name)
    assert found.overlaps_launch
    assert found.date
    assert found is efficiency_of("cuda", name)


def test_a_device_that_is_not_listed_has_those_of_its_kind() -> None:
    assert efficiency_of("cpu", "some processor") == efficiency_of("cpu")
    assert efficiency_of("cuda", "h100-sxm") != efficiency_of("cuda", "a100-80gb")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadInput, match="device kind 'tpu' is not known; use c"):
        efficiency_of("tpu")
