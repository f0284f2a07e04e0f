"""Copies on the host hold what the originals held, and nothing more."""

from __future__ import annotations

import torch

from meshwright.runtime.device import host_copies, used_memory
from meshwright.runtime.device.host_copies import copy_to_host


def test_copies_are_equal_and_stay_when_the_originals_change() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 5, 7, generator=generator)
    tensors = [drawn, drawn.bfloat16(), drawn.transpose(0, 2), drawn[1:], torch.tensor(2.5), torch.empty(0, 4)]
    known = [tensor.clone() for tensor in tensors]
    copies = copy_to_host(tensors)
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(copies, known, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_a_copy_has_a_storage_of_its_own_so_that_no_more_of_it_is_written() -> None:
    for copy in copy_to_host([torch.ones(3), torch.ones(5)[1:], torch.ones(2, dtype=torch.bfloat16)]):
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copy.storage_offset() == 0


def test_a_tensor_of_many_pieces_is_copied_whole() -> None:
    drawn = torch.arange(2.5 * host_copies._PIECE_BYTES / 4)
    assert torch.equal(*copy_to_host([drawn]), drawn)


def test_the_memory_goes_back_to_the_host_with_the_last_copy() -> None:
    tensors = [torch.ones(2**22), torch.ones(2**20)]
    before = used_memory.reset_peak()
    copies = copy_to_host(tensors)
    num_bytes = sum(copy.nbytes for copy in copies)
    assert used_memory.bytes_in_use() - before > 0.9 * num_bytes
    del copies
    assert used_memory.bytes_in_use() - before < 0.3 * num_bytes


def test_nothing_is_copied_to_nothing() -> None:
    assert copy_to_host([]) == []
