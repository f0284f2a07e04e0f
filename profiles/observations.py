"""Stage times and lengths observed in a run's trace, and the corrections of a table that follow from them.

Only complete steps after the first count: the first warms the device up, and an incomplete step has no stage times.
Time in which a rank waits for others is not counted, because its cause is an earlier stage with spans of its own. Cost
models are not used here; what they predict is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import GENERATE, Stage, StageGraph
from meshwright.profiles.table import Provenance, Table, TimedPass
from meshwright.profiles.trace import (
    CALL_SECONDS,
    NUM_CALLS,
    NUM_PROMPT_TOKENS,
    NUM_ROW_ROUNDS,
    NUM_SAMPLED_TOKENS,
    NUM_SAMPLES,
    NUM_TOOL_TOKENS,
    Span,
    is_draft_count,
    num_accepted,
    num_drafted,
)
from meshwright.profiles.workload import Workload


def stage_seconds(stage: Stage, layout: Layout, spans: Sequence[Span]) -> float:
    """Return the seconds of the slowest replica: from the time its last rank starts until its last rank ends.

    The waves of a step (dynamic sampling) are summed. Replicas that train together or share experts count as one.
    `spans` are those of the stage in one step, with at least one on the first rank of its pool.
    """
    first, is_one_group = min(span.rank for span in spans), stage.trains or layout.expert_replicas > 1
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_seconds):
        by_rank[span.rank].append(span)
    replicas: dict[int, list[list[Span]]] = defaultdict(list)
    for rank, rank_spans in by_rank.items():
        replicas[0 if is_one_group else layout.coordinates(rank - first).dp].append(rank_spans)
    return max(
        math.fsum(
            max(span.end_seconds for span in wave) - max(span.start_seconds for span in wave)
            for wave in zip(*ranks, strict=False)  # in an incomplete trace, only the waves that all ranks have
        )
        for ranks in replicas.values()
    )


def refit_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds of one step's refits, summed on the rank with the largest sum; 0 without refits.

    A refit counts with its shortest span: that of the rank which arrives last and so does not wait for others. Spans
    of other kinds are ignored.
    """
    refits: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "refit":
            refits[span.instruction].append(span)
    by_rank: dict[int, float] = defaultdict(float)
    for ranks in refits.values():
        shortest = min(span.seconds for span in ranks)
        for span in ranks:
            by_rank[span.rank] += shortest
    return max(by_rank.values(), default=0.0)


class TurnsObservation(NamedTuple):
    """Means per rollout: tool calls, tool tokens, and the sum of tool latencies in seconds."""

    num_calls: float
    tool_tokens: float
    call_seconds: float

    @property
    def num_turns(self) -> float:
        """Mean number of turns: one more than calls, because a turn follows each call."""
        return 1 + self.num_calls

    def scale(self, turns: ToolTurns) -> ToolTurns:
        """Return the turns scaled to the observed means; result and latency stay if the tool was never called."""
        update: dict[str, object] = {"number": turns.number.with_mean(self.num_turns)}
        if self.num_calls:
            mean = self.call_seconds / self.num_calls
            update["result"] = turns.result.with_mean(max(1.0, self.tool_tokens / self.num_calls))
            update["latency_seconds"] = _with_mean(turns.latency_seconds, mean)
        return turns.model_copy(update=update)


def observe_turns(spans: Sequence[Span], ranks_per_replica: int, num_rollouts: float) -> TurnsObservation | None:
    """Return the observation from a generation's spans on all of its ranks; None if they record no turns.

    Every rank of a replica records the tool tokens; only the rank that calls the tool records calls and their
    latencies.
    """
    if not any(NUM_TOOL_TOKENS in span.facts for span in spans):
        return None
    tool_tokens, calls, seconds = (
        math.fsum(span.facts.get(name, 0.0) for span in spans) for name in (NUM_TOOL_TOKENS, NUM_CALLS, CALL_SECONDS)
    )
    return TurnsObservation(
        calls / num_rollouts, tool_tokens / ranks_per_replica / num_rollouts, seconds / num_rollouts
    )


def _with_mean(latency: LatencySpec, mean: float) -> LatencySpec:
    """The latencies scaled to this mean; if all are 0, a fixed latency of this mean."""
    latencies = latency.resolve()
    if not latencies.mean:
        return LatencySpec(fixed=mean)
    scaled = ((s * mean / latencies.mean, p) for s, p in zip(latencies.seconds, latencies.probabilities, strict=True))
    return LatencySpec(histogram=tuple(scaled))


def draft_counts(spans: Iterable[Span]) -> Counter[str]:
    """Return the sums over the spans of the counts of drafted and accepted tokens.

    Every rank of a replica records those of the replica, so only ratios of the sums have a meaning."""
    counts = Counter[str]()
    for span in spans:
        if NUM_ROW_ROUNDS in span.facts:
            counts.update({name: count for name, count in span.facts.items() if is_draft_count(name)})
    return counts


def observed_speculation(counts: Mapping[str, float]) -> Speculation | None:
    """Return the acceptance by position that follows from `draft_counts`; None without rounds in which tokens could be
    drafted. If none was drafted, the share of rounds with a draft is 0, and the acceptance is 0 and means nothing."""
    if not counts.get(NUM_ROW_ROUNDS):
        return None
    acceptance = list[float]()
    while drafted := counts.get(num_drafted(len(acceptance)), 0.0):
        acceptance.append(counts[num_accepted(len(acceptance))] / drafted)
    drafted_share = counts[num_drafted(0)] / counts[NUM_ROW_ROUNDS]
    return Speculation(acceptance=tuple(acceptance) or (0.0,), drafted=min(1.0, drafted_share))


class WavesObservation(NamedTuple):
    """Dynamic sampling: mean sequences sampled per step, and mean tokens of their responses and prompts."""

    rows_per_step: float
    response_tokens: float
    prompt_tokens: float

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of prompt and response together."""
        return self.prompt_tokens + self.response_tokens


def observe_waves(spans: Sequence[Span], ranks_per_replica: int, num_steps: int) -> WavesObservation | None:
    """Return the observation from a generation's spans on all of its ranks; None if they record no waves.

    Every rank of a replica records the samples of the whole replica.
    """
    if not any(NUM_PROMPT_TOKENS in span.facts for span in spans):
        return None
    rows, responses, prompts = (
        math.fsum(span.facts.get(name, 0.0) for span in spans)
        for name in (NUM_SAMPLES, NUM_SAMPLED_TOKENS, NUM_PROMPT_TOKENS)
    )
    return WavesObservation(rows / ranks_per_replica / num_steps, responses / rows, prompts / rows)


_DIGITS = 9
"""Decimals of a factor: far finer than the spread of any measurement, far coarser than rounding errors of a sum."""

_TOLERANCE = 1e-6
"""Relative difference of step times below which no correction is made."""

_BISECTIONS = 40
"""Bisection steps after which the extra seconds are exact to `_DIGITS`."""

_MIN_SHARE = 0.05
"""Smallest share of a stage's seconds from which the factor of collectives is fitted; below it noise dominates."""

_TRAFFIC = ("refit", "send", "receive")

_TRUNCATED, _LONGEST = "num_truncated", "num_longest_tokens"

_NOT_PROFILED = "not profiled"


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """Observations over a run's complete steps after the first. Tokens are per sequence, None if not recorded."""

    num_steps: int
    seconds: Mapping[str, float]  # by stage: median over steps
    spread: Mapping[str, float]  # by stage: interquartile range over steps / median
    refit_seconds: float | None  # median over steps of the sum of all refits; None without refits
    step_seconds: float  # median over steps, from the end of the previous step or a later start to the step's end
    response_tokens: float | None  # median over steps of the mean
    sequence_tokens: float | None  # prompt and response together
    truncated_share: float | None  # share of responses truncated at the length limit, over all steps
    longest_tokens: float | None  # mean over steps of the longest response
    turns: TurnsObservation | None = None  # None unless rollouts are multi-turn
    speculation: Speculation | None = None  # None if the plan has no drafts


def observe(
    spans: Sequence[Span], layouts: Mapping[str, Layout], graph: StageGraph, batch_size: float
) -> RunObservation:
    """Return stage times and lengths in a trace.

    Raises BadInput if the trace is not a measured one or has no complete step after the first.
    """
    for clock in sorted({span.clock for span in spans} - {"measured"}):
        raise BadInput(f"the trace is {clock} and not measured; give the directory of a `meshwright run`.")
    stage_spans: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    traffic_spans: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "stage":
            stage_spans[span.step][span.instruction].append(span)
        elif span.kind in _TRAFFIC:
            traffic_spans[span.step].append(span)
    first = min(stage_spans, default=0)
    complete = [number for number, step in stage_spans.items() if number > first and _is_complete(step, layouts)]
    steps = [stage_spans[number] for number in complete]
    if not steps:
        raise BadInput("the trace has no complete step after the first, which is left out; run the plan for 2 steps.")
    times = {
        name: [stage_seconds(graph.by_name[name], layout, step[name]) for step in steps]
        for name, layout in layouts.items()
    }
    medians = {stage: statistics.median(seconds) for stage, seconds in times.items()}
    if not all(medians.values()):
        raise BadInput("the trace has a stage that took no time; it is not the trace of a run.")
    layout = layouts[GENERATE]
    generation = [span for step in steps for span in step[GENERATE]]
    waves = observe_waves(generation, layout.num_ranks // layout.dp, len(steps))
    if waves:
        batch_size = waves.rows_per_step
    return RunObservation(
        num_steps=len(steps),
        seconds=medians,
        spread={stage: _interquartile(seconds) / medians[stage] for stage, seconds in times.items()},
        refit_seconds=statistics.median(refit_seconds(traffic_spans[number]) for number in complete) or None,
        step_seconds=_step_seconds(
            {n: [*traffic_spans[n], *chain(*stage_spans[n].values())] for n in stage_spans}, complete
        ),
        response_tokens=waves.response_tokens if waves else _tokens(steps, layouts, batch_size, [GENERATE]),
        sequence_tokens=waves.sequence_tokens
        if waves
        else _tokens(steps, layouts, batch_size, [s for s in layouts if _reads_all(graph.by_name[s])]),
        truncated_share=_truncated_share(steps, layouts, batch_size),
        longest_tokens=_longest_tokens(steps),
        turns=observe_turns(generation, layout.num_ranks // layout.dp, batch_size * len(steps)),
        speculation=observed_speculation(draft_counts(generation)),
    )


def observe_workload(workload: Workload, observation: RunObservation) -> Workload:
    """Return the workload that the run observed.

    Prompt and response lengths are scaled to the observed means; responses also keep the observed longest length or
    truncated share. For multi-turn rollouts, the number of turns, tool results and latencies are scaled to their means.
    Drafts are accepted as observed.
    """
    responses, sequences = observation.response_tokens, observation.sequence_tokens
    if responses is None:
        return workload
    tool_tokens, update = 0.0, dict[str, object]()
    if workload.speculation and observation.speculation:
        update["speculation"] = workload.speculation.updated(observation.speculation)
    if workload.turns and observation.turns:
        tool_tokens = observation.turns.tool_tokens
        update["turns"] = observation.turns.scale(workload.turns)
        update["response"] = workload.response.with_mean(responses / observation.turns.num_turns)
    else:
        update["response"] = _responses(workload, responses, observation)
    if sequences is not None:
        update["prompt"] = workload.prompt.with_mean(sequences - responses - tool_tokens)
    return workload.model_copy(update=update)


def _responses(workload: Workload, mean: float, observation: RunObservation) -> LengthSpec:
    """Response lengths with this mean and the observed truncated share, or if that is 0, the observed longest length.

    Where that is not possible, all lengths are scaled to the mean.
    """
    lengths, share = workload.response, observation.truncated_share
    if share == 0 and observation.longest_tokens:
        return lengths.stretched(mean, observation.longest_tokens, workload.batch_size)
    if share is None:
        return lengths.with_mean(mean)
    histogram, longest = lengths.resolve(), lengths.max
    below = [(t, p) for t, p in zip(histogram.tokens, histogram.probabilities, strict=True) if t < longest]
    mean_below = (mean - share * longest) / (1 - share) if share < 1 else 0.0
    if not below or not 1 <= mean_below < longest:
        return lengths.with_mean(mean)
    scaled = LengthSpec(max=longest - 1, histogram=tuple(below)).with_mean(mean_below).resolve()
    pairs = [(t, p * (1 - share)) for t, p in zip(scaled.tokens, scaled.probabilities, strict=True)]
    return LengthSpec(max=lengths.max, histogram=(*pairs, (longest, share)))


def timed_passes_of(stage: Stage) -> tuple[TimedPass, ...]:
    """The timed passes that make up the stage."""
    if stage.generates:
        return TimedPass.PREFILL, TimedPass.DECODE
    return (TimedPass.TRAIN, TimedPass.OPTIMIZER) if stage.trains else (TimedPass.FORWARD,)


def compute_factor(measured: float, predicted: float, doubled: float) -> float:
    """Return the factor on compute time with which `predicted` becomes `measured`, all in seconds.

    `doubled` is the prediction with twice the compute time, so that compute = doubled - predicted. The result is 0 or
    less if no factor is possible.
    """
    return round(1 + (measured - predicted) / (doubled - predicted), _DIGITS) if doubled > predicted else 0.0


def collective_factor(groups: Iterable[Sequence[tuple[float, float, float]]]) -> float | None:
    """Return the factor on the seconds of collectives, or None if the stages do not determine it.

    A stage is (y, x, z): measured minus fixed, predicted compute and predicted collective seconds, as shares of its
    measured seconds. The model is y = f x + c z by least squares, with an unknown factor f for each group and one c for
    all; f is eliminated. c is undetermined if collectives explain little of the residual that no f explains, if the
    sum of squared residuals with the fitted c is more than half of that with c = 1, or if c z is at least the y of some
    stage.
    """
    stages = [tuple(group) for group in groups]
    residuals = [pair for group in stages for pair in _residuals(group)]
    yz, zz = math.fsum(y * z for y, z in residuals), math.fsum(z * z for _, z in residuals)
    if yz <= 0 or yz / math.sqrt(zz) < _MIN_SHARE:
        return None
    fitted = yz / zz
    before, after = (math.fsum((y - c * z) ** 2 for y, z in residuals) for c in (1.0, fitted))
    if after > before / 2 or any(fitted * z >= y for group in stages for y, _, z in group if z):
        return None
    return round(fitted, _DIGITS)


def _residuals(group: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The residuals of y and z after their least-squares projection on x."""
    squares = math.fsum(x * x for _, x, _ in group)
    if len(group) < 2 or not squares:
        return []
    slope_y, slope_z = math.fsum(x * y for y, x, _ in group) / squares, math.fsum(x * z for _, x, z in group) / squares
    return [(y - slope_y * x, z - slope_z * x) for y, x, z in group]


def extra_transfer_seconds(measured: float, predicted: Callable[[float], float]) -> float:
    """Return the extra seconds of every transfer between stages with which the step takes `measured` seconds.

    `predicted` returns the seconds of the step for given extra seconds and is non-decreasing. The result is 0 if the
    step is not slower than predicted.
    """
    if measured <= predicted(0.0) * (1 + _TOLERANCE):
        return 0.0
    low, high = 0.0, measured
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return round(high, _DIGITS)


def empty_table(*, device: str, kind: str, precision: str, num_ranks: int, date: str) -> Table:
    """Return a table without measurements, to which corrections of the analytic model are added."""
    provenance = {
        "device": device,
        "kind": kind,
        "precision": precision,
        "driver": _NOT_PROFILED,
        "libraries": {"torch": _NOT_PROFILED},
        "commit": _NOT_PROFILED,
        "date": date,
        "threads_per_rank": 1,
        "num_ranks": num_ranks,
        "repeats": 1,
    }
    return Table(provenance=Provenance.model_validate(provenance))


def _is_complete(step: Mapping[str, Sequence[Span]], layouts: Mapping[str, Layout]) -> bool:
    """True if every stage ran on all of its ranks, equally often on each if it runs in waves."""
    return all(_ran_equally(step.get(stage, ()), layout.num_ranks) for stage, layout in layouts.items())


def _ran_equally(spans: Sequence[Span], num_ranks: int) -> bool:
    counts = Counter(span.rank for span in spans)
    return len(counts) == num_ranks and len(set(counts.values())) == 1


def _reads_all(stage: Stage) -> bool:
    """True if the stage reads whole sequences, so that its token count is that of prompt and response."""
    return not stage.generates and not stage.trains


def _tokens(
    steps: Sequence[Mapping[str, Sequence[Span]]],
    layouts: Mapping[str, Layout],
    batch_size: float,
    stages: Sequence[str],
) -> float | None:
    """Median over steps of the mean tokens per sequence, from the first stage that records them in every span.

    Every rank of a replica records the tokens of the whole replica.
    """
    for stage in stages:
        if all("num_tokens" in span.facts for step in steps for span in step[stage]):
            ranks = layouts[stage].num_ranks // layouts[stage].dp
            sums = [sum(span.facts["num_tokens"] for span in step[stage]) for step in steps]
            return statistics.median(sums) / ranks / batch_size
    return None


def _truncated_share(
    steps: Sequence[Mapping[str, Sequence[Span]]], layouts: Mapping[str, Layout], batch_size: float
) -> float | None:
    """Truncated share of all responses; None if some generation span does not record it."""
    spans, layout = [span for step in steps for span in step[GENERATE]], layouts[GENERATE]
    if not all(_TRUNCATED in span.facts for span in spans):
        return None
    return math.fsum(span.facts[_TRUNCATED] for span in spans) / (layout.tp * layout.pp) / batch_size / len(steps)


def _longest_tokens(steps: Sequence[Mapping[str, Sequence[Span]]]) -> float | None:
    """Mean over steps of the longest response; None if some generation span does not record it."""
    if not all(_LONGEST in span.facts for step in steps for span in step[GENERATE]):
        return None
    return statistics.fmean(max(span.facts[_LONGEST] for span in step[GENERATE]) for step in steps)


def _step_seconds(spans: Mapping[int, Sequence[Span]], complete: Sequence[int]) -> float:
    """Median over steps of the seconds that a step adds.

    A step counts from the end of the previous one, with which it may overlap, or from its own start if that is later.
    """
    ends = {number: max(span.end_seconds for span in step) for number, step in spans.items()}
    starts = {number: min(span.start_seconds for span in step) for number, step in spans.items()}
    return statistics.median(ends[n] - max(starts[n], ends.get(n - 1, starts[n])) for n in complete)


def _interquartile(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first
