"""Durations of steps whose lengths are sampled from the workload, and the controllers' settings in a simulated run.

Generation is simulated round by round; streaming stages scale with tokens, other stages with the work of their rows. A
sampled step takes the planned seconds times the cost of the sampled lengths over that of the distribution, by the same
cost model. A simulation does not train, so the rewards that controllers see are assumed: they rise and level off.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.generation_cost import OUTSIDE_ROUNDS
from meshwright.cost_models.protocol import Memo
from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.planner.job.reward_tail import response_ends, sampled_tail_seconds
from meshwright.planner.plan.cost_queries import CostModelBuilder, query_for_placement
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.reward_workers import served_rewards
from meshwright.planner.program.controllers import Controllers, ControllerSetting, StepObservation
from meshwright.planner.program.durations import StepWork, refit_seconds
from meshwright.planner.simulation.simulated_flight import round_times
from meshwright.planner.simulation.simulated_generation import (
    BestOfGeneration,
    Generated,
    InFlightGeneration,
    Lengths,
    SynchronousGeneration,
    WaveGeneration,
)
from meshwright.planner.simulation.simulated_rollouts import RolloutGeneration, SampledRollout, sample_rollouts
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import ReplicaAssignment, row_work
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload

STEPS_TO_LEVEL = 50.0
"""Time constant of the assumed rewards, in steps."""
_RIPPLE = 0.02
"""Amplitude of an oscillation of the assumed rewards, which makes their slope change sign once they are level."""


def assumed_reward(step: int) -> float:
    """Return the assumed mean reward of a step, about 0 to 1."""
    return 1 - math.exp(-step / STEPS_TO_LEVEL) + _RIPPLE * math.sin(step)


class SimulatedControllers:
    """The controllers' settings in one simulated run, and the plan under each setting."""

    def __init__(self, plan: Plan, rebuild_cost_model: CostModelBuilder) -> None:
        self._plan, self._rebuild_cost_model = plan, rebuild_cost_model
        self._steps_ahead, self._first = plan.placement(GENERATE).steps_ahead, -max(plan.ahead.values())
        self._controllers = Controllers(plan)
        self._settings: list[ControllerSetting] = []
        self._plans: Memo[int, Plan] = Memo()

    def of_step(self, step: int) -> ControllerSetting:
        """Return the setting of the period that generates a step."""
        period = step - self._steps_ahead
        while self._first + len(self._settings) <= period:
            self._settings.append(self._next())
        return self._settings[period - self._first]

    def plan_in(self, setting: ControllerSetting) -> Plan:
        """Return the plan with chunks no longer than the setting's, re-evaluated; the same plan if nothing changes."""
        size = setting.chunk_tokens

        def re_evaluated() -> Plan:
            placements = tuple(self._with_chunks(placement, size) for placement in self._plan.placements)
            changed = placements != self._plan.placements
            return evaluate(self._plan.model_copy(update={"placements": placements})) if changed else self._plan

        return self._plans.memoize(size, re_evaluated)

    def _next(self) -> ControllerSetting:
        period = self._first + len(self._settings)
        for step in self._controllers.missing_steps(period):
            seconds = self.plan_in(self._settings[step - self._first]).period_seconds
            self._controllers.observe(
                StepObservation(step=step, seconds=seconds, scores_by_age=((1, assumed_reward(step)),))
            )
        return self._controllers.setting(period)

    def _with_chunks(self, placement: Placement, size: int) -> Placement:
        """Return the placement with chunks of `size` tokens; its planned seconds are scaled by the cost model."""
        if placement.schedule.chunk_tokens <= size:
            return placement
        model, shorter = self._rebuild_cost_model(self._plan.facts), replace(placement.schedule, chunk_tokens=size)
        current_call, shorter_call = (
            query_for_placement(self._plan, placement),
            replace(query_for_placement(self._plan, placement), schedule=shorter),
        )
        tail = model.tail_seconds(shorter_call) / model.tail_seconds(current_call) * placement.tail_seconds
        cost = placement.cost.scaled(model.seconds(shorter_call).total / model.seconds(current_call).total)
        return placement.model_copy(update={"schedule": shorter, "cost": cost, "tail_seconds": tail})


_MAX_ASSIGNED_ROWS = 2048
"""Maximum number of rows that are assigned to replicas one by one; with more, the exact assignment hardly matters."""


class Sampled:
    """Durations from sampled lengths; `seed` and the step determine the lengths of its prompt batch.

    If sequences stay in flight between periods, step 0 is the first of an endless run, and a step consists of the
    sequences that its period delivers.
    """

    name = "sampled"

    def __init__(self, plan: Plan, rebuild_cost_model: CostModelBuilder, *, seed: int) -> None:
        self._plan, self._seed, self._workload = plan, seed, plan.facts.workload
        placement = plan.placement(GENERATE)
        self._outside_rounds_seconds = placement.cost.amount(*OUTSIDE_ROUNDS)
        """Seconds of a step in which an engine in its own process takes weights, and takes and frees its cache."""
        call = query_for_placement(plan, placement)
        level = placement.cost.total / rebuild_cost_model(plan.facts).seconds(call).total
        self._controlled = SimulatedControllers(plan, rebuild_cost_model) if Controllers(plan).is_active else None
        sampled_workload = self._workload.wave
        sampled_plan = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": sampled_workload})})
        lengths, times = (
            _SampledLengths(sampled_workload, seed),
            round_times(sampled_plan.facts, call, rebuild_cost_model),
        )
        self._generation: (
            SynchronousGeneration | InFlightGeneration | RolloutGeneration | WaveGeneration | BestOfGeneration
        )
        within_period: SynchronousGeneration | RolloutGeneration
        if self._workload.turns:
            rollouts = functools.partial(rollouts_of_step, sampled_workload, seed)
            within_period = RolloutGeneration(sampled_plan, rollouts, times, level)
        else:
            within_period = SynchronousGeneration(sampled_plan, lengths, times, level)
        if self._workload.dynamic_sampling:
            self._generation = WaveGeneration(plan, within_period.of_step, seed=seed)
        elif self._workload.best_of:
            self._generation = BestOfGeneration(plan, within_period.of_step, seed=seed)
        elif placement.schedule.keeps_in_flight and not self._workload.turns:
            self._generation = InFlightGeneration(plan, lengths, times, level, self._overcommit)
        else:
            self._generation = within_period

    def of_step(self, step: int, /) -> StepWork:
        generated = self._generation.of_step(step)
        setting = self._controlled.of_step(step) if self._controlled else None
        plan = self._controlled.plan_in(setting) if self._controlled and setting else self._plan
        generation = tuple(self._outside_rounds_seconds + replica for replica in generated.seconds)
        seconds = {GENERATE: generation, **refit_seconds(self._plan)}
        for placement in plan.placements:
            stage, lengths = plan.stage(placement.stage), generated.prompts + generated.responses
            if stage.trains:
                seconds[stage.name] = (self._training_seconds(placement, lengths, step),)
            elif placement.schedule.chunk_tokens:
                seconds[stage.name] = self._streaming_seconds(placement, lengths)
            elif not stage.generates:
                seconds[stage.name] = self._forward_seconds(placement, lengths)
                if isinstance(self._generation, WaveGeneration) and processes_all_samples(stage):
                    seconds[stage.name] = (placement.cost.total * self._generation.waves_ratio(step),)
                elif isinstance(self._generation, BestOfGeneration) and processes_all_samples(stage):
                    seconds[stage.name] = self._forward_seconds(placement, self._generation.scored(step))
        return StepWork(
            seconds=seconds,
            num_tokens=float(sum(generated.tokens_by_staleness.values())),
            live_sequences={GENERATE: generated.live},
            held_blocks={GENERATE: generated.held},
            tokens_by_staleness=generated.tokens_by_staleness,
            tail_seconds={p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens},
            setting=setting,
            host_seconds=self._reward_seconds(generated, step) if plan.workers and not self._workload.best_of else None,
        )

    def _reward_seconds(self, generated: Generated, step: int) -> float:
        """Return the seconds from the end of generation until all rewards are known, with sampled latencies."""
        generation, rng = self._plan.placement(GENERATE), np.random.default_rng([self._seed, step, 2])
        rewards, dp = served_rewards(self._plan, [one.workers for one in self._plan.workers]), generation.layout.dp
        slots, replica_ends = generation.schedule.generation_slots, []
        for replica in range(dp):
            seconds = generated.seconds[replica % len(generated.seconds)]
            ends = response_ends(generated.responses[replica::dp].tolist(), slots, seconds)
            replica_ends.append(seconds + sampled_tail_seconds(ends, rewards, rng))
        return max(replica_ends) - max(generated.seconds)

    def _overcommit(self, step: int) -> int:
        """Return the overcommit, in sequences over all replicas, of the period that delivers the step."""
        return (
            self._controlled.of_step(step).overcommit
            if self._controlled
            else self._plan.placement(GENERATE).schedule.overcommit
        )

    def _streaming_seconds(self, placement: Placement, lengths: Lengths) -> tuple[float, ...]:
        """Return the seconds of each replica of a streaming stage; rows are assigned as in generation."""
        dp = placement.layout.dp
        typical = self._workload.mean_tokens * -(-len(lengths) // dp)
        return tuple(placement.cost.total * float(lengths[replica::dp].sum()) / typical for replica in range(dp))

    def _forward_seconds(self, placement: Placement, lengths: Lengths) -> tuple[float, ...]:
        work = work_of_replicas(lengths, self._plan.row_split_of(placement.stage))
        typical = self._typical_work(len(lengths), placement)
        return tuple(float(seconds) for seconds in placement.cost.total * work / typical)

    def _training_seconds(self, placement: Placement, lengths: Lengths, step: int) -> float:
        """Return the seconds of training: the slowest replica decides the seconds of every update."""
        num_minibatches, num_epochs = self._workload.num_minibatches, self._workload.num_epochs
        rng = np.random.default_rng([self._seed, step, 1])
        rows = len(lengths) // num_minibatches
        orders = [rng.permutation(lengths) for _ in range(num_epochs)]
        updates = [order[i * rows : (i + 1) * rows] for order in orders for i in range(num_minibatches)]
        typical, assignment = self._typical_work(rows, placement), self._plan.row_split_of(placement.stage)
        max_work = float(typical.max())
        slowest = sum(float((work_of_replicas(update, assignment) * (max_work / typical)).max()) for update in updates)
        return placement.cost.total * slowest / (len(updates) * max_work)

    def _typical_work(self, rows: int, placement: Placement) -> NDArray[np.float64]:
        """Return the work of each replica's typical rows, as in the cost model.

        Where rows are assigned by speed, all replicas take equally long for theirs.
        """
        assignment, lengths = self._plan.row_split_of(placement.stage), self._workload.sequence_lengths
        kinds = zip(assignment.rows or (rows,), assignment.replicas, strict=True)
        work = [
            float(sum(row_work(assignment.model, lengths.stratified_sample(-(-rows_of_kind // number)).tolist())))
            for rows_of_kind, number in kinds
        ]
        return np.repeat(work, assignment.replicas)


class _SampledLengths:
    """The sampled lengths of each step, computed once."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed
        self._lengths: Memo[int, tuple[Lengths, Lengths]] = Memo()

    def __call__(self, step: int) -> tuple[Lengths, Lengths]:
        return self._lengths.memoize(step, lambda: sample_lengths(self._workload, seed=self._seed, step=step))


def sample_lengths(workload: Workload, *, seed: int, step: int) -> tuple[Lengths, Lengths]:
    """Return the prompt and response lengths of one step's batch, ascending by prompt; rows of a group are adjacent.

    In multi-turn rollouts a response is everything after the prompt.
    """
    if workload.turns:
        rollouts = rollouts_of_step(workload, seed, step)
        return np.array([one.prompt for one in rollouts]), np.array([one.num_tokens for one in rollouts])
    rng = np.random.default_rng([seed, step])
    prompts = _prompts(workload, rng)
    return prompts, _sample(rng, workload.response_lengths, workload.batch_size)


def rollouts_of_step(workload: Workload, seed: int, step: int) -> tuple[SampledRollout, ...]:
    """Return the rollouts of one step's batch, in the order of `sample_lengths`."""
    rng = np.random.default_rng([seed, step])
    return sample_rollouts(workload, _prompts(workload, rng), rng)


def _prompts(workload: Workload, rng: np.random.Generator) -> Lengths:
    return np.sort(_sample(rng, workload.prompt_lengths, workload.num_prompts)).repeat(workload.group_size)


def work_of_replicas(lengths: Lengths, assignment: ReplicaAssignment) -> NDArray[np.float64]:
    """Return the work of each replica, with rows assigned as in the runtime.

    If there are more than `_MAX_ASSIGNED_ROWS`, a split as even as the longest row allows is assumed.
    """
    work = np.array(row_work(assignment.model, lengths.tolist()), dtype=np.float64)
    num_replicas = sum(assignment.replicas)
    if len(lengths) <= _MAX_ASSIGNED_ROWS or len(lengths) % num_replicas or len(assignment.replicas) > 1:
        return np.array([work[list(rows)].sum() for rows in assignment.assign(lengths.tolist())])
    total = float(work.sum())
    max_work, others = max(total / num_replicas, float(work.max())), num_replicas - 1
    return np.array([max_work, *((total - max_work) / others for _ in range(others))])


def _sample(rng: np.random.Generator, lengths: Histogram, size: int) -> Lengths:
    return rng.choice(np.array(lengths.tokens), size=size, p=np.array(lengths.probabilities))
