"""Scripts that launch a plan on its nodes, with torchrun or Slurm, and the parts that all launch scripts share.

What differs from cluster to cluster is a variable at the head of a script; no path of the machine that writes a script
is in it. Local rank r of a node uses the r-th visible device, and the ranks of a node are consecutive, so the order of
the devices is the order of the plan's ranks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class LaunchPaths:
    """The places of plan, job and models that a script starts from; all can be changed at its head.

    `models` are directories on the machines that run the plan, by role, where they differ from the job's.
    """

    plan: Path
    job: Path
    models: Mapping[str, str | os.PathLike[str]]

    @property
    def model_options(self) -> tuple[str, ...]:
        """The directories of the models as options of `meshwright run`."""
        return tuple(word for role, path in self.models.items() for word in ("--model", f"{role}={os.fspath(path)}"))


def portable_path(path: Path) -> Path:
    """Return a path as a default for other machines: relative as the user gave it, else the file's name alone."""
    return Path(path.name) if path.is_absolute() else path


_INTERFACES = """\
# Gloo uses the interface of the rendezvous and NCCL chooses its own; if that is not the fast one:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
"""


def torchrun_scripts(plan: Plan, paths: LaunchPaths) -> Mapping[str, str]:
    """Return one script per node, by file name; each takes HOST:PORT and the options of `meshwright run`."""
    return {f"node{node}.sh": _node_script(plan, node, paths) for node in range(plan.facts.cluster.nodes)}


def slurm_script(plan: Plan, paths: LaunchPaths) -> Mapping[str, str]:
    """Return one batch script, by file name; it submits itself, and takes the options of `meshwright run`."""
    cluster = plan.facts.cluster
    devices = f"#SBATCH --gpus-per-node={cluster.ranks_per_node}\n" if cluster.kind == "cuda" else ""
    count = cluster.nodes
    table = "".join(rank_table(plan, node) for node in range(count))
    return {
        "run.sbatch": f"""\
#!/usr/bin/env bash
#SBATCH --job-name=meshwright
#SBATCH --nodes={count}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cluster.ranks_per_node}
#SBATCH --signal=USR1@{notice_seconds(plan)}
{devices}#
# Usage: ./run.sbatch --steps 20 --out run, which submits itself, or sbatch run.sbatch --steps 20 --out run.
# Shortly before its time limit the run saves a checkpoint and exits with code 75; submit it again with --resume.
# Slurm's number of a node is the plan's.
{table}set -euo pipefail

# What differs from cluster to cluster; a variable of the environment has precedence. Relative paths start at the
# directory in which the job is submitted, which all nodes share.
{path_variables(paths)}
PARTITION=${{PARTITION:-}}  # empty: the default of the cluster
ACCOUNT=${{ACCOUNT:-}}
TIME_LIMIT=${{TIME_LIMIT:-}}  # like 08:00:00
IMAGE=${{IMAGE:-}}  # container image for srun with pyxis, like registry.example.com#meshwright:0.1.0; empty: none
MOUNTS=${{MOUNTS:-$PWD:$PWD}}  # directories that the container sees, like /data:/data,/home/me:/home/me
PORT=${{PORT:-}}  # of the rendezvous on the first node; empty: one that follows from the number of the job

if [[ -z ${{SLURM_JOB_ID:-}} ]]; then
  exec sbatch ${{PARTITION:+--partition="$PARTITION"}} ${{ACCOUNT:+--account="$ACCOUNT"}} \\
    ${{TIME_LIMIT:+--time="$TIME_LIMIT"}} "${{BASH_SOURCE[0]}}" "$@"
fi

{environment(plan)}
{_INTERFACES}
# The nodes authenticate each other with this token; srun passes it to them.
export MESHWRIGHT_TOKEN=${{MESHWRIGHT_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
rendezvous=${{hosts%%$'\\n'*}}:${{PORT:-$((20000 + SLURM_JOB_ID % 10000))}}
# shellcheck disable=SC2016  # each node fills in its own number
exec srun --nodes={count} --ntasks-per-node=1 --cpus-per-task={cluster.ranks_per_node} --kill-on-bad-exit=1 \\
  ${{IMAGE:+--container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$PWD"}} \\
  bash -c 'exec meshwright run "$1" "$2" --nodes {count} --rendezvous "$3" --node-rank "$SLURM_NODEID" "${{@:4}}"' \\
  node "$PLAN" "$JOB" "$rendezvous" "${{MODELS[@]}}" "$@"
"""
    }


def _node_script(plan: Plan, node: int, paths: LaunchPaths) -> str:
    cluster = plan.facts.cluster
    return f"""\
#!/usr/bin/env bash
# Usage: node{node}.sh HOST:PORT --steps 20 --out run
# HOST:PORT is the rendezvous: an address and a free port of the machine that runs node0.sh, the same on every node.
{rank_table(plan, node)}set -euo pipefail

# What differs from machine to machine; a variable of the environment has precedence.
{path_variables(paths)}
LOCAL_ADDR=${{LOCAL_ADDR:-}}  # this machine's own address, where machines cannot resolve each other's host names

rendezvous=${{1:?give HOST:PORT, the rendezvous}}
shift
{environment(plan)}
{_INTERFACES}
exec torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.ranks_per_node} --max-restarts 0 \\
  --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id meshwright --rdzv-conf is_host={int(node == 0)} \\
  ${{LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"}} --no-python \\
  meshwright run "$PLAN" "$JOB" --node-rank {node} "${{MODELS[@]}}" "$@"
"""


def notice_seconds(plan: Plan) -> int:
    """Return how many seconds before its time limit a job is signalled: enough for a step and a checkpoint."""
    return int(max(300.0, 3 * plan.period_seconds))


def path_variables(paths: LaunchPaths) -> str:
    """Return the lines of a shell script that set PLAN, JOB and MODELS."""
    models = " ".join(map(shlex.quote, paths.model_options))
    return f"""\
PLAN=${{PLAN:-{shlex.quote(str(portable_path(paths.plan)))}}}
JOB=${{JOB:-{shlex.quote(str(portable_path(paths.job)))}}}
MODELS=({models})  # like --model actor=/data/models/actor, where a model is elsewhere"""


def environment(plan: Plan) -> str:
    """Return the environment: one thread per rank, and devices in the order of the plan's ranks."""
    cluster = plan.facts.cluster
    lines = ["export OMP_NUM_THREADS=1"]
    if cluster.kind == "cuda":
        order = ",".join(str(device) for device in range(cluster.ranks_per_node))
        lines += [
            "# The r-th device named is local rank r's, and a number names the same slot on every node.",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES:-{order}}}"',
        ]
    return "\n".join(lines)


def rank_table(plan: Plan, node: int) -> str:
    """Return comment lines with the device and stages of each rank of a node."""
    cluster = plan.facts.cluster
    first = node * cluster.ranks_per_node
    lines = [f"# Node {node} of {cluster.nodes}:"]
    for local in range(cluster.ranks_per_node):
        stages = " ".join(p.stage for p in plan.placements if first + local in _ranks(plan, p.stage))
        lines.append(f"#   rank {first + local}, {cluster.kind} {local}: {stages or 'idle'}")
    return "\n".join(lines) + "\n"


def _ranks(plan: Plan, stage: str) -> range:
    """Return the ranks that run a stage: the first ones of its pool, as many as its layout has."""
    start = plan.pool_of(stage).first_rank
    return range(start, start + plan.placement(stage).layout.num_ranks)
