"""The command that lists the known devices and networks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.profiles.hardware import (
    device_named,
    device_names,
    network_named,
    network_names,
    network_source,
    usual_network,
)
from meshwright.runtime.api.job_inputs import known_hardware
from meshwright.runtime.cli.options import AsJson

EXAMPLES = "Example: meshwright devices --json"

_GIB, _GIGA, _TERA, _MICRO = 2**30, 1e9, 1e12, 1e-6


def devices(as_json: AsJson = False) -> None:
    """List the devices and networks that a job may name, with their data."""
    if as_json:
        typer.echo(json.dumps(known_hardware(), indent=2))
    else:
        Console().print(_device_table())
        Console().print(_network_table())
        for sentence in _usual_networks():
            Console(soft_wrap=True).print(sentence, highlight=False)


def _device_table() -> Table:
    headings = ("device", "GiB", "GB/s", "bf16 TF/s", "fp32 TF/s", "in node GB/s", "host GB/s")
    table = _table("devices, by their datasheets", headings)
    for name in device_names():
        device, intra_node, host = device_named(name)
        peaks = device.flops_per_second
        numbers = (
            device.memory_bytes / _GIB,
            device.memory_bytes_per_second / _GIGA,
            peaks["bf16"] / _TERA,
            peaks["fp32"] / _TERA,
            intra_node.bytes_per_second / _GIGA,
            host.bytes_per_second / _GIGA,
        )
        table.add_row(name, *(f"{number:,.0f}" for number in numbers))
    table.caption = (
        "Links are those of one device in one direction. The device local is this machine. Names may have any case, or "
        "be those that nvidia-smi prints. --json has nicknames and sources."
    )
    return table


def _network_table() -> Table:
    table = _table("networks between nodes", ("network", "GB/s a device", "latency us", "source"))
    for name in network_names():
        link = network_named(name)
        numbers = (link.bytes_per_second / _GIGA, link.seconds / _MICRO)
        table.add_row(name, *(f"{number:,.4g}" for number in numbers), network_source(name))
    return table


def _usual_networks() -> Iterator[str]:
    """Yield a sentence for each network that is the usual one of some devices."""
    for name in network_names():
        devices = [device for device in device_names() if usual_network(device) == name]
        if devices:
            yield f"Jobs on {', '.join(devices)} that name no network have {name}."


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column, heading in enumerate(headings):
        is_text = column == 0 or heading == "source"
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=column == 0)
    return table
