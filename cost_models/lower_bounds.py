"""Lower bounds on the seconds of a stage, which let a search skip choices that are far too slow.

The bound of any stage on a number of ranks, whatever its layout and schedule, is its arithmetic at the device's peak
(Williams et al., Roofline, CACM 2009).

A round is one decode step of every group of slots; its rows are the sequences that take part, each of which samples a
token. The bound of a generation under one choice is a linear program: choose rounds of few or many rows so that they
sample all tokens in at least a given number of rounds, in the fewest seconds. One or two kinds of rounds solve it
(Dantzig, Linear Programming and Extensions, 1963, section 6-1). A kind is a range of numbers of rows: a round of it
takes the seconds of the smallest number, since fewer rows never take longer, and samples a token for each row of the
largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.compute import PassColumns, Shard
from meshwright.cost_models.generation_cost import Generation
from meshwright.cost_models.kernels import PRECISIONS
from meshwright.profiles.elementwise import FloatArray
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.speculation import NO_DRAFTS, DraftRound
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload

_FLOPS_PER_WEIGHT = 2
"""FLOPs per weight and token: a multiplication and an addition."""

_TRAIN_TO_FORWARD_MATMULS = 3
"""Ratio of the matmuls of a training pass to those of a forward pass: forward, and backward to activations and to
weights."""

_ADAPTER_TRAIN_TO_FORWARD_MATMULS = 2
"""The ratio for frozen weights with an adapter, whose own matmuls are left out."""

_KIND_BOUNDS = (0.0, 0.03, 0.06, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Boundaries between the kinds of rounds, as fractions of the maximum rows of a pass."""

_PAIRS_OF_KINDS = np.triu_indices(len(_KIND_BOUNDS) - 1, 1)
"""The indices of every two kinds, the one with fewer rows first."""


def rank_seconds_lower_bound(
    stage: Stage, model: ModelSpec, cluster: Cluster, workload: Workload, precision: str
) -> float:
    """Return a lower bound on seconds times ranks for any choice of the stage on devices of the cluster.

    It counts the weight matmuls of the decoder layers and, for a generation, each decode step's reads of the KV cache.
    """
    weights = model.params_between(0, model.num_layers) - _inactive_expert_params(model)
    tokens = workload.batch_size * workload.mean_tokens
    if stage.generates:  # a prompt may be prefilled once for its group
        tokens -= (workload.batch_size - workload.num_prompts) * workload.prompt_lengths.mean
    train_ratio = _ADAPTER_TRAIN_TO_FORWARD_MATMULS if model.adapter else _TRAIN_TO_FORWARD_MATMULS
    passes = train_ratio * workload.num_epochs if stage.trains else 1
    peak = max(cluster.device.flops_per_second.values())
    seconds = _FLOPS_PER_WEIGHT * weights * tokens * passes / peak
    if stage.generates:
        seconds += _cached_bytes_read(model, workload, precision) / cluster.device.memory_bytes_per_second
    return seconds


def _inactive_expert_params(model: ModelSpec) -> float:
    """Return the parameters of experts that a token is not routed to."""
    if not model.experts:
        return 0.0
    idle = 1 - model.experts.experts_per_token / model.experts.num_experts
    return model.expert_params_between(0, model.num_layers) * idle


def _cached_bytes_read(model: ModelSpec, workload: Workload, precision: str) -> float:
    """Return the bytes of keys and values that a batch reads while decoding, in layers without a sliding window."""
    response = workload.sampled_lengths
    mean_response = sum(p * n for n, p in zip(response.tokens, response.probabilities, strict=True))
    # A response of n tokens takes n - 1 decode steps; step i reads the i tokens of it that are cached by then.
    cached_response_reads = sum(
        p * n * (n - 1) / 2 for n, p in zip(response.tokens, response.probabilities, strict=True)
    )
    cached_prompt_reads = workload.prompt_lengths.mean * max(0.0, mean_response - 1)
    num_reads = workload.batch_size * (cached_prompt_reads + cached_response_reads)
    elements = model.cached_elements * model.num_full_layers
    return num_reads * elements * PRECISIONS[precision].cache_bytes


class RoundKinds(NamedTuple):
    """The kinds of decode rounds of one group, each [kinds].

    `layer` and `ends` are the seconds of one layer, and of embedding and head together, with the fewest rows of the
    kind; `max_rows` is its largest number of rows.
    """

    layer: FloatArray
    ends: FloatArray
    max_rows: FloatArray


def round_kinds(shard: Shard, max_rows: float) -> RoundKinds:
    """Return the kinds of rounds of a shard with at most `max_rows` rows, which is 1 or more.

    Attention counts as if one token were cached.
    """
    boundaries = 1 + np.array(_KIND_BOUNDS) * (max_rows - 1) if max_rows > 1 else np.ones(2)
    rows = boundaries[:-1]
    ones = np.ones(len(rows))
    times = shard.each(TimedPass.DECODE, PassColumns(ones, rows, ones, ones))
    return RoundKinds(times.layer, times.ends, boundaries[1:])


RoundKindsOf: TypeAlias = Callable[[Shard, float], RoundKinds]
"""A function like `round_kinds`, which may remember its results."""


def generation_lower_bound(
    generation: Generation,
    num_tokens: float,
    num_slots: int,
    max_live: int,
    num_rounds: float,
    *,
    kinds_of: RoundKindsOf,
    draft_round: DraftRound = NO_DRAFTS,
) -> float:
    """Return a lower bound on the seconds in which a replica decodes `num_tokens` tokens, without simulating it.

    At most `max_live` sequences sample at a time, in at least `num_rounds` rounds. The `num_slots` slots form a group
    for each pipeline stage, or one for each slot if there are fewer. Prefills, each of which samples the first token of
    its response, count as nothing. With drafts, a sequence takes a row of a round for every token that it verifies, and
    samples as many as `draft_round` says.
    """
    num_stages = generation.query.layout.pp
    if not num_tokens:
        return 0.0
    num_groups = min(num_stages, num_slots)
    num_rounds = max(num_rounds, num_tokens / max_live) / draft_round.sampled
    num_rows = num_tokens * draft_round.verified / draft_round.sampled
    kinds = kinds_of(generation.shard, max(1.0, max_live * draft_round.verified / num_groups))
    layers, ends = (
        num_stages * seconds for seconds in _min_seconds_of_rounds(kinds, num_rounds, num_rows / num_groups)
    )
    return generation.lower_bound_seconds(layers, ends, num_rounds, num_rows, num_groups)


def _min_seconds_of_rounds(kinds: RoundKinds, num_rounds: float, num_rows: float) -> tuple[float, float]:
    """Return the fewest seconds of a layer, and of embedding and head, in at least `num_rounds` rounds with `num_rows`
    rows in total."""
    seconds, max_rows = np.stack([kinds.layer, kinds.ends]), kinds.max_rows
    fewest = (np.maximum(num_rounds, num_rows / max_rows) * seconds).min(axis=1)  # all rounds are of one kind
    if len(max_rows) > 1:
        few, many = _PAIRS_OF_KINDS
        num_many = (num_rows - num_rounds * max_rows[few]) / (max_rows[many] - max_rows[few])
        possible = (num_many >= 0) & (num_many <= num_rounds)
        num_many, few, many = num_many[possible], few[possible], many[possible]
        of_two_kinds = num_many * seconds[:, many] + (num_rounds - num_many) * seconds[:, few]
        fewest = np.minimum(fewest, of_two_kinds.min(axis=1, initial=np.inf))
    layer, ends = fewest.tolist()
    return layer, ends
