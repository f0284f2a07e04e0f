"""A script that prints the manifest with which Kubernetes runs a plan: a JobSet with one pod for each node.

JobSet (https://jobset.sigs.k8s.io) gives each pod a number and a host name, which `meshwright run` needs of a node.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.launch_scripts import LaunchPaths, notice_seconds, path_variables, rank_table

_SHARED_MEMORY = "/dev/shm"
"""Where NCCL and the processes of a node share memory; the default size in a container is 64 MiB."""


def jobset_script(plan: Plan, paths: LaunchPaths) -> Mapping[str, str]:
    """Return one script, by file name; it takes the options of `meshwright run` and prints the manifest."""
    cluster = plan.facts.cluster
    table = "".join(rank_table(plan, node) for node in range(cluster.nodes))
    resource = "nvidia.com/gpu" if cluster.kind == "cuda" else "cpu"
    return {
        "jobset.sh": f"""\
#!/usr/bin/env bash
# Usage: ./jobset.sh --steps 20 --out run | kubectl apply -f -
# Prints a JobSet, whose controller the cluster needs (https://jobset.sigs.k8s.io), and a Secret. When a pod or its
# machine is lost all pods start again, and the run continues from its last checkpoint. Mistakes in the plan or the job
# (exit codes 2 and 3) end the JobSet at once.
# Follow a node with: kubectl logs --follow --selector jobset.sigs.k8s.io/jobset-name=$NAME --prefix
{table}set -euo pipefail

# What differs from cluster to cluster; a variable of the environment has precedence.
NAME=${{NAME:-meshwright}}  # of the JobSet; at most 40 lower-case letters, digits and hyphens
NAMESPACE=${{NAMESPACE:-default}}
IMAGE=${{IMAGE:-meshwright:latest}}  # container image, as the repository's Containerfile builds it
CLAIM=${{CLAIM:-shared}}  # PersistentVolumeClaim that all pods can write (ReadWriteMany)
MOUNT=${{MOUNT:-/shared}}  # where the claim is mounted; relative paths start there, --out among them
# The plan, the job, and an option for each model that lies elsewhere than where the job says; paths in the pods.
{path_variables(paths)}
QUEUE=${{QUEUE:-}}  # local queue of Kueue; empty: none
TIME_LIMIT=${{TIME_LIMIT:-}}  # seconds; empty: none
RESTARTS=${{RESTARTS:-3}}  # of all pods, after the loss of one
PORT=${{PORT:-29500}}  # of the rendezvous, in the first pod
TOKEN=${{MESHWRIGHT_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}  # with which the nodes authenticate

if [[ ! $NAME =~ ^[a-z]([-a-z0-9]{{0,38}}[a-z0-9])?$ ]]; then
  echo "NAME=$NAME is not a name of a JobSet; use at most 40 lower-case letters, digits and hyphens." >&2
  exit 2
fi

text() {{  # the argument as a string of YAML
  local escaped=${{1//\\\\/\\\\\\\\}}
  printf '"%s"' "${{escaped//\\"/\\\\\\"}}"
}}

arguments() {{  # each argument as an item of the container's args
  for argument; do printf '              - %s\\n' "$(text "$argument")"; done
}}

labels=
[[ -z $QUEUE ]] || labels="  labels:"$'\n'"    kueue.x-k8s.io/queue-name: $(text "$QUEUE")"$'\n'
deadline=
[[ -z $TIME_LIMIT ]] || deadline="        activeDeadlineSeconds: $TIME_LIMIT"$'\n'
cat <<MANIFEST
apiVersion: v1
kind: Secret
metadata:
  name: $NAME-token
  namespace: $(text "$NAMESPACE")
stringData:
  token: $(text "$TOKEN")
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  namespace: $(text "$NAMESPACE")
${{labels}}spec:
  network:
    enableDNSHostnames: true
    subdomain: $NAME
  failurePolicy:
    maxRestarts: $RESTARTS
    rules:
    - name: mistakes
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        parallelism: {cluster.nodes}
        completions: {cluster.nodes}
        backoffLimit: 0
${{deadline}}        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: run
              operator: In
              values: [2, 3]
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {notice_seconds(plan)}
            affinity:
              podAntiAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                - topologyKey: kubernetes.io/hostname
                  labelSelector:
                    matchLabels:
                      jobset.sigs.k8s.io/jobset-name: $NAME
            containers:
            - name: run
              image: $(text "$IMAGE")
              workingDir: $(text "$MOUNT")
              env:
              - name: OMP_NUM_THREADS
                value: "1"
              - name: CUDA_DEVICE_ORDER
                value: PCI_BUS_ID
              - name: MESHWRIGHT_TOKEN
                valueFrom:
                  secretKeyRef:
                    name: $NAME-token
                    key: token
              resources:
                limits:
                  {resource}: "{cluster.ranks_per_node}"
              volumeMounts:
              - name: shared
                mountPath: $(text "$MOUNT")
              - name: memory
                mountPath: {_SHARED_MEMORY}
              command:
              - bash
              - -c
              - |
{_indented(_POD, 16)}
              args:
$(arguments node "$NAME-node-0-0.$NAME" "$PORT" "$PLAN" "$JOB" --nodes {cluster.nodes} "${{MODELS[@]}}" "$@")
            volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: $(text "$CLAIM")
            - name: memory
              emptyDir:
                medium: Memory
MANIFEST
"""
    }


_POD = r"""
host=\$1 port=\$2 plan=\$3 job=\$4
shift 4
for ((second = 0; second < 600; second++)); do  # the first pod has no address before it is scheduled
  getent hosts "\$host" > /dev/null && break
  ((second % 60)) || echo "waiting for \$host to have an address, for 600 s at most" >&2
  sleep 1
done
# Resume if the argument after --out is a directory with a checkpoint, as it is after a restart.
previous=
for word; do
  [[ \$previous != --out || ! -e \$word/latest ]] || set -- "\$@" --resume
  previous=\$word
done
exec meshwright run "\$plan" "\$job" --rendezvous "\$host:\$port" --node-rank "\$JOB_COMPLETION_INDEX" "\$@"
""".strip()
"""The script of the container of a pod; dollars that belong to the pod are escaped in it."""


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in text.splitlines())
