"""Training as a plan says, and what is taken away from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.planner.plan.job import Job, read_job
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.program.launch_scripts import slurm_script, torchrun_scripts
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.frameworks import require_own_engine
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, require_number
from meshwright.runtime.execution.early_checks import require_data, require_nodes
from meshwright.runtime.launch.rendezvous import Rendezvous, is_launched_rank
from meshwright.runtime.records.outputs import require_directory
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.stopped import Stopped

_SCRIPTS: Mapping[str, Callable[[Plan, Path, Path], Mapping[str, str]]] = {
    "torchrun": torchrun_scripts,
    "slurm": slurm_script,
}


def run(
    plan: Plan,
    job: Job,
    out: Pathname,
    *,
    steps: int,
    directory: Pathname = ".",
    resume: bool = False,
    draw_again: bool = False,
    checkpoint_every: int = 0,
    checkpoint_minutes: float = 10.0,
    keep: int = 2,
    export_every: int = 0,
    max_restarts: int = 0,
    replan_every: int = 0,
    sample_every: int = 10,
    table: Table | None = None,
    allow_modules: Sequence[str] = (),
    rendezvous: Rendezvous | None = None,
) -> RunSummary | Stopped | None:
    """Trains as the plan says, and compares measured with predicted times.

    `steps` are all of the run, those before a `resume` included, and `directory` is where the job's relative paths
    start. A resume goes on under any plan of the job; with `draw_again` it draws responses again that were under way.
    One that fails is started again from its last checkpoint `max_restarts` times, on the nodes that are left. Every
    `replan_every` steps, 0 is never, a look is taken whether another plan is better from here, under which the run goes
    on where that is earned in the steps that are left. `table` is the one that the plan was made with, if it was.
    Metrics, the trace, some responses of every `sample_every` steps and checkpoints go to `out`. A run that was asked
    to stop, by SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C, is `Stopped`; None comes back on a machine without rank 0. Rewards
    may be built-in functions and those of `allow_modules`. Ranks import the program's main module, which therefore
    needs `if __name__ == "__main__":`; under torchrun this process is one of them.
    Raises BadInput for what can be known to be wrong before anything starts, and RunFailed when a rank fails.
    """
    require_number("steps", steps, least=1)
    require_number("checkpoint_minutes", checkpoint_minutes, least=0)
    require_number("keep", keep, least=1)
    require_number("max_restarts", max_restarts, least=0)
    require_number("replan_every", replan_every, least=0)
    require_number("sample_every", sample_every, least=0)
    place = Path(directory).resolve()
    plan.require_of(job, place)
    if not is_launched_rank(os.environ):
        require_nodes(plan, rendezvous or Rendezvous())
    data = require_data(job, place, allow_modules)
    from meshwright.runtime.execution.request import RunRequest
    from meshwright.runtime.execution.train import run_plan

    request = RunRequest(
        plan=plan,
        job=job,
        directory=place,
        out=Path(out).resolve(),
        steps=steps,
        resume=resume,
        draw_again=draw_again,
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


def export_models(run: Pathname, output: Pathname, *, num_ranks: int = 1) -> tuple[Path, ...]:
    """Writes actor and critic of a run's newest checkpoint as Hugging Face directories, and names them.

    `num_ranks` processes on the CPU hold a part of a model each. Raises BadInput for a directory that holds no
    checkpoint, an `output` that exists, and models that cannot be cut in so many parts.
    """
    require_number("num_ranks", num_ranks, least=1)
    from meshwright.runtime.execution.model_export import export_models as written

    return written(Path(run), Path(output), num_ranks=num_ranks)


def export_scripts(plan: Pathname, job: Pathname, output: Pathname, *, to: str) -> tuple[Path, ...]:
    """Writes the scripts that start a plan on its machines, and names them: `to` torchrun, one per node, or slurm.

    They name the files of plan and job by absolute paths, which every machine must have. Raises BadInput for a plan
    that breaks a rule or is of another job, and for an `output` that exists.
    """
    if to not in _SCRIPTS:
        raise BadInput(f"there are no scripts for {to!r}; {suggestion(to, _SCRIPTS)}")
    plan_path, job_path, target = Path(plan), Path(job), Path(output)
    document = read_plan(plan_path)
    require_valid(document)
    require_own_engine(document.facts.engine)
    document.require_of(read_job(job_path), job_path.resolve().parent)
    if os.path.lexists(target):
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    require_directory("-o", target)
    scripts = _SCRIPTS[to](document, plan_path.resolve(), job_path.resolve())
    target.mkdir(parents=True)
    for name, text in scripts.items():
        write_atomically(target / name, text)
        (target / name).chmod(0o755)
    return tuple(target / name for name in scripts)
