"""Packed tensors are those of safetensors, and leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc

import torch
from safetensors.torch import load, save

from meshwright.runtime.messages.experience import safetensors_bytes

TENSORS = {"b": torch.arange(5), "a": torch.ones(3, dtype=torch.uint8), "c": torch.tensor([[1.5, 2.5]])}


def test_they_are_written_as_safetensors_writes_them_and_read_back() -> None:
    content = safetensors_bytes(TENSORS, {"told": "this"})
    assert content == save(TENSORS, {"told": "this"})
    assert all(torch.equal(one, TENSORS[name]) for name, one in load(content).items())


def test_no_part_of_a_strided_tensor_is_left_out() -> None:
    turned = torch.arange(6).view(2, 3).T
    assert torch.equal(load(safetensors_bytes({"turned": turned}))["turned"], turned)


def test_messages_of_ever_new_sizes_take_no_memory() -> None:
    def most_kept(sizes: range) -> int:
        for size in sizes:
            safetensors_bytes({"values": torch.zeros(size)})
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        warm = most_kept(range(10))
        assert most_kept(range(1000, 1200)) - warm < 64 * 2**10
    finally:
        tracemalloc.stop()
