"""The controls of the page: fields of the facts that may be changed, with the values of the job and of a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import Cluster, Link, device_names, network_named, network_names
from meshwright.runtime.explorer.state import State


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control: the name of its field, its label, what the job has, and the value that it shows.

    With `options` it is a list to choose from, else a number from `minimum`, in steps of `step`.
    """

    name: str
    label: str
    given: str
    value: str
    options: tuple[str, ...] = ()
    minimum: str = "1"
    step: str = "1"


def controls_of(facts: Facts, state: State) -> tuple[Control, ...]:
    """The controls for the facts of a job, with the values of a state."""
    shown = dict(state.settings)
    return tuple(_with_value(control, shown) for control in _controls(facts))


@dataclass(frozen=True, kw_only=True)
class GridField:
    """A field of which several values can be planned: its label, and the values that its input has at first."""

    name: str
    label: str
    value: str
    example: str


def grid_fields_of(facts: Facts, state: State) -> tuple[GridField, ...]:
    """The fields of the form of a grid, with the values of a state's grid, or else a few of each."""
    shown = {path: ",".join(texts) for path, texts in state.grid}
    fields = (replace(field, value=shown.get(field.name, "")) if shown else field for field in _grid_fields(facts))
    known = tuple(fields)
    others = (
        GridField(name=name, label=name, value=value, example="")
        for name, value in shown.items()
        if name not in {field.name for field in known}
    )
    return (*known, *others)


def _grid_fields(facts: Facts) -> Iterator[GridField]:
    if isinstance(facts.cluster, Cluster):
        nodes = facts.cluster.nodes
        few = ",".join(str(number) for number in sorted({max(1, nodes // 2), nodes, 2 * nodes, 4 * nodes}))
        yield GridField(name="cluster.nodes", label="numbers of nodes", value=few, example=few)
    yield GridField(name="staleness", label="staleness", value="", example="0,1,2")
    if isinstance(facts.cluster, Cluster):
        yield GridField(name="cluster.device", label="devices", value="", example="h100-sxm,h200")


def other_settings(facts: Facts, state: State) -> tuple[tuple[str, str], ...]:
    """The changed fields of a state that have no control, which the page keeps as they are."""
    names = {control.name for control in _controls(facts)}
    return tuple((path, text) for path, text in state.settings if path not in names)


def _with_value(control: Control, shown: dict[str, str]) -> Control:
    value = shown.get(control.name, control.value)
    is_unlisted = control.options and value not in control.options
    return replace(control, value=value, options=(value, *control.options) if is_unlisted else control.options)


def _controls(facts: Facts) -> Iterator[Control]:
    cluster, workload = facts.cluster, facts.workload
    if isinstance(cluster, Cluster):
        yield _number("cluster.nodes", "nodes", cluster.nodes)
        yield _number("cluster.ranks_per_node", "devices in a node", cluster.ranks_per_node)
        yield _choice("cluster.device", "device", cluster.device.name, device_names())
        yield _choice("cluster.inter_node", "network between nodes", _name_of(cluster.inter_node), network_names())
    yield _number("workload.batch_size", "sequences a step", workload.batch_size)
    yield _number("workload.group_size", "samples of a prompt", workload.group_size)
    for what in ("prompt", "response"):
        lengths = workload.prompt_lengths if what == "prompt" else workload.response_lengths
        yield _scale(f"workload.{what}.scale", f"{what} lengths × (given: mean {lengths.mean:,.0f} tokens)")
    yield Control(
        name="staleness",
        label="staleness, at most this many updates",
        given=str(facts.staleness),
        value=str(facts.staleness),
        minimum="0",
    )
    yield _choice("engine", "generation engine", facts.engine, get_args(EngineName))
    for index, load in enumerate(facts.rewards):
        yield _scale(f"rewards.{index}.latency_seconds.scale", f"latency of {load.name} × (given: {_mean(load)})")


def _number(name: str, label: str, given: int) -> Control:
    return Control(name=name, label=label, given=str(given), value=str(given))


def _mean(load: RewardLoad) -> str:
    """The mean latency of a reward, as the job states it where it does."""
    stated = load.latency_seconds.fixed or load.latency_seconds.mean
    return f"mean {stated or load.latency_seconds.resolve().mean:.3g} s"


def _scale(name: str, label: str) -> Control:
    return Control(name=name, label=label, given="1", value="1", minimum="0.01", step="any")


def _choice(name: str, label: str, given: str, names: Sequence[str]) -> Control:
    options = tuple(names) if given in names else (given, *names)
    return Control(name=name, label=label, given=given, value=given, options=options)


def _name_of(link: Link) -> str:
    """The name of a network with these facts, or a description of it."""
    for name in network_names():
        if network_named(name) == link:
            return name
    return f"as in the job ({link.bytes_per_second / 1e9:.3g} GB/s)"
