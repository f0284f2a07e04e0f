"""Runs of a plan: simulated in virtual time, rehearsed on real processes that wait, and real training runs.

Also the replay of a batch that a run skipped, and the export of a run's models and of launch scripts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from meshwright.planner.job.job import Job, read_job
from meshwright.planner.job.model_paths import with_model_paths
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.program.durations import Durations, Planned
from meshwright.planner.program.jobset_script import jobset_script
from meshwright.planner.program.launch_scripts import LaunchPaths, slurm_script, torchrun_scripts
from meshwright.planner.program.ray_script import ray_script
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import Simulation
from meshwright.planner.simulation.simulate import simulate as simulation
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.frameworks import require_run_engine
from meshwright.profiles.table import Table
from meshwright.profiles.trace import write_spans
from meshwright.runtime.api.arguments import Pathname, cost_model_builder, require_number, require_run_packages
from meshwright.runtime.launch.rendezvous import Rendezvous, is_launched_rank
from meshwright.runtime.records.outputs import require_directory
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.restarts import Stopped
from meshwright.runtime.records.results import BatchReplay, Rehearsal

_MAX_SEED = 2**32 - 1
_MIN_SPEED = 1e-6


def simulate(
    plan: Plan,
    table: Table | None = None,
    *,
    steps: int = 20,
    seed: int = 0,
    sampled: bool = True,
    traced: bool = False,
) -> Simulation:
    """Run the plan's program in virtual time: how long steps take, and what every rank waits for.

    Response lengths are sampled for each step; with `sampled=False` every step takes the time that the plan predicts.
    With `traced=True` the simulation keeps its spans, which `api.report` and `api.timeline` draw.
    Raises BadInput for a plan that breaks a rule.

    >>> simulation = api.simulate(plan, steps=2, sampled=False)
    >>> [f"{seconds:.1f} s" for seconds in simulation.steps.seconds]
    ['283.4 s', '283.4 s']
    """
    require_valid(plan)
    require_number("steps", steps, minimum=1)
    return simulation(plan, _durations(plan, table, seed=seed, sampled=sampled), steps=steps, traced=traced)


def rehearse(
    plan: Plan,
    table: Table | None = None,
    *,
    steps: int = 3,
    speed: float | None = None,
    seed: int = 0,
    ranks_per_process: int | None = None,
    sampled: bool = False,
    out: Pathname | None = None,
) -> Rehearsal:
    """Run the plan with real processes and messages that wait where a device would compute.

    A wait is the predicted seconds times `speed`, whose default is large enough for waits to dominate; reported times
    are in the plan's seconds. The processes import the program's main module, which therefore needs
    `if __name__ == "__main__":`. Into `out`, a new directory, go the plan and the trace, which `read_run` reads.
    Raises BadInput for a plan that breaks a rule or has too many ranks for one machine and for an `out` that holds
    files, and RunFailed when one fails.
    """
    require_valid(plan)
    if out is not None:
        _require_new(Path(out))
    require_number("steps", steps, minimum=1)
    require_number("speed", speed, minimum=_MIN_SPEED, maximum=1 / _MIN_SPEED)
    require_number("ranks_per_process", ranks_per_process, minimum=1)
    require_run_packages("rehearse")
    from meshwright.runtime.execution.rehearse import rehearse as rehearsal

    durations = _durations(plan, table, seed=seed, sampled=sampled)
    result = rehearsal(plan, durations, steps=steps, speed=speed, seed=seed, ranks_per_process=ranks_per_process)
    if out is not None:
        write_plan(Path(out) / "plan.json", plan)
        write_spans(Path(out) / "trace.jsonl", result.spans)
    return result


def _require_new(directory: Path) -> None:
    """Raises BadInput for a directory that is not empty or cannot be made."""
    require_directory("--out", directory)
    if directory.exists() and any(directory.iterdir()):
        contents = "the trace of a run" if (directory / "trace.jsonl").exists() else "files"
        raise BadInput(f"--out {directory} holds {contents}, and nothing is overwritten; name a new directory.")


def _durations(plan: Plan, table: Table | None, *, seed: int, sampled: bool) -> Durations:
    require_number("seed", seed, minimum=0, maximum=_MAX_SEED)
    return Sampled(plan, cost_model_builder(table), seed=seed) if sampled else Planned(plan)


_SCRIPTS: Mapping[str, Callable[[Plan, LaunchPaths], Mapping[str, str]]] = {
    "torchrun": torchrun_scripts,
    "slurm": slurm_script,
    "k8s": jobset_script,
    "ray": ray_script,
}


def run(
    plan: Plan,
    job: Job,
    out: Pathname,
    *,
    steps: int,
    directory: Pathname = ".",
    resume: bool = False,
    resample: bool = False,
    checkpoint_every: int = 0,
    checkpoint_minutes: float = 10.0,
    keep: int = 2,
    export_every: int = 0,
    max_restarts: int = 0,
    replan_every: int = 0,
    sample_every: int = 10,
    table: Table | None = None,
    models: Mapping[str, Pathname] = MappingProxyType({}),
    allow_modules: Sequence[str] = (),
    rendezvous: Rendezvous | None = None,
) -> RunSummary | Stopped | None:
    """Train with the plan, and compare measured with predicted times.

    `steps` is the total of the run, including those before a `resume`; the job's paths are relative to `directory`, and
    `models` are directories, by role, of models that are elsewhere on this machine. A resumed run continues under any
    plan of the job; with `resample` it samples the responses in flight anew. A run that fails is restarted from its
    last checkpoint up to `max_restarts` times, on the remaining nodes. Every `replan_every` steps (0 is never) it
    searches for a better plan, and continues under it where the time of switching is repaid in the remaining steps.
    `table` is the one that the plan was made with, if any. Metrics, the trace, checkpoints and, every `sample_every`
    steps, some responses are written to `out`. A run that was stopped by SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C returns
    `Stopped`; a machine without rank 0 returns None. Rewards may be built-in functions and those of `allow_modules`.
    Ranks import the program's main module, which therefore needs `if __name__ == "__main__":`; under torchrun this
    process is one of them. Raises BadInput for a mistake that is found before anything starts, and RunFailed when a
    rank fails.
    """
    require_number("steps", steps, minimum=1)
    require_number("checkpoint_minutes", checkpoint_minutes, minimum=0)
    require_number("keep", keep, minimum=1)
    require_number("max_restarts", max_restarts, minimum=0)
    require_number("replan_every", replan_every, minimum=0)
    require_number("sample_every", sample_every, minimum=0)
    if resample and not resume:
        raise BadInput("--resample samples the responses in flight of a resumed run again; give --resume too.")
    job_directory = Path(directory).resolve()
    job = with_model_paths(job, models, job_directory)
    plan.require_made_for(job, job_directory)
    require_run_packages("run")
    from meshwright.runtime.execution.early_checks import require_data, require_nodes

    if not is_launched_rank(os.environ):
        require_nodes(plan, rendezvous or Rendezvous())
    data = require_data(job, job_directory, allow_modules)
    from meshwright.runtime.execution.request import RunRequest
    from meshwright.runtime.execution.train import run_plan

    request = RunRequest(
        plan=plan,
        job=job,
        directory=job_directory,
        out=Path(os.path.realpath(out)),  # unlike resolve, it raises nothing for circular links
        steps=steps,
        resume=resume,
        resample=resample,
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        keep=keep,
        export_every=export_every,
        max_restarts=max_restarts,
        replan_every=replan_every,
        sample_every=sample_every,
        table=table,
        allowed_modules=tuple(allow_modules),
    )
    return run_plan(request, rendezvous, data)


def export_models(
    run: Pathname, output: Pathname, *, num_ranks: int = 1, models: Mapping[str, Pathname] = MappingProxyType({})
) -> tuple[Path, ...]:
    """Write actor and critic of a run's newest checkpoint as Hugging Face directories; return their paths.

    `num_ranks` CPU processes each hold a shard of a model. `models` are directories, by role, that have moved since
    the run. Raises BadInput for a directory without a checkpoint, an `output` that exists, models that cannot be
    sharded over that many ranks, and a directory whose model has another shape.
    """
    require_number("num_ranks", num_ranks, minimum=1)
    require_run_packages("export --to hf")
    from meshwright.runtime.execution.model_export import export_models as written

    return written(Path(run), Path(output), num_ranks=num_ranks, models=models)


def export_scripts(
    plan: Pathname, job: Pathname, output: Pathname, *, to: str, models: Mapping[str, Pathname] = MappingProxyType({})
) -> tuple[Path, ...]:
    """Write the launch scripts of a plan, for torchrun (one per node), slurm, k8s or ray; return their paths.

    They name the files of plan and job by variables at their head, whose defaults are the paths as given where those
    are relative, and the files' names otherwise. `models` are directories, by role, on the machines that run the plan.
    Raises BadInput for a plan that breaks a rule or is of another job, and for an `output` that exists.
    """
    if to not in _SCRIPTS:
        raise BadInput(f"there are no scripts for {to!r}; {suggestion(to, _SCRIPTS)}")
    plan_path, job_path, target = Path(plan), Path(job), Path(output)
    document, job_document = read_plan(plan_path), read_job(job_path)
    require_valid(document)
    require_run_engine(document.facts.engine)
    document.require_made_for(job_document, job_path.resolve().parent)
    with_model_paths(job_document, models, job_path.resolve().parent)  # refuses a role that the job does not have
    if os.path.lexists(target):
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    require_directory("-o", target)
    scripts = _SCRIPTS[to](document, LaunchPaths(plan=plan_path, job=job_path, models=models))
    target.mkdir(parents=True)
    for name, text in scripts.items():
        write_atomically(target / name, text)
        (target / name).chmod(0o755)
    return tuple(target / name for name in scripts)


def replay(batch: Pathname) -> BatchReplay:
    """Train again on a batch that a run skipped, and report the rows that are not finite.

    The weights are those of the run's newest checkpoint before that batch. Nothing in the run changes. Raises BadInput
    for a file that is not such a batch, or that is not in the directory of its run.
    """
    require_run_packages("replay")
    from meshwright.runtime.execution.replay import replay_batch

    return replay_batch(Path(batch))
