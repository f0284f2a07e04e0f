"""Summaries of the optional features of a plan: adapter, generation weights in 8-bit floats, old log-probabilities
without a pass of their own, sampling masks, best-of-n, rewards on hosts, the latencies that a job does not state,
evaluations, and the choice of an engine. Each is None for a plan without the feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.cost_models.cost import WEIGHTS, Cost, Source
from meshwright.cost_models.kernels import element_bytes
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.sampling_waves import WAVE_REWARDS, processes_all_samples
from meshwright.planner.job.evaluation import HELD_OUT
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.rewards_and_tools import HostWorkers
from meshwright.planner.plan.cost_queries import field_bytes
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Edge, EngineOption, Plan
from meshwright.planner.plan.reward_workers import LATENCY, UNDER_WAY, host_seconds, reward_tail_of
from meshwright.profiles.algorithms import OldLogprobs
from meshwright.profiles.frameworks import NOT_RUN, EngineName
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.stages import GENERATE, KEPT_TOKENS, SAMPLING_MASK, Role
from meshwright.profiles.workload import Workload

_BYTES_PER_GIB = 2**30
_MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class AdapterSummary:
    """The adapter of a plan's actor or critic (`role`).

    `serves` has the stages that run on another stage's copy of the actor's weights without the adapter, each with the
    stage that owns the copy; `own_copies` has those with a copy of their own. A copy takes `copy_bytes` on the
    fullest of its ranks; 0 if there are no such stages.
    """

    role: Role
    rank: int
    linears: tuple[str, ...]
    trained_params: int
    num_params: int
    serves: tuple[tuple[str, str], ...]
    own_copies: tuple[str, ...]
    copy_bytes: float

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        head = " and its scalar head" if self.role is Role.CRITIC else ""
        yield (
            f"{self.role}: an adapter of rank {self.rank} on {', '.join(self.linears)}{head}: "
            f"{self.trained_params / _MILLION:,.1f} million parameters are trained and refit, "
            f"{self.num_params / _MILLION:,.1f} million are frozen"
        )
        size = f"{self.copy_bytes / _BYTES_PER_GIB:.2f} GiB a rank"
        for stage, owner in self.serves:
            yield f"no ref copy: {stage} runs on the weights of {owner} without the adapter, which saves {size}"
        for stage in self.own_copies:
            yield f"{stage} has its own copy of the actor's weights, {size}: no stage of the actor has its layout"


def adapter_summary(plan: Plan, role: Role = Role.ACTOR) -> AdapterSummary | None:
    """Return the adapter of the model of a role in a valid plan; None without an adapter or such a model."""
    spec = plan.facts.models.by_name.get(role)
    if spec is None or spec.adapter is None:
        return None
    bases = [p for p in plan.placements if plan.stage(p.stage).base_of is role]
    owners = {p.stage: plan.copy_of(p.stage) for p in bases}
    return AdapterSummary(
        role=role,
        rank=spec.adapter.rank,
        linears=spec.adapter.targets,
        trained_params=spec.trainable_params,
        num_params=spec.num_params - spec.trained_head_params,
        serves=tuple((stage, owner) for stage, owner in owners.items() if owner != stage),
        own_copies=tuple(stage for stage, owner in owners.items() if owner == stage),
        copy_bytes=max((p.resident.amount(WEIGHTS) for p in bases), default=0.0),
    )


@dataclass(frozen=True, kw_only=True)
class QuantisedCopy:
    """Bytes of a generation copy in 8-bit floats. `copy_bytes` is that of the fullest rank, including its embedding and
    head in the job's `precision`; `whole_bytes` is that of a copy entirely in that precision."""

    copy_bytes: float
    whole_bytes: float
    precision: str
    casts_up: bool

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        yield (
            f"{GENERATE} has its linear layers in 8-bit floats: its copy is "
            f"{self.copy_bytes / _BYTES_PER_GIB:.2f} GiB a rank, {self.copy_bytes / self.whole_bytes:.0%} of one in "
            f"{self.precision}, and serves no other stage"
        )
        if self.casts_up:
            yield f"a CPU casts 8-bit floats up to {self.precision} in every pass: they take less memory, and more time"
        else:
            yield "weights and activations are multiplied as 8-bit floats"
        yield "sampled tokens are slightly off the trained policy: each is weighted by its importance ratio"


def quantised_copy(plan: Plan) -> QuantisedCopy | None:
    """Return the quantised copy of a valid plan; None if its weights are in the job's precision."""
    facts = plan.facts
    if facts.generation_weights is None:
        return None
    placement = plan.placement(GENERATE)
    part = fullest_part(facts.models.spec(plan.stage(GENERATE).role), placement.layout.tp, placement.layout.pp)
    return QuantisedCopy(
        copy_bytes=placement.resident.amount(WEIGHTS, "weight scales"),
        whole_bytes=part.num_params * element_bytes(facts.precision),
        precision=facts.precision,
        casts_up=facts.cluster.kind == "cpu",
    )


@dataclass(frozen=True, kw_only=True)
class SkippedLogprobs:
    """The source of the log-probabilities before the updates of a plan that computes them in no pass of their own."""

    source: OldLogprobs

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        if self.source == "training":
            yield (
                "no pass for old log-probabilities: they are those of the forward pass of the only update, where the "
                "ratio is 1"
            )
        else:
            yield (
                "no pass for old log-probabilities: they are those that the generation recorded, and ratios are "
                "truncated at importance_cap; a run measures their gap to the trainer's (generator_gap)"
            )


def skipped_logprobs(plan: Plan) -> SkippedLogprobs | None:
    """Return the source of the old log-probabilities; None if the actor computes them in a pass of its own."""
    source = plan.facts.old_logprobs
    return None if source == "recompute" else SkippedLogprobs(source=source)


@dataclass(frozen=True, kw_only=True)
class SamplingMask:
    """The sampling mask of a plan: the size limit of a set of tokens, the stages that are `readers` of the sets, and
    the bytes that each of them gets in a step if every set has that size."""

    kept_tokens: int
    readers: tuple[str, ...]
    num_bytes: float

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        yield (
            f"sampling mask: log-probabilities are over the at most {self.kept_tokens} tokens that top_k and top_p "
            f"left at each position; up to {self.num_bytes / _BYTES_PER_GIB:.3f} GiB a step go to each of "
            f"{', '.join(self.readers)}"
        )


def sampling_mask(plan: Plan) -> SamplingMask | None:
    """Return the sampling mask of a plan, else None."""
    workload = plan.facts.workload
    if not workload.kept_tokens:
        return None
    readers = tuple(stage.name for stage in plan.graph.stages if KEPT_TOKENS in stage.reads)
    num_bytes = sum(field_bytes(workload, field) for field in SAMPLING_MASK)
    return SamplingMask(kept_tokens=workload.kept_tokens, readers=readers, num_bytes=num_bytes)


@dataclass(frozen=True, kw_only=True)
class BestSamples:
    """Best-of-n in one step: samples generated and kept for each prompt, and the predicted seconds of the stages that
    see all samples and of those that see only the kept ones, each a sum over stages.

    `num_sampled_prompts` is the mean number of prompts that are sampled; with dynamic sampling it is more than
    `num_prompts`, the prompts that are trained on.
    """

    num_prompts: int
    num_sampled_prompts: float
    num_sampled: int
    num_kept: int
    all_seconds: float
    kept_seconds: float

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        generated, kept = f"{self.num_sampled_prompts * self.num_sampled:.0f}", self.num_prompts * self.num_kept
        average, of_prompts = "", ""
        if self.num_sampled_prompts > self.num_prompts:
            average, of_prompts = " on average", f" of {self.num_prompts} prompts"
        yield (
            f"{self.num_sampled} samples of each of {self.num_sampled_prompts:.0f} prompts are generated and scored"
            f"{average}, and the best {self.num_kept}{of_prompts} are trained on: {generated} and {kept} a step"
        )
        yield (
            f"stages that see all {generated} take {self.all_seconds:.3f} s, those that see the {kept} "
            f"{self.kept_seconds:.3f} s"
        )


def _sampled_prompts(workload: Workload) -> float:
    """Return the mean number of prompts that a step samples."""
    num_prompts, sampling = workload.num_prompts, workload.dynamic_sampling
    return sampling.wave_size(num_prompts) * sampling.expected_waves(num_prompts) if sampling else num_prompts


def best_samples(plan: Plan) -> BestSamples | None:
    """Return the samples of a step of a plan with best-of-n, else None."""
    workload = plan.facts.workload
    if not workload.best_of:
        return None
    seconds = {p.stage: p.cost.total for p in plan.placements}
    see_all = [stage.name for stage in plan.graph.stages if processes_all_samples(stage)]
    return BestSamples(
        num_prompts=workload.num_prompts,
        num_sampled_prompts=_sampled_prompts(workload),
        num_sampled=workload.best_of,
        num_kept=workload.group_size,
        all_seconds=math.fsum(seconds[name] for name in see_all),
        kept_seconds=math.fsum(taken for name, taken in seconds.items() if name not in see_all),
    )


@dataclass(frozen=True, kw_only=True)
class HostRewards:
    """Predicted seconds of rewards in a step.

    `at_once_seconds` is the time of the same workers if scoring only started after the last response; `tail_seconds` is
    the time from the last response to the last reward as planned; `added_seconds` is the resulting increase of the step
    time.
    """

    workers: tuple[HostWorkers, ...]
    num_replicas: int
    at_once_seconds: float
    tail_seconds: float
    added_seconds: float

    @property
    def hidden_share(self) -> float:
        """The share of `at_once_seconds` that does not add to the step time."""
        return 1 - self.added_seconds / self.at_once_seconds if self.at_once_seconds else 1.0

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        counts = ", ".join(f"{one.reward} {one.workers}" for one in self.workers)
        yield f"workers for each of {self.num_replicas} replicas: {counts}"
        yield (
            f"the last reward is known {self.tail_seconds:.3f} s after the last response, and "
            f"{self.at_once_seconds:.3f} s if scoring started then; {self.hidden_share:.0%} of that is hidden"
        )


def host_rewards(plan: Plan) -> HostRewards | None:
    """Return the rewards on hosts of a valid plan; None if all rewards are models."""
    if not plan.workers:
        return None
    num_replicas = plan.placement(GENERATE).layout.dp
    rows = np.zeros(rows_per_replica(plan.facts.workload.candidates.batch_size, num_replicas)[0])
    evaluated_without_wait = evaluate(plan.model_copy(update={"edges": tuple(map(_without_host_wait, plan.edges))}))
    wave_wait = plan.placement(GENERATE).cost.amount(WAVE_REWARDS) if plan.facts.workload.best_of else 0.0
    return HostRewards(
        workers=plan.workers,
        num_replicas=num_replicas,
        at_once_seconds=reward_tail_of(plan, rows, [one.workers for one in plan.workers]),
        tail_seconds=max(wave_wait, *map(host_seconds, plan.edges)),
        added_seconds=wave_wait + max(0.0, plan.period_seconds - evaluated_without_wait.period_seconds),
    )


def _without_host_wait(edge: Edge) -> Edge:
    """The transfer without its wait for rewards on hosts."""
    return edge.model_copy(
        update={"cost": Cost(tuple(term for term in edge.cost.terms if term.name not in (LATENCY, UNDER_WAY)))}
    )


@dataclass(frozen=True, kw_only=True)
class CallLatencies:
    """Descriptions of the latencies that the job does not state, by name of the reward or the tool: of those that were
    measured, and of those that are assumed."""

    measured: Mapping[str, str]
    assumed: Mapping[str, str]

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        for name, latency in self.measured.items():
            yield f"a call of {name} takes {latency}"
        for name, latency in self.assumed.items():
            yield (
                f"a call of {name} is assumed to take {latency}: state its latency_seconds in the job, or measure it "
                "with `meshwright profile` and plan with the table"
            )


def call_latencies(facts: Facts) -> CallLatencies | None:
    """Return the measured and assumed latencies of rewards and of the tool; None if the job states all."""
    latencies = {f"reward {load.name}": load.latency_seconds for load in facts.rewards}
    if facts.workload.turns:
        latencies["the tool"] = facts.workload.turns.latency_seconds
    measured = {name: latency.description for name, latency in latencies.items() if latency.measured}
    assumed = {name: latency.description for name, latency in latencies.items() if latency.assumed}
    return CallLatencies(measured=measured, assumed=assumed) if measured or assumed else None


@dataclass(frozen=True, kw_only=True)
class UnplannedEvaluations:
    """The sets of held-out prompts of a job, each with the steps between its evaluations (0: only the first and the
    last policy). No step of a plan has their time.

    For comparison, the plan generates and scores the `num_responses` responses of a step in `seconds`.
    """

    steps_between: Mapping[str, int]
    num_responses: int
    seconds: float

    @property
    def sentence(self) -> str:
        """A report line."""
        sets = ", ".join(
            f"{name} ({f'every {_steps(steps)}' if steps else 'before the first step and after the last'})"
            for name, steps in self.steps_between.items()
        )
        return (
            f"evaluations are not in the step: {sets}, one response for each prompt; this plan generates and scores "
            f"the {self.num_responses:,} responses of a step in {self.seconds:.3f} s"
        )


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def unplanned_evaluations(plan: Plan, job: Job) -> UnplannedEvaluations | None:
    """Return the evaluations of a job that its plan does not have; None if the job has no held-out prompts."""
    names = [HELD_OUT] if job.data and job.data.held_out else []
    steps_between = {name: job.evaluation.interval(name) for name in (*names, *job.evaluation.sets)}
    if not steps_between:
        return None
    needed = {GENERATE, *(stage.name for stage in plan.graph.stages if "scores" in stage.writes)}
    seconds = sum(placement.cost.total for placement in plan.placements if placement.stage in needed)
    return UnplannedEvaluations(
        steps_between=steps_between, num_responses=plan.facts.workload.batch_size, seconds=seconds
    )


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine of a plan, and the seconds of a step with each engine that the job allows.

    `equations` are the engines whose generation was not measured, and `excluded` has the reason of each engine that has
    no plan.
    """

    engine: EngineName
    step_seconds: Mapping[str, float]
    equations: tuple[str, ...]
    excluded: Mapping[str, str]

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        others = {name: seconds for name, seconds in self.step_seconds.items() if name != self.engine}
        slower = ", ".join(f"{name} would take {seconds:.3f} s" for name, seconds in others.items())
        taken = f"a step takes {self.step_seconds[self.engine]:.3f} s"
        yield f"engine {self.engine}: {taken}; {slower}" if slower else f"engine {self.engine}: {taken}"
        if self.engine in NOT_RUN:
            yield f"engine {self.engine}: {NOT_RUN[self.engine]}"
        for name, reason in self.excluded.items():
            yield f"engine {name} is excluded: {reason}"
        if others and self.equations:
            yield (
                f"generation by {' and '.join(self.equations)} comes from equations; `meshwright profile` measures the "
                "engines that the job names"
            )


def engine_choice(plan: Plan) -> EngineChoice | None:
    """Return the engines that a plan was chosen among; None if the job names one that `run` has been tried with."""
    if plan.engine_options is None and plan.facts.engine not in NOT_RUN:
        return None
    named = EngineOption(engine=plan.facts.engine, period_seconds=plan.period_seconds)
    options = plan.engine_options or (named,)
    planned = [option for option in options if option.period_seconds is not None]
    return EngineChoice(
        engine=plan.facts.engine,
        step_seconds={one.engine: one.period_seconds for one in planned if one.period_seconds is not None},
        equations=tuple(one.engine for one in planned if one.source is Source.ANALYTIC),
        excluded={one.engine: one.reason for one in options if one.reason is not None},
    )
