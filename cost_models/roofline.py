"""The least that a stage can take, so that what is far too slow need not be costed.

On so many ranks, whatever its layout and schedule: its arithmetic at the device's peak (Williams et al., Roofline, CACM
2009). A generation under one choice: what its rounds take at least, whatever they are. Each has a pass for every
pipeline stage, and together they draw all tokens, so that the least of them is a linear program: of rounds with few
rows and with many, as few seconds as draw so many tokens in so many rounds or more. One or two kinds of rounds solve it
(Dantzig, Linear Programming and Extensions, 1963, section 6-1). A kind has a range of rows: it takes the seconds of the
fewest, for fewer rows never take longer, and draws as much as the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from meshwright.cost_models.generation_cost import Generation
from meshwright.cost_models.precision import PRECISIONS
from meshwright.cost_models.rounds import Integers
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import Body
from meshwright.profiles.workload import Workload

_FLOPS_PER_WEIGHT = 2
"""A product and a sum for each token."""

_PASSES_TO_TRAIN = 3
"""Forward, and backward to weights and to activations."""

_PASSES_BESIDE = 2
"""Of weights that stay as they are beside an adapter, whose own products are left out."""

_ENDS = (0.0, 0.03, 0.06, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Where kinds of rounds end and the next begin, of the most rows that a pass may have."""


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
    """Bytes of keys and values that the tokens of a batch read, each those of its own row before it, in layers that see
    all of them."""
    response = workload.drawn_lengths
    drawn = sum(p * n for n, p in zip(response.tokens, response.probabilities, strict=True))
    pairs = sum(p * n * (n - 1) / 2 for n, p in zip(response.tokens, response.probabilities, strict=True))
    read = workload.batch_size * (workload.prompt_lengths.mean * max(0.0, drawn - 1) + pairs)
    elements = model.cached_elements * (model.num_layers - model.num_window_layers)
    return read * elements * PRECISIONS[precision].cache_bytes


def least_generation_seconds(
    generation: Generation, responses: Integers, num_slots: int, most_live: int, num_rounds: float
) -> float:
    """Seconds below which a generation of a replica with these responses is not, played or not, if so many of them draw
    at a time at most, in so many rounds or more. Attention to the cache counts as that to one token, and prefills, of
    which each draws the first token of its response, as nothing."""
    num_tokens, num_stages = int(responses.sum()) - len(responses), generation.call.layout.pp
    if not num_tokens:
        return 0.0
    num_groups, num_rounds = min(num_stages, num_slots), max(num_rounds, num_tokens / most_live)
    most = max(1.0, most_live / num_groups)
    rows = [1 + end * (most - 1) for end in _ENDS] if most > 1 else [1.0, 1.0]
    times = [generation.shard.time(Body.DECODE, fewest, 1, 1) for fewest in rows[:-1]]
    layers, ends = (
        num_stages * _least_of_kinds(list(zip(seconds, rows[1:], strict=True)), num_rounds, num_tokens / num_groups)
        for seconds in ([time.layer for time in times], [time.ends for time in times])
    )
    return generation.least_seconds(layers, ends, num_rounds, num_tokens, num_groups)


def _least_of_kinds(kinds: Sequence[tuple[float, float]], num_rounds: float, num_rows: float) -> float:
    """The least seconds of so many rounds or more, with so many rows in all of them; each kind with the seconds and the
    most rows of a round."""
    found = [max(num_rounds, num_rows / rows) * seconds for seconds, rows in kinds]
    for (few, fewer), (many, more) in combinations(kinds, 2):
        number = (num_rows - num_rounds * fewer) / (more - fewer)
        if 0 <= number <= num_rounds:
            found.append(number * many + (num_rounds - number) * few)
    return min(found)
