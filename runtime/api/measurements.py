"""Measured tables: timed on this machine, corrected by a run, or composed of operators that NVIDIA measured
(aiconfigurator).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cost_models.imported_operators import imported_points, imported_table
from meshwright.planner.analysis.calibration import Calibration, read_run, seconds_at_observed_lengths
from meshwright.planner.analysis.calibration import calibrate as calibrated
from meshwright.planner.job.engine_limits import engine_violations, engines_of
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.sections import ClusterSpec
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.profiles.aiconfigurator import PACKAGE, PRECISION, SYSTEMS, device_of, read_configs, read_operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.environment.latency import TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import NOT_RUN, EngineName
from meshwright.profiles.hardware import Cluster, require_uniform
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Point, Table
from meshwright.profiles.workload import Workload
from meshwright.runtime.api.arguments import Pathname, require_number, require_run_packages
from meshwright.runtime.records.results import RewardTrial

if TYPE_CHECKING:
    from meshwright.runtime.profiling.engine_benchmarks import TimedEngine

_SHARE_OF_CALLS = 0.1
"""The fraction of the measuring time that is spent on calls of rewards and tools."""


def profile(
    facts: Facts,
    output: Pathname,
    *,
    minutes: float = 2.0,
    device: str | None = None,
    fresh: bool = False,
    job: Job | None = None,
    directory: Pathname = ".",
    allow_modules: Sequence[str] = (),
) -> Table:
    """Time the job's kernel passes and collectives on this machine for about `minutes`; return and write the table.

    With the `job` of the facts, whose paths are relative to `directory`, calls of its rewards and its tool are timed
    first where it states no latency; functions may be built-in ones and those of `allow_modules`. vLLM is timed last,
    for as long again, if the job names its environment and may generate with it.

    An interrupted profile is resumed by the next call, unless that has `fresh`; `num_missing` counts the remaining
    measurements. `device` is cpu or cuda, by default that of the job's cluster. Profiling starts processes that import
    the program's main module, which therefore needs `if __name__ == "__main__":`.
    Raises BadInput when this machine is not one of the cluster's, when `output` was measured under other conditions,
    and when a reward or the tool does not answer.
    """
    require_number("minutes", minutes, minimum=0)
    require_run_packages("profile")
    from meshwright.runtime.profiling.call_benchmarks import time_calls
    from meshwright.runtime.profiling.profiling import profile_job

    def calls(known: Sequence[TimedCalls]) -> Sequence[TimedCalls]:
        if job is None:
            return ()
        seconds = 60 * minutes * _SHARE_OF_CALLS
        return time_calls(job, Path(directory), known, seconds=seconds, allowed=allow_modules)

    engines = _timed_engines(job, facts, Path(directory), Path(output)) if job else ()
    return profile_job(
        facts, Path(output), minutes=minutes, kind=device, fresh=fresh, time_calls=calls, engines=engines
    )


def num_missing(facts: Facts, table: Table, job: Job | None = None) -> int:
    """The number of measurements of the job's shapes that a table of this machine lacks, because `minutes` ran out.

    With the `job` of the facts, those of the engines that it names count too.
    """
    require_run_packages("profile")
    from meshwright.runtime.profiling.profiling import num_missing as missing

    return missing(facts, table, _engines_to_time(job, facts) if job else ())


def _engines_to_time(job: Job, facts: Facts) -> tuple[EngineName, ...]:
    """Return the engines in processes of their own that the job may generate with and names, and that `run` starts."""
    return tuple(
        engine
        for engine in engines_of(job, facts)
        if engine in job.engines.named
        and engine not in NOT_RUN
        and not any(engine_violations(facts.model_copy(update={"engine": engine})))
    )


def _timed_engines(job: Job, facts: Facts, directory: Path, output: Path) -> tuple[TimedEngine, ...]:
    """Return what is needed to start the engines that are timed. Raises BadInput for an environment without one."""
    from meshwright.runtime.profiling.engine_benchmarks import TimedEngine
    from meshwright.runtime.rollout.external_engine import interpreter_of, require_version

    engines = _engines_to_time(job, facts)
    for engine in engines:
        require_version(engine, interpreter_of(engine, job, directory))
    return tuple(
        TimedEngine(
            name=engine,
            python=interpreter_of(engine, job, directory),
            model=(directory / job.models.source(Role.ACTOR).path).resolve(),
            top_k=job.settings.top_k,
            top_p=job.settings.top_p,
            log=output.resolve().with_name(f"{output.stem}.{engine}"),
        )
        for engine in engines
    )


def calibrate(plan: Plan, run: Pathname, table: Table | None = None) -> Calibration:
    """Correct a table by the times that a run of this plan measured; its measurements stay, and corrections are added.

    `run` is the directory of the run, and `table` the one that the plan was made with, if any.
    Raises BadInput for a plan that breaks a rule, a run of another plan and a trace that was not measured.
    """
    require_valid(plan)
    return calibrated(plan, read_run(plan, Path(run)), table, date=datetime.date.today().isoformat())


def predict_at_observed_lengths(plan: Plan, run: Pathname, table: Table | None = None) -> dict[str, float]:
    """The predicted seconds of each stage, of all refits and of the step at the lengths of a run of this plan.

    `run` is the directory of the run, and `table` the one that the plan was made with, if any.
    Raises BadInput for a run of another plan, and for a plan or a trace that `calibrate` refuses.
    """
    return seconds_at_observed_lengths(plan, read_run(plan, Path(run)), table)


_BATCH_SIZE = 256
"""The batch size of a table that is for no particular job; no point of the grid has more rows."""
_LENGTHS = ((16, 128), (128, 1024), (1024, 8192))
"""Tokens of prompts and of responses, as (shortest, longest), of a table that is for no particular job."""


def try_rewards(
    job: Job, directory: Pathname = ".", *, num_prompts: int = 10, allow_modules: Sequence[str] = ()
) -> RewardTrial:
    """The scores that a job's rewards give to made-up responses, before anything starts.

    The responses are the reference answers of the first `num_prompts` prompts of its data, and the prompts themselves.
    The job's paths are relative to `directory`; functions may be built-in ones and those of `allow_modules`. A call
    that fails is recorded and not retried. Raises BadInput for a job without rewards or data, and for a function of a
    module that is not allowed.
    """
    require_number("num_prompts", num_prompts, minimum=1)
    require_run_packages("reward try")
    from meshwright.runtime.profiling.reward_trial import try_rewards as score_made_up_responses

    return score_made_up_responses(job, Path(directory), num_prompts=num_prompts, allowed=allow_modules)


def import_operators(facts: Facts | None = None, *, device: str | None = None) -> Table:
    """The table of a job's shapes or, without a job, of the dense models that `aiconfigurator-core` names.

    It has the seconds of forward, prefill and decode passes, composed of operators that NVIDIA measured, and none of
    training. Raises BadInput for a device that the package lacks or that is not the job's, for a job in another
    precision than the operators', and where the package is not installed.
    """
    points, cluster, precision = _points_of_job(facts, device) if facts else _points_of_known_models(device)
    operators = read_operators(cluster.device.name)
    return imported_table(operators, points, cluster, precision, datetime.date.today().isoformat())


def _points_of_job(facts: Facts, device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    cluster = require_uniform(facts.cluster, "profile --from aiconfigurator")
    name = cluster.device.name
    if device is not None and device_of(device) != name:
        raise BadInput(f"--device {device!r}: the job's cluster has {name!r}; leave --device out, or change the job.")
    if name not in SYSTEMS:
        raise BadInput(f"{PACKAGE} has no operators of the job's device {name!r}; it has {', '.join(SYSTEMS)}.")
    specs = {role: facts.models.spec(role) for role in facts.graph.roles}
    return imported_points(facts.graph, [specs], [facts.workload], cluster), cluster, facts.precision


def _points_of_known_models(device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    if device is None:
        raise BadInput(f"name a job, or a device with --device: {', '.join(SYSTEMS.values())}.")
    cluster = ClusterSpec(device=device_of(device)).resolve()
    models = [specs for name, config in read_configs().items() if (specs := _both_heads(name, config))]
    workloads = [_workload(*lengths) for lengths in _LENGTHS]
    return imported_points(PPO_GRAPH, models, workloads, cluster), cluster, PRECISION


def _both_heads(name: str, config: Mapping[str, object]) -> dict[Role, ModelSpec]:
    """The model with a vocabulary head and with a scalar head; empty for one that is not a dense decoder."""
    heads = {Role.ACTOR: False, Role.REWARD: True}
    try:
        return {role: model_from_config(config, name=name, scalar_head=head) for role, head in heads.items()}
    except BadInput:
        return {}


def _workload(shortest: int, longest: int) -> Workload:
    lengths = LengthSpec(max=longest, histogram=((shortest, 1.0), (longest, 1.0)))
    return Workload(batch_size=_BATCH_SIZE, prompt=lengths, response=lengths)
