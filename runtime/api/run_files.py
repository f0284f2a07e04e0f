"""The files of a run, read from its directory; a path is a text or a `Path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.planner.analysis.trace_analysis import step_ends
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.plan import read_plan as read_plan_file
from meshwright.planner.report.training_curves import CURVES, HELD_OUT, ShownSample, TrainingCurves
from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import log_files
from meshwright.profiles.trace import Run, is_finite_number, read_recent_spans
from meshwright.runtime.api.arguments import Pathname
from meshwright.runtime.records.kept_responses import last_samples
from meshwright.runtime.records.record import evaluations
from meshwright.runtime.records.run_lines import read_lines
from meshwright.runtime.records.run_status import RunStatus, StatusReader

_MAX_SAMPLES = 12
"""Maximum number of responses that a report shows."""


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


def read_training_curves(directory: Pathname) -> TrainingCurves:
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
    for evaluation in evaluations(root):
        name = f"{evaluation.title} reward"
        curves.setdefault(name, []).append((evaluation.step, evaluation.reported_score))
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
