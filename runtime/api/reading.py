"""Documents in files: jobs, tables and plans, and the traces that runs leave behind."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.analysis.compare import step_ends
from meshwright.planner.environment.measured_latency import from_table
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.job import read_job as job_in
from meshwright.planner.plan.job import resolve as resolved
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.plan import read_plan as plan_in
from meshwright.planner.plan.plan import write_plan as put_plan
from meshwright.planner.proof.document import Proof
from meshwright.planner.proof.document import read_proof as proof_in
from meshwright.planner.proof.document import write_proof as put_proof
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table
from meshwright.profiles.table import read_table as table_in
from meshwright.profiles.table import write_table as put_table
from meshwright.profiles.trace import Run, read_spans
from meshwright.runtime.api.given import Pathname


def read_job(path: Pathname) -> Job:
    """The job in a YAML file. Raises BadInput naming the key and the rule.

    >>> api.read_job("examples/7b-8xa100-80gb/job.yaml").workload.batch_size
    1024
    """
    return job_in(Path(path))


def resolve(job: Job, directory: Pathname = ".", table: Table | None = None) -> Facts:
    """The facts of a job: the shapes of its models, its cluster and its workload, every name looked up.

    The job's relative paths start at `directory`. Where it states no latency of a reward or of its tool, that is what
    the `table` has measured. Raises BadInput for what cannot be looked up.

    >>> api.resolve(api.read_job("examples/7b-8xa100-80gb/job.yaml"), "examples/7b-8xa100-80gb").cluster.num_ranks
    8
    """
    calls = table.calls if table else ()
    return resolved(job.model_copy(update=from_table(job.rewards, job.tool, job.workload, calls)), Path(directory))


def read_plan(path: Pathname) -> Plan:
    """The plan in a JSON file. Raises BadInput for another schema version and for anything malformed.

    It may break rules, which `verify` lists; every other call refuses it then.
    """
    return plan_in(Path(path))


def write_plan(path: Pathname, plan: Plan) -> None:
    """Writes the plan's one canonical text, whole or not at all. Raises BadInput where that cannot be written."""
    put_plan(Path(path), plan)


def read_proof(path: Pathname) -> Proof:
    """The proof in a JSON file; `verify` checks it. Raises BadInput for anything malformed."""
    return proof_in(Path(path))


def write_proof(path: Pathname, proof: Proof) -> None:
    """Writes the proof's one canonical text, whole or not at all. Raises BadInput where that cannot be written."""
    put_proof(Path(path), proof)


def read_table(path: Pathname) -> Table:
    """The table in a JSON file. Raises BadInput for a missing file, a bad number or a missing provenance."""
    return table_in(Path(path))


def write_table(path: Pathname, table: Table) -> None:
    """Writes the table's one canonical text, whole or not at all. Raises BadInput where that cannot be written."""
    put_table(Path(path), table)


def read_run(directory: Pathname, plan: Plan) -> Run:
    """The spans that a run or a rehearsal of this plan left in its directory; the run is named after it.

    Raises BadInput for a directory without a trace, a trace without a whole step, and a run of another plan.
    """
    place = Path(directory)
    path = place / "trace.jsonl"
    if not path.exists():
        what = "holds no trace.jsonl" if place.is_dir() else "is not a directory"
        raise BadInput(f"{place} {what}; give the --out of `meshwright run` or of `meshwright rehearse`.")
    if plan_in(place / "plan.json") != plan:
        raise BadInput(f"{place} is a run of another plan; report the plan.json that it holds.")
    spans = read_spans(path)
    if not step_ends(plan.graph, spans):
        raise BadInput(f"trace {path} has no step that was trained; let the run finish one.")
    return Run(spans=spans, pools={pool.name: pool.ranks for pool in plan.pools}, name=str(place))
