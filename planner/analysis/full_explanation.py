"""The combined result of all analyses that explain a plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.analysis.alternatives import MemoryLimited, RunnerUp, StageAlternatives
from meshwright.planner.analysis.cluster_sizing import SizePoint
from meshwright.planner.analysis.explain import Explanation
from meshwright.planner.analysis.plan_summary import PlanSummary
from meshwright.planner.analysis.sensitivity import MainInfluences, Sensitivity


@dataclass(frozen=True, kw_only=True)
class FullExplanation:
    """The results of all analyses that explain a plan; those that were not requested are empty.

    `summary` has the memory by part, the next best layouts and the cost of a number of steps; `memory_limited` are the
    stages that memory limits, `main_influences` the largest influences on the step time.
    """

    explanation: Explanation
    summary: PlanSummary
    memory_limited: tuple[MemoryLimited, ...]
    sensitivities: tuple[Sensitivity, ...]
    main_influences: MainInfluences
    alternatives: tuple[StageAlternatives, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    sizes: tuple[SizePoint, ...] = ()
