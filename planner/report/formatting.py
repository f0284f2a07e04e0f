"""Formatting of numbers and names for the report. Values are rounded only here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from meshwright.planner.plan.plan import SearchWork
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Offload, Recompute, Schedule, WhileWaiting
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.uncertainty import Interval

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10

_MAGNITUDES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
"""Unit prefixes of counts; thousands are written out."""


def seconds(value: float) -> str:
    """Format seconds with three significant digits or more: 150.2 s, 3.08 s, 12.4 ms."""
    if abs(value) >= 100:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if abs(value) >= 1 or not value else f"{value * 1e3:.3g} ms"


def size(num_bytes: float) -> str:
    """Format bytes in the largest unit that they fill: 79.15 GiB, 12.0 MiB, 1.5 KiB."""
    if abs(num_bytes) >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB" if abs(num_bytes) >= _MIB or not num_bytes else f"{num_bytes / _KIB:.1f} KiB"


def percent(share: float) -> str:
    """Format a share as a percentage: 0.123 as 12.3%."""
    return f"{share:.1%}"


_FIRST_EXPONENT = 999.5
"""Smallest number that a format of three digits writes with an exponent."""


def count(value: float) -> str:
    """Format a count: 1234567 as 1.23 M, 1234 as 1,234, and 1.979e15, above the largest letter, as 1,979 T."""
    for magnitude, letter in _MAGNITUDES:
        if value >= magnitude:
            scaled = value / magnitude
            return f"{scaled:,.0f} {letter}" if scaled >= _FIRST_EXPONENT else f"{scaled:.3g} {letter}"
    return f"{value:,.0f}"


def parameters(number: int) -> str:
    """Format a number of parameters: 6.74B, 124M, 52,000."""
    return count(number).replace(" G", "B").replace(" ", "")


def difference(share: float) -> str:
    """Format a relative difference: +3.2%, -0.5%; one that rounds to zero is +0.0%."""
    return f"{round(share, 3) + 0.0:+.1%}"


def interval(percentiles: Interval, text_of: Callable[[float], str]) -> str:
    """Format the 10th and the 90th percentile of a quantity, each by `text_of`: 34.93 s to 42.03 s."""
    return f"{text_of(percentiles.p10)} to {text_of(percentiles.p90)}"


def consecutive(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of consecutive numbers."""
    ordered = sorted(numbers)
    first = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            yield ordered[first], ordered[index - 1]
            first = index


def ranks(numbers: Iterable[int]) -> str:
    """Format ranks, with consecutive ones as ranges: 0-7, 12."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in consecutive(numbers))


def schedule(value: Schedule) -> str:
    """Describe the settings of a schedule that differ from their defaults, after its slots or micro-batches."""
    settings = [_batching(value)]
    if value.recompute is not Recompute.NONE:
        settings.append(f"{value.recompute} recomputation")
    if value.rows:
        settings.append(f"{' and '.join(map(str, value.rows))} rows split by speed")
    if value.batches_in_flight > 1:
        settings.append(f"{value.batches_in_flight} batches in flight")
    if value.overcommit:
        settings.append(f"{value.overcommit} prompts overcommitted")
    if value.while_waiting is not WhileWaiting.KEEP:
        settings.append("slots released while tools answer")
    if value.draft_tokens:
        settings.append(f"drafts of {value.draft_tokens} tokens")
    if value.chunk_tokens:
        settings.append(f"chunks of {value.chunk_tokens} tokens")
    if value.offload is not Offload.NONE:
        settings.append(f"{value.offload} offloaded")
    return ", ".join(settings)


def _batching(schedule: Schedule) -> str:
    if schedule.generation_slots:
        return f"{schedule.generation_slots} slots"
    return (
        f"{schedule.micro_batch_tokens:,} tokens"
        if schedule.micro_batch_tokens
        else f"{schedule.micro_batch_size} rows"
    )


def setting(values: Mapping[str, object]) -> str:
    """Format the values of a what-if setting, by the last part of each field's path."""
    return ", ".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())


def step(steps_ahead: int) -> str:
    """The step that a stage works on in period n."""
    return f"step n+{steps_ahead}" if steps_ahead else "step n"


COLOURS = tuple(f"c-{number}" for number in range(7))
"""The CSS classes of the colours of stages, in the order of PPO's stages."""


def colour(name: str, graph: StageGraph) -> str:
    """The CSS class of the colour of a stage, a refit or a wait for one of them.

    It is the same in every chart, and for a stage of PPO in every algorithm. Other stages have the unused colours; if
    there are none, colours repeat.
    """
    if name.startswith("refit"):
        return "c-refit"
    stage = next((word for word in name.split() if word in graph.position), None)
    if stage is None:
        return "c-other"
    not_in_ppo = [one for one in graph.names if one not in PPO_GRAPH.position]
    if stage not in not_in_ppo:
        return COLOURS[PPO_GRAPH.position[stage]]
    unused_colours = [one for one, of_ppo in zip(COLOURS, PPO_GRAPH.names, strict=True) if of_ppo not in graph.position]
    colours = unused_colours or list(COLOURS)
    return colours[not_in_ppo.index(stage) % len(colours)]


def search_work(work: SearchWork) -> str:
    """A line on the work of a search."""
    return (
        f"search: costed the time of {work.num_time_costs:,} choices and the memory of {work.num_memory_costs:,}, "
        f"simulated {work.num_generations:,} generations, pruned {work.num_too_slow:,} choices as too slow; "
        f"solved {work.num_models} CP-SAT models in {work.deterministic_time:.2f} units of deterministic time"
    )
