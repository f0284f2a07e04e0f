"""A run that is asked for, and all that can be known to be wrong with it before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.analysis.correct_table import require_telling
from meshwright.planner.plan.job import SETTINGS_KEYS, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.program.check_program import require_sound
from meshwright.planner.program.in_waves import in_waves
from meshwright.planner.program.program import Program, lower
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import require_own_engine
from meshwright.profiles.model_parts.planned_only import planned_only
from meshwright.profiles.table import Table
from meshwright.runtime.device import host
from meshwright.runtime.execution.early_checks import require_data, require_node_rank
from meshwright.runtime.execution.resume import latest_step
from meshwright.runtime.execution.resume_rules import changes
from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.launch.joining import Seat
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.model.model_check import require_weights
from meshwright.runtime.records.lock import require_free
from meshwright.runtime.records.outputs import require_directory
from meshwright.runtime.records.run_file import RunFile, read_run_file
from meshwright.runtime.records.run_lines import ended_after


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run and where to write; `directory` is where the job's relative paths start."""

    plan: Plan
    job: Job
    directory: Path
    out: Path
    steps: int
    resume: bool = False
    draw_again: bool = False
    """Whether a resume draws responses again that were under way, instead of going on with them."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 is none by steps."""
    checkpoint_minutes: float = 10.0
    """Between checkpoints; 0 is none by time."""
    keep: int = 2
    """Checkpoints that stay, beside the best by held-out reward."""
    export_every: int = 0
    """Steps between Hugging Face directories of the trained models; 0 is none."""
    max_restarts: int = 0
    """Times that the run is started again from its last checkpoint when it fails."""
    restarts: int = 0
    """Times that it was, and that it went on under another plan."""
    replan_every: int = 0
    """Steps between looks at whether another plan is better from here; 0 is none."""
    sample_every: int = 10
    """Steps between those of which some responses are kept as texts; 0 is none."""
    table: Table | None = None
    """That the plan was made with, if it was made with one; asked where it is planned again."""
    launched: float = 0.0
    """When its processes were, in seconds of this machine's `time.monotonic`."""
    allowed_modules: tuple[str, ...] = ()
    """Whose functions may be rewards or the tool."""

    def asked(self, data: PromptData) -> RunFile:
        """What is kept of it in the directory of the run, given its prompts."""
        return RunFile(job=self.job, directory=str(self.directory.resolve()), prompts=data.digest)

    @property
    def digest(self) -> str:
        """Of what all nodes must agree on, wherever their files are."""
        options = (
            f"{self.steps} {self.resume} {self.checkpoint_every} {self.checkpoint_minutes} {self.keep} "
            f"{self.export_every} {self.draw_again} {self.max_restarts} {self.allowed_modules} "
            f"{self.replan_every} {self.table and digest(self.table)}"
        )
        return " ".join((digest(self.plan), digest(self.job), options))


def check(request: RunRequest, rendezvous: Rendezvous, data: PromptData | None = None) -> None:
    """Raises BadInput for what is wrong before anything starts; leaves the directory of the run behind. `data` are the
    job's, where they have been read."""
    plan, cluster = request.plan, request.plan.facts.cluster
    require_own_engine(plan.facts.engine)
    for placement in plan.placements:
        require_none(planned_only(plan.facts.models.spec(plan.stage(placement.stage).role)), f"plan: {placement.stage}")
    require_valid(plan)
    require_sound(lower(plan), plan.graph)
    if waves := in_waves(lower(plan), plan).waves:
        require_sound(Program(waves.instructions), plan.graph)
    plan.require_of(request.job, request.directory)
    _require_known_losses(request.job)
    if request.replan_every:
        _require_telling(request)
    require_node_rank(plan, rendezvous)
    if cluster.kind == "cuda" and host.num_cuda_devices() < cluster.ranks_per_node:
        raise BadInput(
            f"the plan uses {cluster.ranks_per_node} CUDA devices per node and this machine has "
            f"{host.num_cuda_devices()}; run it on such a machine, or plan the job for `cluster: local`."
        )
    require_weights(plan, request.job, request.directory)
    require_directory("--out", request.out)
    require_free(request.out)
    _check_resume(request, data)
    request.out.mkdir(parents=True, exist_ok=True)


def _require_telling(request: RunRequest) -> None:
    """Raises BadInput for a plan that cannot be planned again from what its run shows."""
    try:
        require_telling(request.plan, request.table)
    except BadInput as error:
        raise BadInput(f"--replan-every asks the run how long stages take: {error}") from None


def _require_known_losses(job: Job) -> None:
    """Raises BadInput for a graph of the job's own that no preset has: a graph says what a stage reads and writes, and
    not what it computes."""
    if job.preset is None and job.presets:
        raise BadInput(
            f"job: algorithm is the job's own graph, which {' and '.join(job.presets)} have alike; give the settings "
            f"of one of them, as {SETTINGS_KEYS[job.presets[0]]}: {{}}, or its name as the algorithm."
        )
    if job.preset is None:
        raise BadInput(
            "job: algorithm is the job's own graph, which no preset has, and run knows what the stages of presets "
            "compute; plan, simulate and rehearse it, or name a preset."
        )


def _check_resume(request: RunRequest, data: PromptData | None) -> None:
    """Raises BadInput for data that cannot be read, and unless the directory holds what is to be continued, if anything
    is."""
    data = data or require_data(request.job, request.directory, request.allowed_modules)
    done = latest_step(request.out)
    if done is not None and not request.resume:
        raise BadInput(
            f"{request.out} holds a run of {done} steps; continue it with --resume or name another directory."
        )
    if request.resume and done is None:
        raise BadInput(f"{request.out} holds no checkpoint to resume from; run without --resume.")
    if done is not None and (done > request.steps or (done == request.steps == ended_after(request.out))):
        raise BadInput(f"--steps {request.steps}: the run in {request.out} has {done} already; ask for more.")
    if done is not None:
        changes(read_run_file(request.out), request.asked(data))


def check_seat(request: RunRequest, rendezvous: Rendezvous, seat: Seat) -> None:
    """Raises BadInput unless torchrun has started what the plan wants."""
    seat.require(request.plan.facts.cluster.nodes, request.plan.facts.cluster.ranks_per_node)
    if rendezvous != Rendezvous(node_rank=rendezvous.node_rank, token=rendezvous.token):
        raise BadInput("torchrun has joined the nodes already; leave --nodes and --rendezvous to it.")
    if request.replan_every:
        raise BadInput(
            f"--replan-every {request.replan_every}: torchrun starts ranks again only where one fails, and not under "
            "another plan; start the run by `meshwright run`, or without it."
        )
    check(request, rendezvous)
