"""Durations of steps whose lengths are drawn from the workload: generation round by round, what streams by tokens, the
rest by the work of its rows.

Every level is the plan's: a drawn step takes the planned seconds times what the drawn lengths cost over what the
distribution costs, by one and the same model. Drawn lengths equal to the typical ones give the planned step back.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.waves import sees_waves
from meshwright.planner.environment.reward_tail import drawn_tail_seconds, response_ends
from meshwright.planner.plan.calls import Remodel, call_in
from meshwright.planner.plan.host_workers import served
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.program.controllers import Controllers
from meshwright.planner.program.instruction_durations import StepWork, refit_seconds
from meshwright.planner.simulation.controlled import Controlled
from meshwright.planner.simulation.drawn_best import DrawnBest
from meshwright.planner.simulation.drawn_waves import DrawnInWaves
from meshwright.planner.simulation.generated import Alone, CarriedOver, Generated, Lengths
from meshwright.planner.simulation.rollouts import DrawnTurns, RollingOut, draw_turns
from meshwright.planner.simulation.round_times import round_times
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import ReplicaDeal, work_of_rows
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload

_MOST_DEALT = 2048
"""Rows that are dealt one by one: of more, which row meets which decides little."""


class Sampled:
    """`seed` and the number of the step decide the lengths of its prompt batch.

    Where sequences outlive a turn, step 0 is the first of a run that never ends, and a step has the sequences that its
    turn delivers.
    """

    name = "sampled"

    def __init__(self, plan: Plan, remodel: Remodel, *, seed: int) -> None:
        self._plan, self._seed, self._workload = plan, seed, plan.facts.workload
        placement = plan.placement(GENERATE)
        call = call_in(plan, placement)
        level = placement.cost.total / remodel(plan.facts).seconds(call).total
        self._controlled = Controlled(plan, remodel) if Controllers(plan).decides else None
        drawn = self._workload.wave
        batch = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": drawn})})
        draws, times = _Draws(drawn, seed), round_times(batch.facts, call, remodel)
        self._generation: Alone | CarriedOver | RollingOut | DrawnInWaves | DrawnBest
        if self._workload.dynamic_sampling:
            self._generation = DrawnInWaves(plan, Alone(batch, draws, times, level).of_step, seed=seed)
        elif self._workload.best_of:
            self._generation = DrawnBest(plan, Alone(batch, draws, times, level).of_step, seed=seed)
        elif self._workload.turns:
            turns = functools.partial(turns_of_step, self._workload, seed)
            self._generation = RollingOut(plan, turns, times, level)
        elif placement.schedule.runs_on:
            self._generation = CarriedOver(plan, draws, times, level, self._overcommit)
        else:
            self._generation = Alone(plan, draws, times, level)

    def of_step(self, step: int, /) -> StepWork:
        drawn = self._generation.of_step(step)
        setting = self._controlled.of_step(step) if self._controlled else None
        plan = self._controlled.plan_in(setting) if self._controlled and setting else self._plan
        seconds = {GENERATE: drawn.seconds, **refit_seconds(self._plan)}
        for placement in plan.placements:
            stage, lengths = plan.stage(placement.stage), drawn.prompts + drawn.responses
            if stage.trains:
                seconds[stage.name] = (self._training(placement, lengths, step),)
            elif placement.schedule.chunk_tokens:
                seconds[stage.name] = self._streaming(placement, lengths)
            elif not stage.generates:
                seconds[stage.name] = self._forward(placement, lengths)
                if isinstance(self._generation, DrawnInWaves) and sees_waves(stage):
                    seconds[stage.name] = (placement.cost.total * self._generation.relative(step),)
                elif isinstance(self._generation, DrawnBest) and sees_waves(stage):
                    seconds[stage.name] = self._forward(placement, self._generation.scored(step))
        return StepWork(
            seconds=seconds,
            num_tokens=float(sum(drawn.tokens_by_staleness.values())),
            live_sequences={GENERATE: drawn.live},
            held_blocks={GENERATE: drawn.held},
            tokens_by_staleness=drawn.tokens_by_staleness,
            tail_seconds={p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens},
            setting=setting,
            host_seconds=self._rewarding(drawn, step) if plan.workers and not self._workload.best_of else None,
        )

    def _rewarding(self, drawn: Generated, step: int) -> float:
        """From the end of the generation until the rewards of all replicas are there; each call takes a time that is
        drawn."""
        generation, draw = self._plan.placement(GENERATE), np.random.default_rng([self._seed, step, 2])
        rewards, dp = served(self._plan, [one.workers for one in self._plan.workers]), generation.layout.dp
        slots, found = generation.schedule.generation_slots, []
        for replica in range(dp):
            seconds = drawn.seconds[replica % len(drawn.seconds)]
            ends = response_ends(drawn.responses[replica::dp].tolist(), slots, seconds)
            found.append(seconds + drawn_tail_seconds(ends, rewards, draw))
        return max(found) - max(drawn.seconds)

    def _overcommit(self, step: int) -> int:
        """Sequences over all replicas beyond a batch, in the turn that delivers the step."""
        return (
            self._controlled.of_step(step).overcommit
            if self._controlled
            else self._plan.placement(GENERATE).schedule.overcommit
        )

    def _streaming(self, placement: Placement, lengths: Lengths) -> tuple[float, ...]:
        """Rows are shared as they were for generation, in order of the prompts."""
        dp = placement.layout.dp
        typical = self._workload.mean_tokens * -(-len(lengths) // dp)
        return tuple(placement.cost.total * float(lengths[replica::dp].sum()) / typical for replica in range(dp))

    def _forward(self, placement: Placement, lengths: Lengths) -> tuple[float, ...]:
        work = work_of_replicas(lengths, self._plan.deal_of(placement.stage))
        typical = self._typical_work(len(lengths), placement)
        return tuple(float(seconds) for seconds in placement.cost.total * work / typical)

    def _training(self, placement: Placement, lengths: Lengths, step: int) -> float:
        """Replicas meet at every update, which the one with the most work decides."""
        num_minibatches, num_epochs = self._workload.num_minibatches, self._workload.num_epochs
        draw = np.random.default_rng([self._seed, step, 1])
        rows = len(lengths) // num_minibatches
        orders = [draw.permutation(lengths) for _ in range(num_epochs)]
        updates = [order[i * rows : (i + 1) * rows] for order in orders for i in range(num_minibatches)]
        typical, deal = self._typical_work(rows, placement), self._plan.deal_of(placement.stage)
        most = float(typical.max())
        slowest = sum(float((work_of_replicas(update, deal) * (most / typical)).max()) for update in updates)
        return placement.cost.total * slowest / (len(updates) * most)

    def _typical_work(self, rows: int, placement: Placement) -> NDArray[np.float64]:
        """Of each replica that of its typical rows, as the cost model counts them; where rows are dealt by speed all
        take as long for theirs."""
        deal, lengths = self._plan.deal_of(placement.stage), self._workload.sequence_lengths
        kinds = zip(deal.rows or (rows,), deal.replicas, strict=True)
        work = [
            float(sum(work_of_rows(deal.model, lengths.strata(-(-mine // number)).tolist()))) for mine, number in kinds
        ]
        return np.repeat(work, deal.replicas)


class _Draws:
    """The lengths of every step that was asked for, drawn once."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed
        self._known: dict[int, tuple[Lengths, Lengths]] = {}

    def __call__(self, step: int) -> tuple[Lengths, Lengths]:
        if step not in self._known:
            self._known[step] = draw_lengths(self._workload, seed=self._seed, step=step)
        return self._known[step]


def draw_lengths(workload: Workload, *, seed: int, step: int) -> tuple[Lengths, Lengths]:
    """Prompts and responses of one step's batch, in order of the prompts' lengths; those of a group are together. With
    turns, a response is all that stands behind a prompt."""
    if workload.turns:
        rollouts = turns_of_step(workload, seed, step)
        return np.array([one.prompt for one in rollouts]), np.array([one.num_tokens for one in rollouts])
    draw = np.random.default_rng([seed, step])
    prompts = _prompts(workload, draw)
    return prompts, _sample(draw, workload.response_lengths, workload.batch_size)


def turns_of_step(workload: Workload, seed: int, step: int) -> tuple[DrawnTurns, ...]:
    """The rollouts of one step's batch, in the order of `draw_lengths`."""
    draw = np.random.default_rng([seed, step])
    return draw_turns(workload, _prompts(workload, draw), draw)


def _prompts(workload: Workload, draw: np.random.Generator) -> Lengths:
    return np.sort(_sample(draw, workload.prompt_lengths, workload.num_prompts)).repeat(workload.group_size)


def work_of_replicas(lengths: Lengths, deal: ReplicaDeal) -> NDArray[np.float64]:
    """Work of each replica, dealt as in the runtime; more rows than `_MOST_DEALT`, as evenly as the longest of them
    allows."""
    work = np.array(work_of_rows(deal.model, lengths.tolist()), dtype=np.float64)
    num_replicas = sum(deal.replicas)
    if len(lengths) <= _MOST_DEALT or len(lengths) % num_replicas or len(deal.replicas) > 1:
        return np.array([work[list(mine)].sum() for mine in deal.of(lengths.tolist())])
    total = float(work.sum())
    most, others = max(total / num_replicas, float(work.max())), num_replicas - 1
    return np.array([most, *((total - most) / others for _ in range(others))])


def _sample(draw: np.random.Generator, lengths: Histogram, size: int) -> Lengths:
    return draw.choice(np.array(lengths.tokens), size=size, p=np.array(lengths.probabilities))
