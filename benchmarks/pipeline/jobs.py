"""The jobs that the pipeline's overlap is measured on, and the model that costs them."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.job.job import Facts, read_job, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"

OPPO = "oppo"

JOBS = ("long-tail-64", "70b-64xh100", OPPO)

STEPS = 20
"""Simulated steps whose mean is reported."""


def facts_of(job: str) -> Facts:
    """The facts of a reference job under examples/, or of the one here."""
    path = Path(__file__).parent / "oppo.yaml" if job == OPPO else EXAMPLES / job / "job.yaml"
    return resolve(read_job(path), path.parent)
