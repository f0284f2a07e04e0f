"""A plan on the nodes of a Ray cluster: one actor on each, which starts `meshwright run` there.

Ray reserves the nodes with their devices, and shows what all of them print. It carries no message of the run: the nodes
meet at a rendezvous as they do without Ray.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.launch.rendezvous import TOKEN_VARIABLE, Rendezvous, listening_socket

_POLL_SECONDS, _FIRST_SECONDS, _NEXT_SECONDS = 1.0, 5.0, 60.0
"""Seconds between two looks at the nodes, before the first message of a wait, and between two messages."""
_PROGRAM = """
import signal
from meshwright.planner.search.parent_death import end_with_parent
end_with_parent({parent}, signal.SIGTERM)  # the run then saves a checkpoint
from meshwright.runtime.cli.main import main
main()
"""
"""The command line in a process that is asked to stop when its actor ends."""


@dataclass(frozen=True, kw_only=True)
class RayNodes:
    """The nodes of a plan, to be reserved in a Ray cluster."""

    nodes: int
    ranks_per_node: int
    kind: str
    """Device that the ranks compute on, cpu or cuda."""
    port: int = 0
    """Port of the rendezvous on the first node; 0 picks a free one."""
    patience_seconds: float = 600.0
    """Seconds to wait until the cluster has the nodes."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a node, in Ray's words."""
        resources = {"CPU": float(self.ranks_per_node)}
        return {**resources, "GPU": float(self.ranks_per_node)} if self.kind == "cuda" else resources


def main(nodes: RayNodes, options: Sequence[str]) -> None:
    """Run a plan on the Ray cluster that this process can reach, and exit with the code of the run.

    `options` are those of `meshwright run`, which start with the files of plan and job.
    """
    try:
        code = run_on_ray(nodes, options)
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    sys.exit(code)


def run_on_ray(nodes: RayNodes, options: Sequence[str]) -> int:
    """Reserve the nodes, run `meshwright run` on each, and return the exit code of the run.

    Raises RunFailed if the cluster does not have the nodes in time.
    """
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    group = placement_group([nodes.bundle] * nodes.nodes, strategy="STRICT_SPREAD")
    try:
        _wait_for_nodes(group, nodes)
        actors = [
            ray.remote(_Node)
            .options(
                num_cpus=nodes.bundle["CPU"],
                num_gpus=nodes.bundle.get("GPU", 0.0),
                max_concurrency=2,  # `stop` is called while `run` runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(nodes.nodes)
        ]
        address, port = ray.get(actors[0].endpoint.remote(nodes.port))
        rendezvous = Rendezvous(nodes=nodes.nodes, address=address, port=port).endpoint
        place = None if ray.get_runtime_context().runtime_env.get("working_dir") else os.getcwd()
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16),
        }
        common = (*options, "--nodes", str(nodes.nodes), "--rendezvous", rendezvous, "--node-rank")
        running = {
            actor.run.remote((*common, str(number)), environment, place): number for number, actor in enumerate(actors)
        }
        return _outcome(actors, running)
    finally:
        remove_placement_group(group)


class _Node:
    """The actor of a node. The run on it ends with the actor, which Ray ends with its job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def endpoint(self, port: int) -> tuple[str, int]:
        """Return this node's address in the Ray cluster, and the port or a free one."""
        address = ray.util.get_node_ip_address()
        if port:
            return address, port
        with listening_socket(address, 0) as server:
            return address, server.getsockname()[1]

    def run(self, options: Sequence[str], environment: Mapping[str, str], directory: str | None) -> int:
        """Run `meshwright run` in a directory, by default the actor's, and return its exit code."""
        program = _PROGRAM.format(parent=os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, "run", *options], env={**os.environ, **environment}, cwd=directory
        )
        return self._process.wait()

    def stop(self, number: int) -> None:
        """Send a signal to the run."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _wait_for_nodes(group: PlacementGroup, nodes: RayNodes) -> None:
    """Wait until the placement group is reserved, and say after a few seconds and then regularly what is missing."""
    began, pause = time.monotonic(), _FIRST_SECONDS
    needed = " and ".join(f"{number:g} {name}" for name, number in nodes.bundle.items())
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + nodes.patience_seconds))
    while not group.wait(max(0.1, min(pause, began + nodes.patience_seconds - time.monotonic()))):
        pause = _NEXT_SECONDS
        able = sum(
            all(node["Resources"].get(name, 0.0) >= number for name, number in nodes.bundle.items())
            for node in ray.nodes()
            if node["Alive"]
        )
        found = f"the Ray cluster has {able} of the {nodes.nodes} nodes with {needed} that the plan needs"
        if time.monotonic() - began >= nodes.patience_seconds:
            raise RunFailed(
                f"{found}, or others use them, after {nodes.patience_seconds:g} s; add nodes with `ray start`, or plan "
                "the job for fewer."
            )
        sys.stderr.write(f"{found}, or others use them; waiting until {until}\n")


def _outcome(actors: Sequence[Any], running: dict[Any, int]) -> int:
    """Wait for the runs of all nodes; return the exit code of the one that ends last, since with --max-restarts the
    others continue without a lost one.

    Bad input on one node, which the others may not have, ends them too, and its code is returned. A terminating signal
    is passed on.
    """
    requested: list[int] = []

    def request(number: int, _frame: FrameType | None) -> None:
        requested.append(number)

    old_handlers = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    code = 0
    try:
        while running:
            done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
            for reference in done:
                ended = _code_of(reference, running.pop(reference))
                if ended == BadInput.exit_code and running:
                    requested.append(signal.SIGKILL)
                code = code if code == BadInput.exit_code else ended
            while requested:
                number = requested.pop(0)
                for actor in actors:
                    actor.stop.remote(number)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    return code


def _code_of(reference: Any, node: int) -> int:
    """Return the exit code of a node's run, or that of a failed run if Ray has lost the node."""
    try:
        code = int(ray.get(reference))
    except ray.exceptions.RayError as error:
        sys.stderr.write(f"node {node} is lost: {str(error).splitlines()[0]}\n")
        return RunFailed.exit_code
    sys.stderr.write(f"node {node} ended with exit code {code}\n")
    return code if code >= 0 else 128 - code
