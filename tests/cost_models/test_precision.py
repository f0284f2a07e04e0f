"""Formats have their bytes, and a format that is not known or that a device has no peak for is refused."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.precision import PRECISIONS, element_bytes, precision_named
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.errors import BadInput


def test_models_are_trained_in_two_bytes_or_four() -> None:
    assert (element_bytes("bf16"), element_bytes("fp32")) == (2, 4)
    for name in ("fp8", "fp4", "fp16"):
        with pytest.raises(BadInput, match=f"precision='{name}' is not known; use fp32 or bf16"):
            element_bytes(name)


def test_a_narrower_format_never_has_more_bytes() -> None:
    fp32, bf16, fp8, fp4 = (PRECISIONS[name] for name in ("fp32", "bf16", "fp8", "fp4"))
    for wide, narrow in ((fp32, bf16), (bf16, fp8), (fp8, fp4)):
        assert narrow.weight_bytes < wide.weight_bytes
        assert (narrow.size, narrow.cache_bytes) <= (wide.size, wide.cache_bytes)
    assert fp4.weight_bytes == 0.5 + 1 / 16  # a scale of one byte for each 16 weights


def test_a_format_is_one_that_the_device_has_a_peak_for(a100s: Callable[[int], Cluster]) -> None:
    device = a100s(1).device
    assert precision_named("bf16", device) == PRECISIONS["bf16"]
    with pytest.raises(BadInput, match="precision='int8' is not known; use fp32 or bf16 or fp8 or fp4"):
        precision_named("int8", device)
    with pytest.raises(BadInput, match=r"has no peak for bf16; give flops_per_second\.bf16"):
        precision_named("bf16", device.model_copy(update={"flops_per_second": {"fp32": 1e12}}))
