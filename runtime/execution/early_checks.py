"""Checks of a run that need no torch, whose import takes seconds: nodes, ports, modules and data."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.evaluation import prompts_key
from meshwright.planner.job.graph_losses import own_functions
from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput, one_of
from meshwright.runtime.environment.allowed_functions import (
    require_allowed_losses,
    require_allowed_rewards,
    require_allowed_tool,
)
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.rollout.prompts import PromptData, judge_template, read_data


def require_nodes(plan: Plan, rendezvous: Rendezvous) -> None:
    """Raises BadInput if the nodes are not those of the plan, or the port cannot be used."""
    nodes = plan.facts.cluster.nodes
    if rendezvous.nodes != nodes:
        raise BadInput(
            f"--nodes {rendezvous.nodes}: the plan's cluster has {nodes}; give --nodes {nodes}, or plan the job again "
            f"with cluster.nodes: {rendezvous.nodes}."
        )
    require_node_rank(plan, rendezvous)
    rendezvous.check()


def require_node_rank(plan: Plan, rendezvous: Rendezvous) -> None:
    """Raises BadInput for a node rank that the plan does not have."""
    nodes = plan.facts.cluster.nodes
    if rendezvous.node_rank is not None and rendezvous.node_rank >= nodes:
        raise BadInput(f"--node-rank {rendezvous.node_rank} is not a node of the plan; give {one_of(range(nodes))}.")


def require_data(job: Job, directory: Path, allowed_modules: Collection[str]) -> PromptData:
    """Read the data of a job.

    Raises BadInput for data that cannot be read or lacks a column, and for functions of modules that are not allowed.
    Raises BadInput too for a judge whose texts are longer than is planned.
    """
    require_allowed_rewards(job.all_rewards, allowed_modules)  # answers are checked once the data is read
    require_allowed_losses(own_functions(job), allowed_modules)
    if job.tool:
        require_allowed_tool(job.tool, allowed_modules)
    elif job.workload.turns:
        raise BadInput("job: workload.turns has multi-turn rollouts and no tool answers them; give tool.function.")
    data = read_data(job, directory)
    require_allowed_rewards(job.rewards, allowed_modules, without_answers=data.without_answers(job.evaluation))
    for name, one in data.held_out.items():
        own, missing = job.evaluation.own_rewards(name), () if one.has_answers else (prompts_key(name),)
        require_allowed_rewards(own, allowed_modules, without_answers=missing, where=f"evaluation.sets.{name}: ")
    if isinstance(job.algorithm, OwnGraph) and job.algorithm.judge:
        judge_template(job.algorithm.judge, data)
    return data
