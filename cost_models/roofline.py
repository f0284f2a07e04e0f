"""The least that a stage can take on so many ranks, whatever its layout and schedule: its arithmetic at the device's
peak (Williams et al., Roofline, CACM 2009), so that what is far too slow need not be costed.
"""

from __future__ import annotations

from meshwright.cost_models.precision import PRECISIONS
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Stage
from meshwright.profiles.workload import Workload

_FLOPS_PER_WEIGHT = 2
"""A product and a sum for each token."""

_PASSES_TO_TRAIN = 3
"""Forward, and backward to weights and to activations."""

_PASSES_BESIDE = 2
"""Of weights that stay as they are beside an adapter, whose own products are left out."""


def least_rank_seconds(stage: Stage, model: ModelSpec, cluster: Cluster, workload: Workload, precision: str) -> float:
    """Seconds times ranks below which no choice of the stage on devices of the cluster is.

    Counted are the products of the decoder layers with weights and, of a generation, the reading of the KV cache by
    each token that it draws after the first.
    """
    weights = model.params_between(0, model.num_layers) - _unpicked(model)
    tokens = workload.batch_size * workload.mean_tokens
    if stage.generates:  # a prompt may be prefilled once for its group
        tokens -= (workload.batch_size - workload.num_prompts) * workload.prompt_lengths.mean
    to_train = _PASSES_BESIDE if model.adapter else _PASSES_TO_TRAIN
    passes = to_train * workload.num_epochs if stage.trains else 1
    peak = max(cluster.device.flops_per_second.values())
    seconds = _FLOPS_PER_WEIGHT * weights * tokens * passes / peak
    if stage.generates:
        seconds += _cached_bytes_read(model, workload, precision) / cluster.device.memory_bytes_per_second
    return seconds


def _unpicked(model: ModelSpec) -> float:
    """Parameters in experts that a token does not pass."""
    if not model.experts:
        return 0.0
    idle = 1 - model.experts.experts_per_token / model.experts.num_experts
    return model.expert_params_between(0, model.num_layers) * idle


def _cached_bytes_read(model: ModelSpec, workload: Workload, precision: str) -> float:
    """Bytes of keys and values that the tokens of a batch read, each those of its own row before it."""
    response = workload.drawn_lengths
    drawn = sum(p * n for n, p in zip(response.tokens, response.probabilities, strict=True))
    pairs = sum(p * n * (n - 1) / 2 for n, p in zip(response.tokens, response.probabilities, strict=True))
    read = workload.batch_size * (workload.prompt_lengths.mean * max(0.0, drawn - 1) + pairs)
    elements = model.cached_elements * model.num_layers
    return read * elements * PRECISIONS[precision].cache_bytes
