"""How far stages may work ahead of training, and the staleness of the tokens that follows.

In period n, a stage that is `a` steps ahead works on step n + a. At the start of the period the actor has had n
updates, and what is generated in it is used by update n + a. Each further period that a sequence stays in flight adds
one to its staleness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE, Stage, StageGraph

StepsAhead: TypeAlias = Mapping[str, int]
"""The number of steps that each stage works ahead of training, by name of the stage."""

SearchCaseKey: TypeAlias = tuple[bool, bool, int, bool]
"""The part of a search case that the choices of one stage depend on."""


@dataclass(frozen=True, kw_only=True)
class SearchCase:
    """The async mode of one search: how far stages work ahead, whether state is offloaded (`offload`), and whether
    sequences may stay in flight from period to period (`keeps_in_flight`)."""

    ahead: StepsAhead
    offload: bool = False
    keeps_in_flight: bool = False

    def streams(self, stage: Stage) -> bool:
        """True if the stage may read responses while they are generated; it must work on the same step as generation.

        The weights of a trained model would change between the chunks of a sequence that stays in flight, so such a
        stage then waits for whole sequences.
        """
        same_step = self.ahead[stage.name] == self.ahead[GENERATE]
        return stage.may_stream and same_step and not (stage.is_trained and self.keeps_in_flight)

    def key_for(self, stage: Stage) -> SearchCaseKey:
        """The part of the search case that the choices of a stage depend on; cases with the same key offer the same
        choices."""
        generates = stage.generates
        return self.offload, self.streams(stage), self.ahead[GENERATE] * generates, self.keeps_in_flight and generates


def synchronous(graph: StageGraph) -> StepsAhead:
    """The pattern in which no stage works ahead."""
    return dict.fromkeys(graph.names, 0)


def synchronous_case(graph: StageGraph) -> SearchCase:
    """The synchronous search case without offload."""
    return SearchCase(ahead=synchronous(graph))


def steps_ahead_patterns(graph: StageGraph, staleness: int) -> tuple[StepsAhead, ...]:
    """The patterns that a bound on staleness allows, the synchronous one first.

    Values and proximal log-probabilities come from the models just before the update, so their stages never work ahead.
    With generation two steps ahead, stages of untrained models are one step ahead. Within a period only training then
    waits for other stages, those of values and proximal log-probabilities. Where samples are selected by their scores,
    the reward model works as far ahead as generation: the next wave of prompts waits for the scores of the last one.
    """
    patterns_allowed = [synchronous(graph)]
    if staleness >= 1:
        patterns_allowed.append(_steps_ahead(graph, generate=1, scored=0))
    if staleness >= 2:
        patterns_allowed.append(_steps_ahead(graph, generate=2, scored=1))
    return tuple(patterns_allowed)


def pattern_ahead(graph: StageGraph, steps: int) -> StepsAhead:
    """The pattern in which generation works this many steps ahead (at most two)."""
    return next(pattern for pattern in steps_ahead_patterns(graph, steps) if pattern[GENERATE] == steps)


def search_cases(ahead: StepsAhead, staleness: int) -> tuple[SearchCase, ...]:
    """The search cases that a bound on staleness allows with this pattern; all of them include offload."""
    within_period, across_periods = (
        SearchCase(ahead=ahead, offload=True),
        SearchCase(ahead=ahead, offload=True, keeps_in_flight=True),
    )
    if max_deferral(ahead, staleness) == 0:
        return (within_period,)
    return (within_period, across_periods) if ahead[GENERATE] == 0 else (across_periods,)


def max_deferral(ahead: StepsAhead, bound: int) -> int:
    """The maximum number of periods after its first that a sequence may stay in flight under a bound on staleness."""
    return bound - ahead[GENERATE]


def staleness_of(steps_ahead: int, schedule: Schedule, bound: int) -> int:
    """The largest number of updates between sampling a token and training on it, for a generation with this schedule
    that is `steps_ahead` steps ahead."""
    return bound if schedule.overcommit else steps_ahead + schedule.batches_in_flight - 1


def steps_ahead_violations(graph: StageGraph, ahead: StepsAhead) -> tuple[str, ...]:
    """Rules that a pattern breaks on its own. The rule that steps ahead never increase along an edge is checked
    separately for each edge."""
    may_work_ahead = (GENERATE, *_untrained_stages(graph))
    return tuple(
        f"{stage}: steps_ahead={steps_ahead}, and only {', '.join(may_work_ahead)} may work ahead; use 0."
        for stage, steps_ahead in ahead.items()
        if steps_ahead and stage not in may_work_ahead
    )


def _steps_ahead(graph: StageGraph, *, generate: int, scored: int) -> StepsAhead:
    ahead = {**synchronous(graph), GENERATE: generate, **dict.fromkeys(_untrained_stages(graph), scored)}
    if graph.selects_samples:
        ahead |= {stage.name: generate for stage in graph.stages if processes_all_samples(stage)}
    return ahead


def _untrained_stages(graph: StageGraph) -> tuple[str, ...]:
    """Stages of untrained models that read only from generation and from each other. What they write does not depend on
    when they run."""
    names: list[str] = []
    for stage in graph.stages:
        if not stage.is_trained and {graph.writer[field] for field in stage.reads} <= {GENERATE, *names}:
            names.append(stage.name)
    return tuple(names)
