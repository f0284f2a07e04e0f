"""The layers and parameters of a model that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from meshwright.profiles.layout import Layout, chunk_layers, layers_per_stage
from meshwright.profiles.model_shape import ModelSpec


class StagePart(NamedTuple):
    """The layers and parameters of a rank of one pipeline stage.

    `num_behind` counts the pipeline stages from its own to the last. `expert_params` are its parameters in experts,
    which are replicated only on every `spread`-th replica; `adapter_params` are those of an adapter, and then the only
    trained ones. `num_window_layers` of its layers use sliding-window attention.
    """

    num_layers: int
    num_params: float
    num_behind: int
    expert_params: float
    adapter_params: float = 0.0
    num_window_layers: int = 0

    @property
    def trained(self) -> StagePart:
        """The parameters that are trained: refits move them, and the optimizer has state for them."""
        if not self.adapter_params:
            return self
        return self._replace(num_params=self.adapter_params, expert_params=0.0)

    def replicated_params(self, spread: int) -> float:
        """Return the distinct parameters of `spread` replicas together, which a sharded optimizer divides over dp."""
        return self.num_params + (spread - 1) * self.expert_params

    @property
    def is_last(self) -> bool:
        return self.num_behind == 1


@cache
def stage_parts(model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1) -> tuple[StagePart, ...]:
    """Return the parts of the pipeline stages that may be the fullest.

    They are the first, the last, and one of each size between them that holds more layers or parameters than the first.
    With several pipeline stages the last one repeats a tied embedding. Experts are spread over `spread` replicas
    (`Layout.expert_replicas`): a rank holds the same number of expert parameters whether tp shards each expert or
    assigns whole ones.
    """
    chunks_of_stages = [chunk_layers(model, pp, stage, vpp) for stage in range(pp)]
    first, *others = [_size(model, layers) for layers in chunks_of_stages]
    earliest = {size: stage for stage, size in reversed([*enumerate(others[:-1], start=1)])}
    larger = {stage for size, stage in earliest.items() if size[0] > first[0] or size[1] > first[1]}
    stages = {0, pp - 1} | larger
    shard = model.shard(tp)
    return tuple(_part(shard, chunks_of_stages[stage], pp, spread, stage) for stage in sorted(stages))


def _size(model: ModelSpec, chunks: Sequence[range]) -> tuple[int, int]:
    """Return the layers of a pipeline stage, and their parameters."""
    return sum(map(len, chunks)), sum(model.params_between(layers.start, layers.stop) for layers in chunks)


@cache
def fullest_part(model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1) -> StagePart:
    """Return the part of the pipeline stage with the most parameters."""
    return max(stage_parts(model, tp, pp, spread, vpp), key=lambda part: part.num_params)


class LayerCounts(NamedTuple):
    """Numbers of layers of the pipeline stages that may be slowest: the most of any stage, and the last stage's."""

    most: int
    last: int

    @classmethod
    def of(cls, model: ModelSpec, pp: int) -> LayerCounts:
        counts = layers_per_stage(model, pp)
        return cls(max(counts), counts[-1])

    def slowest(self, layer_seconds: float, ends_seconds: float) -> tuple[int, bool]:
        """Return the layers of the slowest pipeline stage, and True if it is the last, which has embedding and head.

        The last stage is the slowest unless it has fewer layers and its ends take less than the missing layers.
        """
        if (self.most - self.last) * layer_seconds > ends_seconds:
            return self.most, False
        return self.last, True


def micro_batches_in_flight(layout: Layout, num_behind: int, num_batches: int) -> float:
    """Return the number of micro-batches whose activations in all of its layers a pipeline stage holds at once.

    With q = `num_behind`, it is min(q, m) under 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.1). An
    interleaved pipeline passes 2(q - 1) + (v - 1)p + 1 micro-batches through one of its v chunks before its first
    backward pass, which is p + (p - 1)/v on the first stage (Korthikanti et al., arXiv:2205.05198, section 4.2.3;
    Megatron-core, `get_pp_rank_microbatches`).
    """
    pp, vpp = layout.pp, layout.vpp
    if vpp == 1:
        return min(num_behind, num_batches)
    return min(2 * (num_behind - 1) + (vpp - 1) * pp + 1, vpp * num_batches) / vpp


def _part(shard: ModelSpec, chunks: Sequence[range], pp: int, spread: int, stage: int) -> StagePart:
    all_experts = sum(shard.expert_params_between(layers.start, layers.stop) for layers in chunks)
    num_params = sum(shard.params_between(layers.start, layers.stop) for layers in chunks)
    num_params += all_experts // spread - all_experts
    if stage == 0:
        num_params += shard.embedding_params
    if stage == pp - 1:
        repeats = pp > 1 and shard.tied_embeddings and not shard.scalar_head
        num_params += shard.hidden_size + (shard.embedding_params if repeats else shard.head_params)
    num_layers = sum(map(len, chunks))
    adapter_params = num_layers * shard.adapter_layer_params
    num_params += adapter_params
    num_window_layers = sum(shard.window.num_layers(each.start, each.stop) for each in chunks) if shard.window else 0
    return StagePart(
        num_layers,
        float(num_params),
        pp - stage,
        float(all_experts // spread),
        float(adapter_params),
        num_window_layers,
    )
