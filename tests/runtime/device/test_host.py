"""The stand-in for CUDA stays inside megatron-core, and inside one file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from benchmarks.hosts import BIN, LOOPBACK
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Offload, Schedule
from meshwright.runtime.device import host
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import write_job

ROOT = Path(__file__).parents[3]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a torch with CUDA does what these expect to fail")


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


TOLD = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 1\n"
"""A program's first line, in a process that is then told that there is CUDA."""


def run(program: str) -> None:
    """In a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_replaced_where_cuda_is_chosen() -> None:
    run(
        f"{TOLD}chosen = []; torch.cuda.set_device = chosen.append\n"
        "from meshwright.runtime.device import host; host.choose('cuda', 0); host.install()\n"
        "import megatron.core.pipeline_parallel.schedules as schedules\n"
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer\n"
        "assert schedules.torch is torch\n"
        "assert not hasattr(DistributedOptimizer.__init__, '__wrapped__')\n"
        "assert (host.backend(), host.device(), chosen) == ('nccl', torch.device('cuda', 0), [0])\n"
    )


def test_the_cpu_is_chosen_where_there_is_cuda_too() -> None:
    run(
        f"{TOLD}import os\n"
        "from meshwright.runtime.device import host; host.choose('cpu'); host.install()\n"
        "import megatron.core.pipeline_parallel.schedules as schedules\n"
        "assert schedules.torch.zeros((), device='cuda').device == torch.device('cpu')\n"
        "assert not schedules.torch.cuda.is_available()\n"
        "assert (host.backend(), host.device()) == ('gloo', torch.device('cpu'))\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    )


@ON_CPU
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="CUDA device 0 of this machine, which has 0; run it on such a machine"):
        host.choose("cuda", 0)


HOOK = """
import importlib.util, sys

class TellOfCuda:
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            module.is_available, module.device_count = lambda: True, lambda: 1

        spec.loader.exec_module = loaded
        return spec

sys.meta_path.insert(0, TellOfCuda())
"""
"""What every process of a command runs first: it is told that there is one CUDA device, of which any use fails."""


@pytest.mark.check_all
def test_a_plan_for_two_cpu_ranks_runs_where_there_is_a_gpu(tmp_path: Path) -> None:
    """With state offloaded and weights sent between pools, both of which differ on a GPU."""
    path = write_job(tmp_path, num_ranks=2)
    away = Schedule(micro_batch_size=4, offload=Offload.OPTIMIZER)
    where = {"other": Where("0:1"), "actor_train": Where("1:1", schedule=away)}
    write_plan(tmp_path / "plan.json", plan_by_hand(resolve(read_job(path), tmp_path), where))
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    told = f"{tmp_path / 'hook'}{os.pathsep}{ROOT / 'src'}{os.pathsep}{ROOT}"
    check = "import torch; assert torch.cuda.is_available()"
    assert LOOPBACK[0].start([sys.executable, "-c", check], PYTHONPATH=told).end(60).code == 0
    command = [BIN / "meshwright", "run", tmp_path / "plan.json", path, "--steps", 1, "--out", tmp_path / "run"]
    end = LOOPBACK[0].start(command, PYTHONPATH=told).end(300)
    assert end.code == 0, end.err


def test_no_other_file_asks_for_cuda() -> None:
    """What a process computes on was chosen; that there is a GPU decides nothing."""
    for path in (ROOT / "runtime").rglob("*.py"):
        if path.name != "host.py":
            assert "is_available" not in path.read_text(), path
            assert "device_count" not in path.read_text(), path


def test_no_other_file_knows_of_the_stand_in() -> None:
    """Elsewhere torch.cuda is only asked for memory, names and graphs."""
    for path in (ROOT / "runtime").rglob("*.py"):
        if path.name != "host.py":
            text = path.read_text()
            assert "TorchFunctionMode" not in text, path
            assert "for_megatron" not in text, path
            assert "_cuda_rng_state" not in text, path
