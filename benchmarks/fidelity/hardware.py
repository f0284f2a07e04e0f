"""The clusters that published rows were measured on, as far as they say."""

from __future__ import annotations

from benchmarks.fidelity.rows import Skip
from meshwright.profiles.hardware import Cluster, device_named, network_named

_DEVICES = {
    "A100": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "A800-80GB": "a800",
    "H100": "h100-sxm",
    "H100-80GB": "h100-sxm",
    "DGX-H100": "h100-sxm",
    "DGX-B200": "b200",
    "B200": "b200",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "DGX-GB200": "gb200",
    "GB200": "gb200",
    "DGX-B300": "b300",
    "DGX-GB300": "gb300",
    "GB300": "gb300",
    "H200": "h200",
    "GH200-96GB": "gh200",
    "H20": "h20",
    "L40S": "l40s",
    "RTX 6000 Pro Blackwell": "rtx-6000-pro",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
}
_FABRICS = {
    "a100-80gb": "ib-hdr-200",
    "a100-40gb": "ib-hdr-200",
    "a800": "ib-hdr-200",
    "h100-sxm": "ib-ndr-400",
    "h200": "ib-ndr-400",
    "gh200": "ib-ndr-400",
    "h20": "ib-ndr-400",
    "b200": "ib-ndr-400",
    "gb200": "ib-ndr-400",
    "b300": "ib-xdr-800",
    "gb300": "ib-xdr-800",
    "l40s": "ib-hdr-200",
    "rtx-6000-pro": "ib-ndr-400",
}
"""What the vendors' reference machines of each device carry, for rows that do not state a fabric."""

_RANKS_PER_NODE = {"gb200": 72, "gb300": 72}
"""Ranks behind one switch of the fast links, where that is not 8."""


def cluster_of(gpu: str, num_ranks: int, network: str | None = None) -> Cluster:
    """Enough nodes of the published device for `num_ranks`; skips a device that is not known."""
    if gpu not in _DEVICES:
        raise Skip(f"device {gpu} not known")
    name = _DEVICES[gpu]
    device, intra_node, host = device_named(name)
    per_node = min(num_ranks, _RANKS_PER_NODE.get(name, 8))
    return Cluster(
        nodes=-(-num_ranks // per_node),
        ranks_per_node=per_node,
        device=device,
        intra_node=intra_node,
        inter_node=network_named(network or _FABRICS[name]),
        host=host,
        host_memory_bytes=2**40,
    )
