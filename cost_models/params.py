"""What a rank holds of a model: layers, and how many parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from meshwright.profiles.layout import Layout, layers_of_chunks, layers_of_stages
from meshwright.profiles.model_shape import ModelSpec


class StagePart(NamedTuple):
    """What a rank of one pipeline stage holds. `num_behind` counts the stages from its own to the last.

    `expert_params` are those of its parameters that are in experts, which only every `spread`-th replica holds too;
    `adapter_params` those of an adapter, which alone are trained where there is one. The attention of
    `num_window_layers` of its layers sees a sliding window.
    """

    num_layers: int
    num_params: float
    num_behind: int
    expert_params: float
    adapter_params: float = 0.0
    num_window_layers: int = 0

    @property
    def trained(self) -> StagePart:
        """What of it training changes, refits move and an optimizer has state of."""
        if not self.adapter_params:
            return self
        return self._replace(num_params=self.adapter_params, expert_params=0.0)

    def replicated_params(self, spread: int) -> float:
        """Parameters that the replicas hold together, each counted once: what a sharded optimizer divides over dp."""
        return self.num_params + (spread - 1) * self.expert_params

    @property
    def is_last(self) -> bool:
        return self.num_behind == 1


@cache
def stage_parts(model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1) -> tuple[StagePart, ...]:
    """Of each pipeline stage that may be the fullest: the first, the last, and the first of each kind of those between
    them that hold more than the first one, in layers or in their parameters.

    The last of several stages repeats a tied embedding. Experts are spread over so many replicas
    (`Layout.expert_replicas`): a rank holds as much of them whether tp cuts each or deals out whole ones.
    """
    held = [layers_of_chunks(model, pp, stage, vpp) for stage in range(pp)]
    first, *others = [_size(model, layers) for layers in held]
    earliest = {size: stage for stage, size in reversed([*enumerate(others[:-1], start=1)])}
    fuller = {stage for size, stage in earliest.items() if size[0] > first[0] or size[1] > first[1]}
    stages = {0, pp - 1} | fuller
    shard = model.shard(tp)
    return tuple(_part(shard, held[stage], pp, spread, stage) for stage in sorted(stages))


def _size(model: ModelSpec, chunks: Sequence[range]) -> tuple[int, int]:
    """Layers of a stage, and their parameters."""
    return sum(map(len, chunks)), sum(model.params_between(layers.start, layers.stop) for layers in chunks)


@cache
def fullest_part(model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1) -> StagePart:
    """Of the stages, the one that holds most parameters."""
    return max(stage_parts(model, tp, pp, spread, vpp), key=lambda part: part.num_params)


class LayerCounts(NamedTuple):
    """Layers of the pipeline stages that may take longest: the most of any, and the last one's."""

    most: int
    last: int

    @classmethod
    def of(cls, model: ModelSpec, pp: int) -> LayerCounts:
        counts = layers_of_stages(model, pp)
        return cls(max(counts), counts[-1])

    def slowest(self, layer_seconds: float, ends_seconds: float) -> tuple[int, bool]:
        """Layers of the pipeline stage that takes longest, and whether that is the last, which has embedding and head.

        The last one is, unless it has fewer layers than others and its ends take less than these.
        """
        if (self.most - self.last) * layer_seconds > ends_seconds:
            return self.most, False
        return self.last, True


def micro_batches_in_flight(layout: Layout, num_behind: int, num_batches: int) -> float:
    """Micro-batches whose activations a stage holds in all its layers at once, q = `num_behind` of pp stages on.

    Under 1F1B min(q, m) (Narayanan et al., arXiv:2104.04473, section 2.2.1). An interleaved pipeline passes
    2(q - 1) + (v - 1)p + 1 of them through one of the v chunks before it goes back through the first, p + (p - 1)/v on
    the first stage (Korthikanti et al., arXiv:2205.05198, section 4.2.3; Megatron-core, `get_pp_rank_microbatches`).
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
