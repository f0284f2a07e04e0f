"""What a device can run is told by its kind, and a CPU has no more than torch's plain operators."""

from __future__ import annotations

import pytest
import torch

from meshwright.runtime.device.capabilities import DeviceCapabilities, device_capabilities


def test_a_cpu_is_asked_for_nothing() -> None:
    assert device_capabilities("cpu") == DeviceCapabilities(
        kind="cpu", capability=(0, 0), has_flash=False, has_triton=False
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_tells_its_capability() -> None:
    assert device_capabilities("cuda").capability == torch.cuda.get_device_capability()
