"""The devices command: all that a job may name, with where it comes from."""

from __future__ import annotations

import json

from meshwright.profiles.hardware import device_names, network_named, network_names
from tests.runtime.command import Call


def test_every_device_and_network_is_listed(call: Call) -> None:
    told = call("devices").out
    assert [name for name in (*device_names(), *network_names()) if name not in told] == []


def test_the_facts_are_told_as_data_with_their_sources(call: Call) -> None:
    found = json.loads(call("devices", "--json").out)
    assert tuple(device["name"] for device in found["devices"]) == device_names()
    assert tuple(network["name"] for network in found["networks"]) == network_names()
    assert all(one["source"] for kind in found.values() for one in kind)


def test_a_network_has_its_bandwidth_in_gigabytes_and_its_latency_in_microseconds(call: Call) -> None:
    rows = {words[0]: words[1:3] for words in map(str.split, call("devices").out.splitlines()) if len(words) > 2}
    for name in network_names():
        link = network_named(name)
        assert rows[name] == [f"{link.bytes_per_second / 1e9:,.4g}", f"{link.seconds * 1e6:,.4g}"]
