"""Serialisation of host tensors as safetensors bytes.

It goes through numpy because `safetensors.torch.save` makes a ctypes array type for every new size, which is never
freed and takes 6 KiB; messages and in-flight sequences have new sizes all the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from safetensors.numpy import save
from torch import Tensor


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors bytes of tensors [...] by name, of dtypes that numpy has, with `metadata` in the header."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    content: bytes = save(arrays, metadata and dict(metadata))
    return content
