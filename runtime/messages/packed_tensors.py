"""Tensors on the host as safetensors bytes.

By way of numpy: `safetensors.torch.save` asks ctypes for an array type for every size that it meets, and these stay,
6 KiB each; messages and sequences in flight have ever new sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from safetensors.numpy import save
from torch import Tensor


def packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Tensors [...] by name, of types that numpy has, with what else is to be told."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    content: bytes = save(arrays, metadata and dict(metadata))
    return content
