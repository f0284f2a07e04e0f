"""A run's directory as a run leaves it, written from a simulation: no rank computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from meshwright.planner.analysis.trace_analysis import step_seconds
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.trace import write_spans

LEARNED = {"score": 1.0, "kl_to_ref": 0.5, "staleness": 0.0, "max_staleness": 0.0, "token_mult_prob_error": 1.5}
"""What every step reports but its rise in reward: one for each step."""


def write_run(plan: Plan, out: Path, *, steps: int) -> None:
    """So many steps of a plan, without an evaluation."""
    out.mkdir(exist_ok=True)
    write_plan(out / "plan.json", plan)
    spans = simulate(plan, steps=steps, traced=True).spans
    first = min(span.step for span in spans)
    seconds = step_seconds(plan.graph, spans)
    write_spans(out / "trace.jsonl", [replace(span, step=span.step - first, clock="measured") for span in spans])
    with (out / "metrics.jsonl").open("a") as file:
        for step, one in enumerate(seconds.values()):
            line = {"step": step, "seconds": one, "tokens_per_second": 100.0, **LEARNED, "score": float(step)}
            file.write(json.dumps(line) + "\n")
