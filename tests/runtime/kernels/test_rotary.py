"""Heads turned by a kernel are those turned by torch's operations, wherever they lie, and so are their gradients."""

from __future__ import annotations

import pytest
import torch

from meshwright.runtime.kernels import layer_ops
from meshwright.runtime.model.attention import rotate
from tests.runtime.kernels.where import DEVICE


@pytest.mark.parametrize(("num_heads", "size"), [(4, 16), (3, 20), (1, 64)])
def test_both_turn_alike(num_heads: int, size: int) -> None:
    torch.manual_seed(size)
    mixed = torch.randn(9, 1, num_heads, 3 * size, device=DEVICE, requires_grad=True)
    heads = mixed[..., size : 2 * size]
    angles = (torch.rand(9, 1, 1, size // 2, device=DEVICE) * 6).repeat(1, 1, 1, 2)
    expected, found = (turn(heads, angles.cos(), angles.sin()) for turn in (rotate, layer_ops.rotate))
    weights = torch.randn_like(expected)
    of_expected, of_found = (torch.autograd.grad(turned, mixed, weights)[0] for turned in (expected, found))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_found, of_expected, atol=1e-5, rtol=1e-5)
