"""The Python API: each function takes and returns frozen documents, and reads or writes a file where one is named.

A user's mistake raises BadInput, whose sentence says what is wrong and what to change. A job that no plan fits gets a
NoPlan, which names the binding limits. Everything else works like the command of the same name. OR-Tools loads with the
first search, torch with the first call that measures, rehearses, runs or exports models.

>>> from meshwright import api

A job becomes the facts that planning needs, and facts become a plan:

>>> job = api.read_job("examples/7b-8xa100-80gb/job.yaml")
>>> facts = api.resolve(job, "examples/7b-8xa100-80gb")
>>> plan = api.plan(facts, limits=api.Limits(gap=0.2))
>>> api.verify(plan)
()
>>> f"{plan.period_seconds:.0f} s a step, proven to be within {plan.solver.gap:.0%} of the best"
'283 s a step, proven to be within 9% of the best'

Documents can be inspected; they are immutable:

>>> str(plan.placement("actor_train").layout)
'tp1,pp4,dp1,vpp4'
>>> shorter = api.with_setting(facts, {"workload.response.fixed": 512})
>>> facts.workload.response.fixed, shorter.workload.response.fixed
(1024, 512)

Where no plan fits, the answer names the binding limits and the changes that would help:

>>> answer = api.plan(api.with_setting(facts, {"cluster.ranks_per_node": 1}))
>>> isinstance(answer, api.NoPlan)
True
>>> print(answer.limits[1].sentence)
critic_train needs 111.6 GiB on a rank in its smallest form (tp1,pp1,dp1), 38.0 GiB more than the 73.6 GiB that the \
device can use.
>>> print(answer.changes[1].sentence)
4 nodes (4 ranks) instead of 1 (1 ranks).

In the examples of the functions, `facts` and `plan` are these.
"""

from meshwright.planner.analysis.calibration import Calibration
from meshwright.planner.analysis.cluster_sizing import Fit
from meshwright.planner.analysis.full_explanation import FullExplanation
from meshwright.planner.analysis.plan_comparison import PlanComparison
from meshwright.planner.analysis.plan_structures import Ranked
from meshwright.planner.analysis.plan_summary import PlanSummary
from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.analysis.sweep import Sweep
from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.document import Proof
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.simulation.simulate import Simulation
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import Exported
from meshwright.planner.trainers.importer import Imported
from meshwright.profiles.errors import BadInput, Infeasible, MeshwrightError, RunFailed
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Run
from meshwright.profiles.uncertainty import Interval
from meshwright.profiles.workload import ObservedLengths
from meshwright.runtime.api.analyses import (
    compare,
    explain,
    fit,
    replan,
    step_interval,
    structures,
    summary,
    whatif,
)
from meshwright.runtime.api.files import (
    read_job,
    read_pins,
    read_plan,
    read_table,
    resolve,
    schema,
    write_plan,
    write_table,
)
from meshwright.runtime.api.job_inputs import agent_workload, first_job, known_hardware, observed_lengths
from meshwright.runtime.api.measurements import calibrate, import_operators, num_missing, profile, try_rewards
from meshwright.runtime.api.planning import plan, with_observed_lengths
from meshwright.runtime.api.reports import fit_plot, plot, report, timeline
from meshwright.runtime.api.run_files import read_run, read_training_curves, watch
from meshwright.runtime.api.runs import export_models, export_scripts, rehearse, replay, run, simulate
from meshwright.runtime.api.sweeps import sweep
from meshwright.runtime.api.trainers import export_plan, import_configuration, plan_for, structures_for
from meshwright.runtime.api.verification import prove, read_proof, verify, write_proof
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.restarts import Stopped
from meshwright.runtime.records.results import BatchReplay, Rehearsal, RewardTrial
from meshwright.runtime.records.run_status import RunStatus

__all__ = [
    "BadInput",
    "BatchReplay",
    "Calibration",
    "Exported",
    "Facts",
    "Fit",
    "FullExplanation",
    "Imported",
    "Infeasible",
    "Interval",
    "Job",
    "Limits",
    "MeshwrightError",
    "NoPlan",
    "ObservedLengths",
    "Plan",
    "PlanComparison",
    "PlanSummary",
    "Proof",
    "Ranked",
    "Rehearsal",
    "Rendezvous",
    "Replanned",
    "RewardTrial",
    "Run",
    "RunFailed",
    "RunStatus",
    "RunSummary",
    "Simulation",
    "Stopped",
    "Sweep",
    "Table",
    "WhatIf",
    "agent_workload",
    "calibrate",
    "compare",
    "explain",
    "export_models",
    "export_plan",
    "export_scripts",
    "first_job",
    "fit",
    "fit_plot",
    "import_configuration",
    "import_operators",
    "known_hardware",
    "num_missing",
    "observed_lengths",
    "plan",
    "plan_for",
    "plot",
    "profile",
    "prove",
    "read_job",
    "read_pins",
    "read_plan",
    "read_proof",
    "read_run",
    "read_table",
    "read_training_curves",
    "rehearse",
    "replan",
    "replay",
    "report",
    "resolve",
    "run",
    "schema",
    "simulate",
    "step_interval",
    "structures",
    "structures_for",
    "summary",
    "sweep",
    "timeline",
    "try_rewards",
    "verify",
    "watch",
    "whatif",
    "with_observed_lengths",
    "with_setting",
    "write_plan",
    "write_proof",
    "write_table",
]
