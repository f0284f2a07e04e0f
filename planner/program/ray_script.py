"""A script that runs a plan on a Ray cluster: its variables, and a call of `runtime.launch.ray_job`."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.launch_scripts import LaunchPaths, portable_path, rank_table


def ray_script(plan: Plan, paths: LaunchPaths) -> Mapping[str, str]:
    """Return one Python script, by file name; it takes the options of `meshwright run`."""
    cluster = plan.facts.cluster
    table = "".join(rank_table(plan, node) for node in range(cluster.nodes))
    return {
        "ray_job.py": f"""\
#!/usr/bin/env python3
# Usage: ray job submit --working-dir . -- python ray_job.py --steps 20 --out /shared/run
# It reserves {cluster.nodes} nodes of the Ray cluster and starts `meshwright run` on each.
# Every node needs meshwright[run] beside Ray, as in the container image with Ray added.
{table}import os
import sys

from meshwright.runtime.launch.ray_job import RayNodes, main

# What differs from cluster to cluster; a variable of the environment has precedence. Relative paths start at the
# working directory of the Ray job, which Ray copies to every node; models and --out are on a shared file system.
PLAN = os.environ.get("PLAN", {str(portable_path(paths.plan))!r})
JOB = os.environ.get("JOB", {str(portable_path(paths.job))!r})
MODELS = {list(paths.model_options)!r}  # like ["--model", "actor=/data/models/actor"]
PORT = int(os.environ.get("PORT", "0"))  # of the rendezvous on the first node; 0: a free one
PATIENCE_SECONDS = float(os.environ.get("PATIENCE_SECONDS", "600"))  # until the cluster has the nodes

if __name__ == "__main__":
    main(
        RayNodes(
            nodes={cluster.nodes},
            ranks_per_node={cluster.ranks_per_node},
            kind={cluster.kind!r},
            port=PORT,
            patience_seconds=PATIENCE_SECONDS,
        ),
        [PLAN, JOB, *MODELS, *sys.argv[1:]],
    )
"""
    }
