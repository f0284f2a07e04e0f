"""The norm of a few rows by a kernel is torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.runtime.kernels import layer_ops
from tests.runtime.kernels.where import DEVICE


@pytest.mark.parametrize("width", [48, 1200])
def test_both_norm_alike(width: int) -> None:
    torch.manual_seed(width)
    hidden, weight = torch.randn(5, width, device=DEVICE) * 3, torch.randn(width, device=DEVICE)
    hidden[0] = 0.0
    found = torch.empty_like(hidden)
    layer_ops.norm_rows(hidden, weight, 1e-5, found)
    torch.testing.assert_close(found, F.rms_norm(hidden, (width,), weight, 1e-5), atol=1e-5, rtol=1e-5)
