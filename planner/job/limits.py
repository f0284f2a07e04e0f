"""Upper limits of the numbers in a job, against typos that would exhaust memory or never finish.

The limits lie far above any real job. Every command checks them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.profiles.errors import require_none
from meshwright.profiles.hardware import AnyCluster, Cluster, Link
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

_TINY, _HUGE = 1e-12, 1e24
"""The range of rates, of times above 0 and of weights; sums of values outside it overflow or vanish."""

MAX_NODES, MAX_RANKS_PER_NODE, _MAX_RANKS = 2**17, 2**12, 2**20
"""The largest cluster; a plan has an entry for every rank."""

_CLUSTER_MAXIMA = {"nodes": MAX_NODES, "ranks_per_node": MAX_RANKS_PER_NODE, "host_memory_bytes": 2**60}
_DEVICE_MAXIMA = {"memory_bytes": 2**60, "num_processors": 2**20}
_MODEL_MAXIMA = {
    "num_layers": 10_000,
    "hidden_size": 2**20,
    "ffn_size": 2**24,
    "num_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**26,
    "vocab_multiple": 2**20,
    "max_positions": 2**40,
}
_WORKLOAD_MAXIMA = {
    "batch_size": 2**24,
    "group_size": 2**24,
    "best_of": 2**24,
    "num_minibatches": 2**20,
    "num_epochs": 1024,
}
"""The largest value of each field: far above any use, and small enough for memory and for exact sums."""

_MAX_TOKENS = 2**24
"""Maximum number of tokens of a prompt or a response."""

_MAX_HISTOGRAM_PAIRS = 1024
"""Maximum number of pairs of a histogram; the sum of two lengths can have the product of their numbers of pairs."""

_MAX_LATENCY_SECONDS = 3600.0
"""The longest launch or message latency; a larger value is probably in the wrong unit."""


def require_within_limits(models: Mapping[str, ModelSpec], cluster: AnyCluster, workload: Workload, what: str) -> None:
    """Raises BadInput, with a message that starts with `what`, for the first number outside the limits."""
    require_none((*_check_cluster(cluster), *_check_models(models), *_check_workload(workload)), what)


def position_violations(models: Mapping[str, ModelSpec], workload: Workload) -> tuple[str, ...]:
    """One sentence if sequences may be longer than the positions of a model, else nothing."""
    shortest = min(models.values(), key=lambda spec: spec.max_positions)
    if workload.max_tokens <= shortest.max_positions:
        return ()
    left = shortest.max_positions - workload.prompt.max
    shortened = f"response.max to {left}" if left > 0 else "prompt.max and response.max"
    return (
        f"prompt.max + response.max = {workload.max_tokens} exceeds the {shortest.max_positions} positions of "
        f"{shortest.name}; shorten {shortened}.",
    )


def judge_violations(models: Mapping[Role, ModelSpec], judge: JudgeSpec, workload: Workload) -> Iterator[str]:
    """One sentence for each reason why the reward model cannot generate verdicts."""
    spec, longest = models[Role.REWARD], workload.max_tokens + judge.max_added_tokens
    if longest > spec.max_positions:
        yield (
            f"a judged sequence may have {longest} tokens (prompt.max + response.max + template_tokens + verdict.max), "
            f"and {spec.name} has {spec.max_positions} positions; shorten one of them."
        )


def _check_maxima(where: str, owner: Any, limits: dict[str, int]) -> Iterator[str]:
    for name, maximum in limits.items():
        value = getattr(owner, name)
        if value is not None and value > maximum:
            yield f"{where}.{name}={value} is above the limit of {maximum}; use a smaller value."


def _check_range(where: str, value: float, minimum: float = _TINY, maximum: float = _HUGE) -> Iterator[str]:
    if value and not minimum <= value <= maximum:
        yield f"{where}={value:g} is not between {minimum:g} and {maximum:g}; check its unit."


def _check_cluster(cluster: AnyCluster) -> Iterator[str]:
    for part in cluster.parts:
        yield from _check_maxima("cluster", part, _CLUSTER_MAXIMA)
        yield from _check_device(part)
        for name in ("intra_node", "inter_node", "host"):
            yield from _check_link(f"cluster.{name}", getattr(part, name))
    if cluster.num_ranks > _MAX_RANKS:
        yield (
            f"the cluster has {cluster.num_ranks} ranks, above the limit of {_MAX_RANKS}; use fewer nodes or "
            "ranks_per_node."
        )


def _check_device(part: Cluster) -> Iterator[str]:
    device = part.device
    yield from _check_maxima("cluster.device", device, _DEVICE_MAXIMA)
    yield from _check_range("cluster.device.memory_bytes_per_second", device.memory_bytes_per_second, minimum=1.0)
    for name, flops in device.flops_per_second.items():
        if flops <= 0:
            yield f"cluster.device.flops_per_second.{name}={flops:g} is not above 0; give the dense peak."
        yield from _check_range(f"cluster.device.flops_per_second.{name}", flops, minimum=1.0)
    yield from _check_range("cluster.device.launch_seconds", device.launch_seconds, maximum=_MAX_LATENCY_SECONDS)


def _check_link(where: str, link: Link) -> Iterator[str]:
    yield from _check_range(f"{where}.seconds", link.seconds, maximum=_MAX_LATENCY_SECONDS)
    yield from _check_range(f"{where}.bytes_per_second", link.bytes_per_second, minimum=1.0)


def _check_models(models: Mapping[str, ModelSpec]) -> Iterator[str]:
    for role, spec in models.items():
        yield from _check_model(f"models.{role}", spec)


def _check_model(where: str, spec: ModelSpec) -> Iterator[str]:
    yield from _check_maxima(where, spec, _MODEL_MAXIMA)
    if spec.experts:
        limits = {
            "num_experts": 2**16,
            "ffn_size": _MODEL_MAXIMA["ffn_size"],
            "shared_ffn_size": _MODEL_MAXIMA["ffn_size"],
        }
        yield from _check_maxima(f"{where}.experts", spec.experts, limits)
    sizes = list[tuple[str, object, tuple[str, ...]]]()
    if spec.linear:
        heads = "num_key_heads", "num_value_heads", "key_dim", "value_dim"
        sizes.append(("linear", spec.linear, (*heads, "conv_kernel", "chunk_tokens")))
    if spec.latent:
        sizes.append(("latent", spec.latent, ("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")))
    if spec.latent and spec.latent.indexer:
        sizes.append(("latent.indexer", spec.latent.indexer, ("num_heads", "head_dim", "num_tokens")))
    if spec.image_encoder:
        of_encoder = "num_blocks", "hidden_size", "ffn_size", "output_size", "patch_elements", "merge_size"
        sizes.append(("image_encoder", spec.image_encoder, (*of_encoder, "num_positions")))
    for part, value, names in sizes:
        yield from _check_maxima(f"{where}.{part}", value, dict.fromkeys(names, _MODEL_MAXIMA["hidden_size"]))


def _check_workload(workload: Workload) -> Iterator[str]:
    yield from _check_maxima("workload", workload, _WORKLOAD_MAXIMA)
    generated = workload.wave
    if generated.batch_size > _WORKLOAD_MAXIMA["batch_size"]:
        yield (
            f"the workload generates {generated.batch_size} sequences at once ({generated.num_prompts} prompts with "
            f"{generated.group_size} samples each), above the limit of {_WORKLOAD_MAXIMA['batch_size']}; use a smaller "
            "batch_size, best_of or dynamic_sampling.num_prompts."
        )
    for name in ("prompt", "response"):
        yield from _check_lengths(f"workload.{name}", getattr(workload, name))
    if workload.images:
        yield from _check_lengths("workload.images.number", workload.images.number)
        yield from _check_lengths("workload.images.tokens", workload.images.tokens)


def _check_lengths(where: str, lengths: LengthSpec) -> Iterator[str]:
    yield from _check_maxima(where, lengths, {"max": _MAX_TOKENS})
    pairs = lengths.histogram or ()
    if len(pairs) > _MAX_HISTOGRAM_PAIRS:
        yield (
            f"{where}.histogram has {len(pairs)} pairs, above the limit of {_MAX_HISTOGRAM_PAIRS}; merge similar "
            "lengths."
        )
    for _, weight in pairs:
        yield from _check_range(f"a weight of {where}.histogram", weight)
    for name in ("median", "p99"):
        yield from _check_range(f"{where}.{name}", getattr(lengths, name) or 0.0, minimum=1e-3, maximum=1e12)
