"""What a run's trace says of stages, lengths and the table, without asking any cost model.

Only whole steps after the first count: the first warms the device up, and a step that was cut short has no stage times.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from meshwright.profiles.environment.turns_observation import TurnsObservation, observe_turns
from meshwright.profiles.environment.waves_observation import observe_waves
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import GENERATE, Stage, StageGraph
from meshwright.profiles.table import Body, Provenance, Table
from meshwright.profiles.trace import Span
from meshwright.profiles.trace_durations import refit_seconds, stage_seconds
from meshwright.profiles.workload import Workload

_DIGITS = 9
"""Decimals of a factor: far below the spread of any measurement, far above the rounding of a sum."""

_AGREES = 1e-6
"""Relative difference of step times below which nothing is corrected."""

_BISECTIONS = 40
"""Halvings of the seconds of a step, after which no more digits of an extra are left than are kept."""

_LEAST_SHARE = 0.05
"""Of a stage's seconds, below which noise would decide a factor of collectives."""

_TRAFFIC = ("refit", "send", "receive")

_TRUNCATED, _LONGEST = "num_truncated", "num_longest_tokens"

_NOT_PROFILED = "not profiled"


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """A run's whole steps after the first. Tokens are per sequence, None where the trace does not tell them."""

    num_steps: int
    seconds: Mapping[str, float]  # by stage: median over steps
    spread: Mapping[str, float]  # by stage: interquartile range of the same, over the median
    refit_seconds: float | None  # median over steps of all refits together; None without one
    step_seconds: float  # median over steps, from the first instruction's start to the last one's end
    response_tokens: float | None  # median over steps of the mean
    sequence_tokens: float | None  # prompt and response together
    truncated_share: float | None  # of responses that were cut at the longest length, over all steps
    longest_tokens: float | None  # mean over steps of the longest response
    turns: TurnsObservation | None = None  # where rollouts have several


def observe(
    spans: Sequence[Span], layouts: Mapping[str, Layout], graph: StageGraph, batch_size: float
) -> RunObservation:
    """The stages' times and lengths in a trace. Raises BadInput for a trace that is not measured, or without a step."""
    for clock in sorted({span.clock for span in spans} - {"measured"}):
        raise BadInput(f"the trace is {clock} and not measured; give the directory of a `meshwright run`.")
    found: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    others: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "stage":
            found[span.step][span.instruction].append(span)
        elif span.kind in _TRAFFIC:
            others[span.step].append(span)
    first = min(found, default=0)
    whole = [number for number, step in found.items() if number > first and _is_whole(step, layouts)]
    steps = [found[number] for number in whole]
    if not steps:
        raise BadInput("the trace has no whole step after the first, which is left out; run the plan for 2 steps.")
    times = {
        name: [stage_seconds(graph.by_name[name], layout, step[name]) for step in steps]
        for name, layout in layouts.items()
    }
    medians = {stage: statistics.median(seconds) for stage, seconds in times.items()}
    if not all(medians.values()):
        raise BadInput("the trace has a stage that took no time; it is not the trace of a run.")
    layout = layouts[GENERATE]
    drawn = [span for step in steps for span in step[GENERATE]]
    waves = observe_waves(drawn, layout.num_ranks // layout.dp, len(steps))
    if waves:
        batch_size = waves.rows_per_step
    return RunObservation(
        num_steps=len(steps),
        seconds=medians,
        spread={stage: _interquartile(seconds) / medians[stage] for stage, seconds in times.items()},
        refit_seconds=statistics.median(refit_seconds(others[number]) for number in whole) or None,
        step_seconds=_step_seconds({n: [*others[n], *chain(*found[n].values())] for n in found}, whole),
        response_tokens=waves.response_tokens if waves else _tokens(steps, layouts, batch_size, [GENERATE]),
        sequence_tokens=waves.sequence_tokens
        if waves
        else _tokens(steps, layouts, batch_size, [s for s in layouts if _reads_all(graph.by_name[s])]),
        truncated_share=_truncated_share(steps, layouts, batch_size),
        longest_tokens=_longest_tokens(steps),
        turns=observe_turns(drawn, layout.num_ranks // layout.dp, batch_size * len(steps)),
    )


def met(workload: Workload, observation: RunObservation) -> Workload:
    """The workload that the run met: prompts and responses scaled to the means that the trace tells, with the longest
    response and the share of those that were cut; of several turns their number, answers and latencies by their means.
    """
    responses, sequences = observation.response_tokens, observation.sequence_tokens
    if responses is None:
        return workload
    told, update = 0.0, dict[str, object]()
    if workload.turns and observation.turns:
        told = observation.turns.told_tokens
        update["turns"] = observation.turns.met(workload.turns)
        update["response"] = workload.response.with_mean(responses / observation.turns.num_turns)
    else:
        update["response"] = _responses(workload, responses, observation)
    if sequences is not None:
        update["prompt"] = workload.prompt.with_mean(sequences - responses - told)
    return workload.model_copy(update=update)


def _responses(workload: Workload, mean: float, observation: RunObservation) -> LengthSpec:
    """Responses with this mean, and with the share of those that were cut, or where none was, with the longest; all are
    scaled where that is not possible."""
    lengths, share = workload.response, observation.truncated_share
    if share == 0 and observation.longest_tokens:
        return lengths.stretched(mean, observation.longest_tokens, workload.batch_size)
    if share is None:
        return lengths.with_mean(mean)
    known, longest = lengths.resolve(), lengths.max
    below = [(t, p) for t, p in zip(known.tokens, known.probabilities, strict=True) if t < longest]
    others = (mean - share * longest) / (1 - share) if share < 1 else 0.0
    if not below or not 1 <= others < longest:
        return lengths.with_mean(mean)
    rest = LengthSpec(max=longest - 1, histogram=tuple(below)).with_mean(others).resolve()
    pairs = [(t, p * (1 - share)) for t, p in zip(rest.tokens, rest.probabilities, strict=True)]
    return LengthSpec(max=lengths.max, histogram=(*pairs, (longest, share)))


def bodies_of(stage: Stage) -> tuple[Body, ...]:
    """The bodies whose times make up the stage."""
    if stage.generates:
        return Body.PREFILL, Body.DECODE
    return (Body.TRAIN, Body.OPTIMIZER) if stage.trains else (Body.FORWARD,)


def factor(measured: float, predicted: float, doubled: float) -> float:
    """What to multiply computing by so that `predicted` becomes `measured`, all in seconds; 0 or less when nothing can.

    `doubled` is the prediction when computing takes twice as long: computing = doubled - predicted, and the rest stays.
    """
    return round(1 + (measured - predicted) / (doubled - predicted), _DIGITS) if doubled > predicted else 0.0


def traffic_factor(groups: Iterable[Sequence[tuple[float, float, float]]]) -> float | None:
    """What to multiply the seconds of collectives by, or None when the stages do not tell it.

    Each group's stages compute with one unknown factor f of their own, and share the factor c of collectives: measured
    minus fixed seconds y = f x + c z, least squares, f eliminated. A stage is (y, x, z): measured minus fixed,
    computing and collectives, in shares of its measured seconds. c is not told where collectives explain little of what
    no f can, where c leaves more than half of that, and where it takes more of a stage than was measured.
    """
    stages = [tuple(group) for group in groups]
    left = [pair for group in stages for pair in _without_computing(group)]
    across, squares = math.fsum(y * z for y, z in left), math.fsum(z * z for _, z in left)
    if across <= 0 or across / math.sqrt(squares) < _LEAST_SHARE:
        return None
    found = across / squares
    before, after = (math.fsum((y - c * z) ** 2 for y, z in left) for c in (1.0, found))
    if after > before / 2 or any(found * z >= y for group in stages for y, _, z in group if z):
        return None
    return round(found, _DIGITS)


def _without_computing(group: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """What is left of (y, z) when their parts in proportion to x are taken away."""
    squares = math.fsum(x * x for _, x, _ in group)
    if len(group) < 2 or not squares:
        return []
    in_y, in_z = math.fsum(x * y for y, x, _ in group) / squares, math.fsum(x * z for _, x, z in group) / squares
    return [(y - in_y * x, z - in_z * x) for y, x, z in group]


def extra_seconds(measured: float, predicted: Callable[[float], float]) -> float:
    """What every handover takes beyond its prediction, so that the step takes `measured`; 0 when it takes no longer.

    `predicted` gives the seconds of the step from this; it never falls.
    """
    if measured <= predicted(0.0) * (1 + _AGREES):
        return 0.0
    low, high = 0.0, measured
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return round(high, _DIGITS)


def unprofiled(*, device: str, kind: str, precision: str, num_ranks: int, date: str) -> Table:
    """A table without a measurement: what corrections of the equations alone are written into."""
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


def _is_whole(step: Mapping[str, Sequence[Span]], layouts: Mapping[str, Layout]) -> bool:
    """Whether every rank of every stage ran it; as often as the others where it comes in waves."""
    return all(_is_of_all(step.get(stage, ()), layout.num_ranks) for stage, layout in layouts.items())


def _is_of_all(spans: Sequence[Span], num_ranks: int) -> bool:
    times = Counter(span.rank for span in spans)
    return len(times) == num_ranks and len(set(times.values())) == 1


def _reads_all(stage: Stage) -> bool:
    """Whether the stage's tokens are those of whole sequences."""
    return not stage.generates and not stage.trains


def _tokens(
    steps: Sequence[Mapping[str, Sequence[Span]]],
    layouts: Mapping[str, Layout],
    batch_size: float,
    stages: Sequence[str],
) -> float | None:
    """Median over steps of the mean tokens of a sequence, from the first of the stages whose every span tells them.

    Every rank of a replica tells the tokens of the whole replica.
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
    """Of all responses, where every span of the generation tells how many it cut."""
    spans, layout = [span for step in steps for span in step[GENERATE]], layouts[GENERATE]
    if not all(_TRUNCATED in span.facts for span in spans):
        return None
    return math.fsum(span.facts[_TRUNCATED] for span in spans) / (layout.tp * layout.pp) / batch_size / len(steps)


def _longest_tokens(steps: Sequence[Mapping[str, Sequence[Span]]]) -> float | None:
    """Mean over steps of the longest response, where every span of the generation tells its own."""
    if not all(_LONGEST in span.facts for step in steps for span in step[GENERATE]):
        return None
    return statistics.fmean(max(span.facts[_LONGEST] for span in step[GENERATE]) for step in steps)


def _step_seconds(spans: Mapping[int, Sequence[Span]], whole: Sequence[int]) -> float:
    """What a step adds: from the end of the one before, with which it may overlap, or from its own beginning."""
    ends = {number: max(span.end_seconds for span in step) for number, step in spans.items()}
    begins = {number: min(span.start_seconds for span in step) for number, step in spans.items()}
    return statistics.median(ends[n] - max(begins[n], ends.get(n - 1, begins[n])) for n in whole)


def _interquartile(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first
