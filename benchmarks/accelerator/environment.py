"""What is installed here, what the pins make of it, and whether a plan for a processor keeps off the GPU."""

from __future__ import annotations

import configparser
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from benchmarks.accelerator.world import World
from meshwright.runtime.device import host
from meshwright.runtime.device.instruments import query_device
from meshwright.runtime.launch.launch import ProcessSetup, launch

_SETUP = Path(__file__).parents[2] / "setup.cfg"
_BESIDE = ("triton", "transformer-engine", "flash-attn", "flashinfer-python", "vllm", "aiconfigurator-core")
"""Packages that are used or compared with where they are installed."""


def report(world: World) -> str:
    """As a table of Markdown."""
    rows = [("python", platform.python_version(), ""), *_of_gpu()]
    rows += [(requirement.name, *held_to(requirement)) for requirement in requirements()]
    rows += [(name, _version(name) or "not installed", "") for name in _BESIDE]
    device, sees = launch(_of_process, num_ranks=1, setup=ProcessSetup("cpu"))[0]
    rows.append(
        (
            "a plan for a processor",
            f"computes on {device}, sees {sees} GPUs",
            "" if (device, sees) == ("cpu", 0) else "WRONG",
        )
    )
    device, _ = launch(_of_process, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    rows.append((f"a plan for {world.device}", f"computes on {device}", ""))
    return "\n".join(("| what | here | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)))


def requirements() -> Iterator[Requirement]:
    """What planning and the runtime need, with their pins."""
    setup = configparser.ConfigParser()
    setup.read(_SETUP)
    lines = f"{setup['options']['install_requires']}\n{setup['options.extras_require']['run']}".splitlines()
    return (Requirement(line) for line in lines if line and not line.startswith("#"))


def held_to(requirement: Requirement) -> tuple[str, str]:
    """The version that is installed, and what is wrong with it."""
    found = _version(requirement.name)
    if found is None:
        return "not installed", "MISSING"
    return found, "" if requirement.specifier.contains(found, prereleases=True) else f"NOT {requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _of_gpu() -> list[tuple[str, str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none", "")]
    found = torch.cuda.get_device_properties(0)
    driver = query_device("driver_version")
    return [
        ("GPU", f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} processors", ""),
        ("driver, CUDA, cuDNN", f"{', '.join(driver)}, {torch.version.cuda}, {torch.backends.cudnn.version()}", ""),
    ]


def _of_process() -> tuple[str, int]:
    return str(host.device()), host.num_cuda_devices()
