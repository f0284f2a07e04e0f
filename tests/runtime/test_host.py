"""The stand-in for CUDA stays inside megatron-core, and inside one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from meshwright.runtime import host

ROOT = Path(__file__).parents[2]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where CUDA is available")


@ON_CPU
def test_megatron_makes_its_tensors_on_the_cpu() -> None:
    host.install()
    host.install()
    assert schedules.torch.zeros((), device="cuda").device == torch.device("cpu")
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    assert (host.device(), host.backend()) == (torch.device("cpu"), "gloo")


@ON_CPU
def test_torch_is_left_as_it_is() -> None:
    host.install()
    assert schedules.torch is not torch
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.zeros((), device="cuda")
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.zeros(()).cuda()
    assert torch.zeros(()).type() == "torch.FloatTensor"


def test_nothing_is_replaced_where_cuda_is_available() -> None:
    """In a process of its own, told that there is CUDA."""
    program = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from meshwright.runtime import host; host.install()\n"
        "import megatron.core.pipeline_parallel.schedules as schedules\n"
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer\n"
        "assert schedules.torch is torch\n"
        "assert not hasattr(DistributedOptimizer.__init__, '__wrapped__')\n"
        "assert host.backend() == 'nccl'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_other_file_knows_of_the_stand_in() -> None:
    """Elsewhere torch.cuda is only asked whether it is there, and for memory and devices."""
    for path in (ROOT / "runtime").glob("*.py"):
        if path.name != "host.py":
            text = path.read_text()
            assert "TorchFunctionMode" not in text, path
            assert "for_megatron" not in text, path
            assert "_cuda_rng_state" not in text, path
