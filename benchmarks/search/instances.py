"""Solves option tables written by another planner, and compares with their best known makespans.

    python benchmarks/search/instances.py --data DIR

DIR holds one JSON file per instance: calls with options (ranks, layout, microseconds, bytes), reallocation times
between layouts, a number of iterations. Six calls of PPO; all iterations are scheduled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.solver.problem import Activity, Mode, Precedence, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.planner.solver.transfer_ticks import TransferTicks

MICROSECONDS_PER_TICK = 1000
BLOCK_BYTES = 2**20

_SCORES = ("rew_inf", "ref_inf", "critic_inf")
_TRAINS = {"actor_train": "actor_gen", "critic_train": "critic_inf"}
"""Each train task and the task whose weights it updates: they move there before it and back after it."""


def read_instance(instance: Mapping[str, Any]) -> Problem:
    """The problem of one instance, in ticks of a millisecond and blocks of a MiB, everything rounded up."""
    tasks = tuple(Task(name, tuple(map(_mode, rows))) for name, rows in instance["calls"].items())
    ticks = _transfer_ticks(instance, tasks)
    activities: list[Activity] = []
    precedences: list[Precedence] = []
    for iteration in range(instance["num_iterations"]):
        activities += _activities(iteration, ticks)
        precedences += _precedences(iteration)
    return Problem(
        num_ranks=instance["num_ranks"],
        device_units=instance["device_bytes"] // BLOCK_BYTES,
        tasks=tasks,
        activities=tuple(activities),
        precedences=tuple(precedences),
    )


def _mode(row: Mapping[str, int]) -> Mode:
    return Mode(
        resource=Resource(row["first_rank"], row["num_ranks"], _layout([row["pp"], row["tp"], row["dp"]])),
        ticks=-(-row["time_us"] // MICROSECONDS_PER_TICK),
        resident_units=-(-row["resident_bytes"] // BLOCK_BYTES),
        transient_units=-(-(row["peak_bytes"] - row["resident_bytes"]) // BLOCK_BYTES),
    )


def _layout(degrees: list[int]) -> str:
    return "pp{},tp{},dp{}".format(*degrees)


def _transfer_ticks(instance: Mapping[str, Any], tasks: tuple[Task, ...]) -> dict[tuple[str, str, int], int]:
    """The times are the same whatever ranks two layouts have in common; between equal layouts nothing moves."""
    listed = {
        (_layout(row["from"]), _layout(row["to"])): -(-row["time_us"] // MICROSECONDS_PER_TICK)
        for row in instance["reallocation"]
        if row["from"] != row["to"]
    }
    resources = list(dict.fromkeys(mode.resource for task in tasks for mode in task.modes))
    overlaps = {(one.layout, other.layout, one.overlap(other)) for one in resources for other in resources}
    return {(a, b, n): listed[a, b] for a, b, n in overlaps if (a, b) in listed}


def _activities(iteration: int, ticks: Mapping[tuple[str, str, int], int]) -> Iterator[Activity]:
    for task in ("actor_gen", *_SCORES, *_TRAINS):
        yield Run(name=f"{task} {iteration}", task=task)
    for train, other in _TRAINS.items():
        for side in ("source", "target"):
            yield Transfer(
                name=f"to {train} {iteration} {side}",
                source=other,
                target=train,
                occupies=side,
                ticks=TransferTicks.from_mapping(ticks),
            )
            yield Transfer(
                name=f"from {train} {iteration} {side}",
                source=train,
                target=other,
                occupies=side,
                ticks=TransferTicks.from_mapping(ticks),
            )


def _precedences(iteration: int) -> Iterator[Precedence]:
    for score in _SCORES:
        yield Precedence(f"actor_gen {iteration}", f"{score} {iteration}")
    for train, other in _TRAINS.items():
        for before in ("actor_gen", *_SCORES):
            yield Precedence(f"{before} {iteration}", f"{train} {iteration}")
        for side in ("source", "target"):
            yield Precedence(f"{other} {iteration}", f"to {train} {iteration} {side}")
            yield Precedence(f"to {train} {iteration} {side}", f"{train} {iteration}")
            yield Precedence(f"{train} {iteration}", f"from {train} {iteration} {side}")
            if iteration:
                yield Precedence(f"from {train} {iteration - 1} {side}", f"{other} {iteration}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of instances")
    for path in sorted(parser.parse_args().data.glob("*.json")):
        instance = json.loads(path.read_text(encoding="utf-8"))
        problem = read_instance(instance)
        began = time.perf_counter()
        result = solve(problem, Limits())
        seconds = time.perf_counter() - began
        found = "nothing" if result.objective is None else f"{result.objective / 1000:.3f} s"
        print(
            f"{instance['name']}: {found} ({result.status}, bound {result.bound / 1000:.3f} s, best known "
            f"{instance['best_known_seconds']} s) in {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
