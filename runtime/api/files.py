"""Reading and writing of files: jobs, tables, plans and proofs, and the traces, metrics and status of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.planner.analysis.trace_analysis import step_ends
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.job import read_job as read_job_file
from meshwright.planner.job.job import resolve as resolve_job
from meshwright.planner.job.rewards_and_tools import from_table
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.plan import read_plan as read_plan_file
from meshwright.planner.plan.plan import write_plan as write_plan_file
from meshwright.planner.proof.document import Proof
from meshwright.planner.proof.document import read_proof as read_proof_file
from meshwright.planner.proof.document import write_proof as write_proof_file
from meshwright.planner.report.training_curves import CURVES, HELD_OUT, ShownSample, TrainingCurves
from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import log_files
from meshwright.profiles.table import Table
from meshwright.profiles.table import read_table as read_table_file
from meshwright.profiles.table import write_table as write_table_file
from meshwright.profiles.trace import Run, is_finite_number, read_recent_spans
from meshwright.runtime.api.arguments import Pathname
from meshwright.runtime.records.kept_responses import last_samples
from meshwright.runtime.records.record import evaluations
from meshwright.runtime.records.run_lines import read_lines
from meshwright.runtime.records.run_status import RunStatus, StatusReader

_MAX_SAMPLES = 12
"""Maximum number of responses that a report shows."""


def read_job(path: Pathname) -> Job:
    """The job in a YAML file. Raises BadInput naming the key and the rule.

    >>> api.read_job("examples/7b-8xa100-80gb/job.yaml").workload.batch_size
    1024
    """
    return read_job_file(Path(path))


def resolve(job: Job, directory: Pathname = ".", table: Table | None = None) -> Facts:
    """The facts of a job: the shapes of its models, its cluster and its workload, every name looked up.

    The job's paths are relative to `directory`. Where the job states no latency of a reward or of its tool, the
    one measured in `table` is used. Raises BadInput for a name that cannot be looked up.

    >>> api.resolve(api.read_job("examples/7b-8xa100-80gb/job.yaml"), "examples/7b-8xa100-80gb").cluster.num_ranks
    8
    """
    calls = table.calls if table else ()
    return resolve_job(job.model_copy(update=from_table(job.rewards, job.tool, job.workload, calls)), Path(directory))


def read_plan(path: Pathname) -> Plan:
    """The plan in a JSON file. Raises BadInput for another schema version and for anything malformed.

    It may break rules, which `verify` lists; all other functions of `meshwright.api` refuse such a plan.
    """
    return read_plan_file(Path(path))


def write_plan(path: Pathname, plan: Plan) -> None:
    """Writes the plan's one canonical text, whole or not at all. Raises BadInput where the file cannot be written."""
    write_plan_file(Path(path), plan)


def read_proof(path: Pathname) -> Proof:
    """The proof in a JSON file; `verify` checks it. Raises BadInput for anything malformed."""
    return read_proof_file(Path(path))


def write_proof(path: Pathname, proof: Proof) -> None:
    """Writes the proof's one canonical text, whole or not at all. Raises BadInput where the file cannot be written."""
    write_proof_file(Path(path), proof)


def read_table(path: Pathname) -> Table:
    """The table in a JSON file. Raises BadInput for a missing file, a bad number or a missing provenance."""
    return read_table_file(Path(path))


def write_table(path: Pathname, table: Table) -> None:
    """Writes the table's one canonical text, whole or not at all. Raises BadInput where the file cannot be written."""
    write_table_file(Path(path), table)


def read_run(directory: Pathname, plan: Plan) -> Run:
    """The spans of a run or a rehearsal of this plan, from its directory; the run is named after the directory.

    Of a long run only the spans of the last steps are read.

    Raises BadInput for a directory without a trace, a trace without a whole step, and a run of another plan.
    """
    root = Path(directory)
    path = root / "trace.jsonl"
    if not log_files(path):
        what = "holds no trace.jsonl" if root.is_dir() else "is not a directory"
        raise BadInput(f"{root} {what}; give the --out of `meshwright run` or of `meshwright rehearse`.")
    if read_plan_file(root / "plan.json") != plan:
        raise BadInput(f"{root} is a run of another plan; report the plan.json that it holds.")
    spans = read_recent_spans(path)
    if not step_ends(plan.graph, spans):
        raise BadInput(f"trace {path} has no step that was trained; let the run finish one.")
    pools, first = {pool.name: pool.ranks for pool in plan.pools}, min(span.step for span in spans)
    step_seconds = read_lines(root / "metrics.jsonl", lambda line: (int(line["step"]), float(line["seconds"])))
    return Run(
        spans=spans,
        pools=pools,
        name=str(root),
        step_seconds={step: seconds for step, seconds in step_seconds if step >= first},
    )


def read_learned(directory: Pathname) -> TrainingCurves:
    """The curves of a run and the last responses that it recorded, from its directory; empty for a rehearsal.

    Raises BadInput for malformed lines.
    """
    root = Path(directory)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in (*CURVES, HELD_OUT)}

    def record(line: dict[str, Any]) -> None:
        for name in CURVES:
            if is_finite_number(line.get(name)):
                curves[name].append((line["step"], float(line[name])))

    read_lines(root / "metrics.jsonl", record)
    curves[HELD_OUT] = [(evaluation.step, evaluation.reported_score) for evaluation in evaluations(root)]
    samples = [
        ShownSample(step=sample.step, prompt=sample.prompt, response=sample.response, score=sample.score)
        for sample in last_samples(root, _MAX_SAMPLES)
    ]
    return TrainingCurves(
        run=str(root), curves={name: points for name, points in curves.items() if points}, samples=samples
    )


def watch(directory: Pathname) -> RunStatus:
    """The status of the run in a directory, from the files that it writes; the run itself is not contacted.

    Raises BadInput for a directory that holds no run.
    """
    return StatusReader(Path(directory)).read()
