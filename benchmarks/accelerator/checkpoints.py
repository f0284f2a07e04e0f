"""What a checkpoint of two trainers takes: of the step while it is copied, and beside the step while it is written."""

from __future__ import annotations

import cProfile
import gc
import pstats
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from benchmarks.accelerator.jobs import RUN_MODEL, config_of
from benchmarks.accelerator.world import World, tell
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.runtime.device import host
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.training.checkpoint import publish, take_snapshot
from meshwright.runtime.training.trainer import Trainer

T = TypeVar("T")

_SNAPSHOT = {
    "state_of": "what is cut over replicas gathered",
    "_copy_to_host": "all of it copied to the host",
    "save": "what is written where, agreed with megatron",
}
_WRITING = {
    "write_preloaded_data": "written and taken by the disk",
    "seal": "SHA-256 of the files",
}
"""Functions of the runtime and of megatron, and what they do; the first of each name that is called counts."""

_MOST = 6
"""Functions that are told by the time they take themselves."""
_PATIENCE = 25.0
"""Seconds after which no second checkpoint is begun."""


class _Seconds(NamedTuple):
    """Of one half of a checkpoint: the whole, its parts, and the functions of most time of their own."""

    whole: float
    parts: tuple[tuple[str, float], ...]
    own: tuple[tuple[str, float], ...]


def report(world: World) -> str:
    """Tables of Markdown: a checkpoint on the disk, and one in memory where that has the room and time is left."""
    with world.room("checkpoints") as room:
        places = (world.directory("checkpoints") / "saved", room / "saved")
        found: str = launch(_measured, world, places, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    return found


def _measured(world: World, places: Sequence[Path]) -> str:
    """On the one rank."""
    spec = model_from_config(config_of(world, RUN_MODEL), name=RUN_MODEL)
    mesh, group = build_mesh(Layout(), 0), dist.new_group(backend="gloo")
    trainers = {
        "actor": _trainer(spec, mesh, world),
        "critic": _trainer(replace(spec, scalar_head=True), mesh, world),
    }
    gc.freeze()  # as a run does: a snapshot collects garbage several times over
    lines, began = [f"Two trainers of {RUN_MODEL}, with fp32 weights and moments."], time.monotonic()
    for place in places:
        if time.monotonic() - began > _PATIENCE:
            break
        lines.append(f"\n{'On the disk' if place.is_relative_to(world.out) else 'In memory'}:")
        for line in _checkpoint(place, trainers, group):
            lines.append(line)
            tell(line)
    return "\n".join(lines)


def _trainer(spec: ModelSpec, mesh: Mesh, world: World) -> Trainer:
    """One that has moments, as after an update."""
    found = Trainer(build_model(spec, mesh, dtype=world.dtype, trainable=True), mesh, learning_rate=1e-6)
    found.update()
    return found


def _checkpoint(place: Path, trainers: dict[str, Trainer], group: dist.ProcessGroup) -> Iterator[str]:
    """Saves a checkpoint and removes it again."""
    shutil.rmtree(place, ignore_errors=True)
    snapshot, taking = _profiled(lambda: take_snapshot(place, trainers), _SNAPSHOT)
    num_bytes = sum(tensor.nbytes for *_, (_, held) in snapshot.writer.write_buckets for _, tensor in held)
    yield f"\n| a checkpoint of {num_bytes / 1e9:.2f} GB | s | GB/s |\n|---|---|---|"
    yield from _rows("snapshot, of the step", taking, num_bytes)
    try:
        _, writing = _profiled(lambda: publish(snapshot, group), _WRITING)
        yield from _rows("writing, beside training", writing, num_bytes)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _profiled(body: Callable[[], T], named: dict[str, str]) -> tuple[T, _Seconds]:
    host.synchronise()
    profile = cProfile.Profile()
    began = time.perf_counter()
    found = profile.runcall(body)
    host.synchronise()
    whole = time.perf_counter() - began
    calls = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    parts = tuple(
        (told, max((call[3] for (_, _, function), call in calls if function == name), default=0.0))
        for name, told in named.items()
    )
    own = sorted(((f"{Path(file).name}: {function}", call[2]) for (file, _, function), call in calls), key=_seconds)
    return found, _Seconds(whole, parts, tuple(own[: -_MOST - 1 : -1]))


def _seconds(told: tuple[str, float]) -> float:
    return told[1]


def _rows(name: str, found: _Seconds, num_bytes: int) -> Iterator[str]:
    yield f"| **{name}** | {found.whole:.3f} | {num_bytes / 1e9 / found.whole:.2f} |"
    for told, seconds in found.parts:
        yield f"| of which {told} | {seconds:.3f} | |"
    most = ", ".join(f"{function} {seconds:.3f} s" for function, seconds in found.own)
    yield f"| most time of their own: {most} | | |"
