"""Reading and writing of files: jobs, tables, pins and plans; and the schemas of these documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.job import read_job as read_job_file
from meshwright.planner.job.job import resolve as resolve_job
from meshwright.planner.job.rewards_and_tools import from_table
from meshwright.planner.plan.pin_files import read_pins as read_pin_file
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.plan import read_plan as read_plan_file
from meshwright.planner.plan.plan import write_plan as write_plan_file
from meshwright.profiles.documents import Document
from meshwright.profiles.table import Table
from meshwright.profiles.table import read_table as read_table_file
from meshwright.profiles.table import write_table as write_table_file
from meshwright.runtime.api.arguments import Pathname


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


def read_table(path: Pathname) -> Table:
    """The table in a JSON file. Raises BadInput for a missing file, a bad number or a missing provenance."""
    return read_table_file(Path(path))


def write_table(path: Pathname, table: Table) -> None:
    """Writes the table's one canonical text, whole or not at all. Raises BadInput where the file cannot be written."""
    write_table_file(Path(path), table)


def read_pins(path: Pathname, facts: Facts) -> tuple[str, ...]:
    """The pins in a file, for the argument `pins` of `plan`: one a line, or all choices of a plan.

    Raises BadInput for a malformed line, a stage that the facts do not have, and a file without pins.
    """
    return read_pin_file(Path(path), facts.graph)


def schema(document: Literal["job", "plan", "table"]) -> dict[str, Any]:
    """The JSON Schema of a document.

    >>> api.schema("table")["required"]
    ['provenance']
    """
    kinds: dict[str, type[Document]] = {"job": Job, "plan": Plan, "table": Table}
    return kinds[document].model_json_schema()
