"""The request for a run, and the checks that it passes before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.analysis.calibration import require_calibratable
from meshwright.planner.job.graph_losses import own_graph_violations
from meshwright.planner.job.job import Job
from meshwright.planner.job.model_paths import without_model_paths
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.program.check_program import require_sound
from meshwright.planner.program.program import Program, lower, split_waves
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import require_run_engine
from meshwright.profiles.model_shape import run_violations
from meshwright.profiles.table import Table
from meshwright.runtime.device import host
from meshwright.runtime.execution.early_checks import require_data, require_node_rank
from meshwright.runtime.execution.resume import changes, latest_step
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.launch.torchrun import LaunchedRank
from meshwright.runtime.model.weight_check import require_weights
from meshwright.runtime.records.outputs import require_directory
from meshwright.runtime.records.run_directory import RunFile, read_run_file, require_unlocked
from meshwright.runtime.records.run_lines import completed_steps
from meshwright.runtime.rollout.external_engine import require_engine
from meshwright.runtime.rollout.prompts import PromptData
from meshwright.runtime.training.own_losses import require_own_functions


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The plan and job to run, and where to write; relative paths of the job start at `directory`."""

    plan: Plan
    job: Job
    directory: Path
    out: Path
    steps: int
    resume: bool = False
    resample: bool = False
    """True if a resumed run samples responses in flight again instead of continuing them."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 turns this off."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; 0 turns this off."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best by held-out reward."""
    export_every: int = 0
    """Steps between exports of the trained models as Hugging Face directories; 0 turns this off."""
    max_restarts: int = 0
    """Maximum number of restarts from the last checkpoint after failures."""
    restarts: int = 0
    """Restarts so far, after failures and for other plans."""
    replan_every: int = 0
    """Steps between searches for a better plan; 0 turns this off."""
    sample_every: int = 10
    """The first responses of one step in this many are kept as text; 0 turns this off."""
    table: Table | None = None
    """The measured table that the plan was made with, if any; used for re-planning."""
    launch_time: float = 0.0
    """Time of this machine's `time.monotonic` at which the processes were launched."""
    allowed_modules: tuple[str, ...] = ()
    """Modules whose functions may be rewards or the tool."""

    def run_file(self, data: PromptData) -> RunFile:
        """Return the record of the request for the directory of the run, given its prompts."""
        return RunFile(job=self.job, directory=str(self.directory.resolve()), prompts=data.digest)

    @property
    def digest(self) -> str:
        """Digest of everything that must be equal on all nodes; the paths of models and outputs are left out."""
        options = (
            f"{self.steps} {self.resume} {self.checkpoint_every} {self.checkpoint_minutes} {self.keep} "
            f"{self.export_every} {self.resample} {self.max_restarts} {self.allowed_modules} "
            f"{self.replan_every} {self.table and digest(self.table)}"
        )
        return " ".join((digest(self.plan), digest(without_model_paths(self.job)), options))


def check(request: RunRequest, rendezvous: Rendezvous, data: PromptData | None = None) -> None:
    """Check a request before anything starts, and create the directory of the run.

    `data` is the job's if it has been read already. Raises BadInput for whatever is wrong.
    """
    plan, cluster = request.plan, request.plan.facts.cluster
    require_run_engine(plan.facts.engine)
    for placement in plan.placements:
        require_none(
            run_violations(plan.facts.models.spec(plan.stage(placement.stage).role)), f"plan: {placement.stage}"
        )
    require_valid(plan)
    require_sound(lower(plan), plan.graph)
    if waves := split_waves(lower(plan), plan).waves:
        require_sound(Program((*waves.instructions, *waves.exchange)), plan.graph)
    plan.require_made_for(request.job, request.directory)
    require_engine(plan, request.job, request.directory)
    require_none(own_graph_violations(request.job), "job")
    if request.replan_every:
        _require_replannable(request)
    require_node_rank(plan, rendezvous)
    if cluster.kind == "cuda" and host.num_cuda_devices() < cluster.ranks_per_node:
        raise BadInput(
            f"the plan uses {cluster.ranks_per_node} CUDA devices per node and this machine has "
            f"{host.num_cuda_devices()}; run it on such a machine, or plan the job for `cluster: local`."
        )
    require_weights(plan, request.job, request.directory)
    require_directory("--out", request.out)
    require_unlocked(request.out)
    _check_resume(request, data)
    require_own_functions(request.job)
    request.out.mkdir(parents=True, exist_ok=True)


def _require_replannable(request: RunRequest) -> None:
    """Raise BadInput for a plan whose run cannot measure what re-planning needs."""
    try:
        require_calibratable(request.plan, request.table)
    except BadInput as error:
        raise BadInput(f"--replan-every needs stage times that the run measures: {error}") from None


def _check_resume(request: RunRequest, data: PromptData | None) -> None:
    """Raise BadInput for unreadable data, and for a directory that does not fit `--resume`, or its absence."""
    data = data or require_data(request.job, request.directory, request.allowed_modules)
    done = latest_step(request.out)
    if done is not None and not request.resume:
        raise BadInput(
            f"{request.out} holds a run of {done} steps; continue it with --resume or name another directory."
        )
    if request.resume and done is None:
        raise BadInput(f"{request.out} holds no checkpoint to resume from; run without --resume.")
    if done is not None and (done > request.steps or (done == request.steps == completed_steps(request.out))):
        raise BadInput(f"--steps {request.steps}: the run in {request.out} has {done} already; give a larger number.")
    if done is not None:
        changes(read_run_file(request.out), request.run_file(data))


def check_launched_rank(request: RunRequest, rendezvous: Rendezvous, launched_rank: LaunchedRank) -> None:
    """Check a request in a process that torchrun started. Raises BadInput if its nodes and ranks are not the plan's."""
    launched_rank.require(request.plan.facts.cluster.nodes, request.plan.facts.cluster.ranks_per_node)
    if rendezvous != Rendezvous(node_rank=rendezvous.node_rank, token=rendezvous.token):
        raise BadInput("torchrun has joined the nodes already; leave out --nodes and --rendezvous.")
    if request.replan_every:
        raise BadInput(
            f"--replan-every {request.replan_every}: torchrun restarts ranks only if one fails, and not under "
            "another plan; start the run with `meshwright run`, or leave the option out."
        )
    check(request, rendezvous)
