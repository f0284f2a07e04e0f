"""Memory is what a process has taken for itself: its peak, what is in use, and nothing of files."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.runtime.device import used_memory

_MIB = 2**20


def test_pages_of_a_file_do_not_count(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "library", 200 * 2**20
    path.write_bytes(bytes(num_bytes))
    before = used_memory.reset_peak()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert abs(used_memory.bytes_in_use() - before) < num_bytes / 4
        assert abs(used_memory.peak_bytes() - before) < num_bytes / 4


def test_a_large_allocation_shows_in_the_peak_and_is_forgotten_by_a_reset() -> None:
    num_bytes = 200 * 2**20
    before = used_memory.reset_peak()
    block = torch.ones(num_bytes // 4)
    del block
    assert used_memory.peak_bytes() - before > 0.9 * num_bytes
    used_memory.reset_peak()
    assert used_memory.peak_bytes() - before < 0.5 * num_bytes


@pytest.mark.parametrize("size", [16 * _MIB, 64 * _MIB])
def test_the_peak_is_what_was_in_use_at_most_and_not_what_was_freed_before(size: int) -> None:
    def use() -> None:
        blocks = [torch.ones(size // 4, dtype=torch.float32) for _ in range(3)]
        del blocks

    use()
    before = used_memory.reset_peak()
    use()
    assert used_memory.peak_bytes() - before == pytest.approx(3 * size, rel=0.1)
    again = used_memory.reset_peak()
    assert used_memory.peak_bytes() - again < size / 2


def test_what_is_freed_and_released_is_in_use_no_more() -> None:
    before = used_memory.reset_peak()
    blocks = [torch.ones(4 * _MIB) for _ in range(8)]
    assert used_memory.bytes_in_use() - before > 100 * _MIB
    del blocks
    used_memory.release()
    assert used_memory.bytes_in_use() - before < 20 * _MIB


def test_pages_between_what_stays_go_back_to_the_host() -> None:
    used_memory.trim_host_memory()
    blocks = [torch.ones(2**14) for _ in range(1600)]  # of 64 KiB each, from the heap
    full = used_memory.bytes_in_use()
    kept = blocks[::16]
    del blocks
    used_memory.trim_host_memory()
    assert full - used_memory.bytes_in_use() > 80 * _MIB
    assert len(kept) == 100


def test_the_tensors_of_a_process_are_counted_once_for_each_storage() -> None:
    before = used_memory.tensor_bytes()
    whole = torch.zeros(1000)
    views = [whole[10:], whole.view(10, 100), torch.nn.Parameter(whole)]
    assert used_memory.tensor_bytes() - before == whole.nbytes
    assert len(views) == 3


def test_tensors_without_memory_of_their_own_are_not_counted() -> None:
    before = used_memory.tensor_bytes()
    with FakeTensorMode():
        without = [torch.zeros(1000)]
    without.append(torch.zeros(1000, device="meta"))
    assert used_memory.tensor_bytes() == before
    assert len(without) == 2


def test_the_memory_of_another_process_is_read_until_it_ends() -> None:
    code = "block = bytearray(200 * 2**20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert 200 * _MIB < used_memory.resident_bytes(process.pid) < 250 * _MIB
    assert used_memory.resident_bytes(process.pid) == 0
