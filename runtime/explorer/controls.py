"""The controls of the page: fields of the facts that may be changed, with the values of the job and of a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.job.job import Facts
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
        yield _number("cluster.ranks_per_node", "devices a node", cluster.ranks_per_node)
        yield _choice("cluster.device", "device", cluster.device.name, device_names())
        yield _choice("cluster.inter_node", "network between nodes", _name_of(cluster.inter_node), network_names())
    yield _number("workload.batch_size", "sequences a step", workload.batch_size)
    yield _number("workload.group_size", "samples of a prompt", workload.group_size)
    for what in ("prompt", "response"):
        yield Control(
            name=f"workload.{what}.scale", label=f"{what}s, times", given="1", value="1", minimum="0.01", step="any"
        )
    yield Control(
        name="staleness",
        label="staleness, updates at most",
        given=str(facts.staleness),
        value=str(facts.staleness),
        minimum="0",
    )


def _number(name: str, label: str, given: int) -> Control:
    return Control(name=name, label=label, given=str(given), value=str(given))


def _choice(name: str, label: str, given: str, names: Sequence[str]) -> Control:
    options = tuple(names) if given in names else (given, *names)
    return Control(name=name, label=label, given=given, value=given, options=options)


def _name_of(link: Link) -> str:
    """The name of a network with these facts, or a description of it."""
    for name in network_names():
        if network_named(name) == link:
            return name
    return f"as in the job ({link.bytes_per_second / 1e9:.3g} GB/s)"
