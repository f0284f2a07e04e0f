"""Profiles tensor-parallel shards of published shapes here, and scores them by operators that NVIDIA measured.

Each model has a job on eight ranks of the device, so its profile has the shards of every tp that divides it: 1, 2, 4
and 8 of Llama-3.1-8B, 1 and 2 of the Qwen2.5 models, which have two heads of keys and values. The same points are then
added up from the operators that `aiconfigurator-core` carries for the device.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable

from benchmarks.accelerator.jobs import write_profile_job
from benchmarks.accelerator.world import World
from benchmarks.fidelity.score import Answer, Bar, Score
from meshwright.cost_models.imported_operators import BODIES, imported_table
from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.aiconfigurator import has_operators, read_operators
from meshwright.profiles.hardware import Cluster, require_uniform
from meshwright.profiles.table import Table, TimedPass
from meshwright.runtime.profiling.profiling import num_missing, profile_job

_TINY_MINUTES = 0.02


def report(world: World, name: str, minutes: float) -> str:
    """Profiles a model for so many minutes; as a table of Markdown. The profile is `OUT/profiles/<model>.json`."""
    facts = resolve(
        read_job(write_profile_job(world.directory(f"profiles/{name}"), world, name)), world.out / "profiles" / name
    )
    path = world.out / "profiles" / f"{name}.json"
    table = profile_job(facts, path, minutes=_TINY_MINUTES if world.tiny else minutes)
    measured = sum(1 for one in table.measurements if one.seconds)
    heads = sorted({one.point.shape.num_heads for one in table.measurements})
    told = f"{path}: {measured} bodies of shards of {', '.join(map(str, heads))} heads measured, "
    told += f"{num_missing(facts, table)} measurements missing.\n"
    if not has_operators(world.device):
        return told + f"\nNo operators of {world.device} that others measured can be read here."
    cluster = require_uniform(facts.cluster, "compare")
    lines = ["\n| pass | points | median error | mean | 90th percentile | bias |", "|---|---|---|---|---|---|"]
    for score in against(table, _added_up(table, cluster, facts.precision)):
        errors = f"{score.median:.1%} | {score.mean:.1%} | {score.p90:.1%} | {score.bias:+.1%}"
        lines.append(f"| {score.name} | {score.used} | {errors} |")
    return told + "\n".join(lines)


def _added_up(table: Table, cluster: Cluster, precision: str) -> Table:
    """The table's points from the operators of its device."""
    wanted = [measurement.point for measurement in table.measurements if measurement.point.timed_pass in BODIES]
    operators, date = read_operators(cluster.device.name), datetime.date.today().isoformat()
    return imported_table(operators, wanted, cluster, precision, date)


def against(measured: Table, added_up: Table) -> Iterable[Score]:
    """The second table's times as predictions of the first's, point by point where both have one, for each pass."""
    predicted = {m.point: m.seconds for m in added_up.measurements if m.seconds}
    for timed_pass in (*BODIES, None):
        answers = tuple(
            Answer(label=str(m.point), measured=m.seconds, predicted=seconds)
            for m in measured.measurements
            if timed_pass in (None, m.point.timed_pass) and m.seconds and (seconds := predicted.get(m.point))
        )
        yield Score(name=_name(timed_pass), bar=Bar(), answers=answers, skipped=Counter())


def _name(timed_pass: TimedPass | None) -> str:
    return timed_pass.value if timed_pass else "all"
