"""Gates by a kernel let through what torch's operations do, and have their gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.runtime.kernels import layer_ops
from tests.runtime.kernels.where import DEVICE


@pytest.mark.parametrize("width", [40, 1500])
def test_both_have_the_same_numbers_and_gradients(width: int) -> None:
    torch.manual_seed(width)
    up = torch.randn(6, 1, 2 * width, device=DEVICE, requires_grad=True)
    gate, linear = up.chunk(2, dim=-1)
    expected = F.silu(gate) * linear
    weights = torch.randn_like(expected)
    (of_expected,) = torch.autograd.grad(expected, up, weights)
    found = layer_ops.silu_and_mul(up)
    (of_found,) = torch.autograd.grad(found, up, weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_found, of_expected, atol=1e-5, rtol=1e-5)
