"""Scripts that launch a plan on its nodes, with torchrun or Slurm.

Local rank r of a node uses the r-th visible device, and the ranks of a node are consecutive, so the order of the
devices is the order of the plan's ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from meshwright.planner.plan.plan import Plan

_INTERFACES = """\
# Gloo uses the interface of the rendezvous and NCCL chooses its own; if that is not the fast one:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
"""


def torchrun_scripts(plan: Plan, plan_path: Path, job_path: Path) -> Mapping[str, str]:
    """Return one script per node, by file name; each takes HOST:PORT and the options of `meshwright run`."""
    return {f"node{node}.sh": _node_script(plan, node, plan_path, job_path) for node in range(plan.facts.cluster.nodes)}


def slurm_script(plan: Plan, plan_path: Path, job_path: Path) -> Mapping[str, str]:
    """Return one batch script, by file name; it is submitted with the options of `meshwright run`."""
    cluster = plan.facts.cluster
    devices = f"#SBATCH --gpus-per-node={cluster.ranks_per_node}\n" if cluster.kind == "cuda" else ""
    count = cluster.nodes
    table = "".join(_rank_table(plan, node) for node in range(count))
    return {
        "run.sbatch": f"""\
#!/usr/bin/env bash
#SBATCH --job-name=meshwright
#SBATCH --nodes={count}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cluster.ranks_per_node}
#SBATCH --signal=USR1@{_notice_seconds(plan)}
{devices}#
# Usage: sbatch run.sbatch --steps 20 --out run
# Shortly before its time limit the run saves a checkpoint and exits with code 75; submit it again with --resume.
# Slurm's number of a node is the plan's. PORT is the rendezvous port on the first node.
{table}set -euo pipefail
{_paths(plan_path, job_path)}
{_environment(plan)}
{_INTERFACES}
# The nodes authenticate each other with this token; srun passes it to them.
export MESHWRIGHT_TOKEN=${{MESHWRIGHT_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
meeting=${{hosts%%$'\\n'*}}:${{PORT:-$((20000 + SLURM_JOB_ID % 10000))}}
# shellcheck disable=SC2016  # each node fills in its own number
exec srun --nodes={count} --ntasks-per-node=1 --cpus-per-task={cluster.ranks_per_node} --kill-on-bad-exit=1 \\
  bash -c 'exec meshwright run "$1" "$2" --nodes {count} --rendezvous "$3" --node-rank "$SLURM_NODEID" "${{@:4}}"' \\
  node "$PLAN" "$JOB" "$meeting" "$@"
"""
    }


def _node_script(plan: Plan, node: int, plan_path: Path, job_path: Path) -> str:
    cluster = plan.facts.cluster
    return f"""\
#!/usr/bin/env bash
# Usage: node{node}.sh HOST:PORT --steps 20 --out run
# HOST:PORT is the rendezvous: an address and a free port of the machine that runs node0.sh, the same on every node.
# If machines cannot resolve each other's host names, set each one's own address, as LOCAL_ADDR=10.0.0.1.
{_rank_table(plan, node)}set -euo pipefail
{_paths(plan_path, job_path)}
meeting=${{1:?give HOST:PORT, the rendezvous}}
shift
{_environment(plan)}
{_INTERFACES}
exec torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.ranks_per_node} --max-restarts 0 \\
  --rdzv-backend c10d --rdzv-endpoint "$meeting" --rdzv-id meshwright --rdzv-conf is_host={int(node == 0)} \\
  ${{LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"}} --no-python \\
  meshwright run "$PLAN" "$JOB" --node-rank {node} "$@"
"""


def _notice_seconds(plan: Plan) -> int:
    """Return how many seconds before its time limit a job is signalled: enough for a step and a checkpoint."""
    return int(max(300.0, 3 * plan.period_seconds))


def _paths(plan_path: Path, job_path: Path) -> str:
    return f"PLAN={shlex.quote(str(plan_path))}\nJOB={shlex.quote(str(job_path))}"


def _environment(plan: Plan) -> str:
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


def _rank_table(plan: Plan, node: int) -> str:
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
