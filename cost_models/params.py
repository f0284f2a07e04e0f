"""The layers and parameters of a model that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Generic

from meshwright.profiles.choice_table import Degrees, LayoutColumns, field_values
from meshwright.profiles.elementwise import BoolArray, FloatArray, N, maximum, minimum, where
from meshwright.profiles.layout import Layout, chunk_layers, layers_per_stage
from meshwright.profiles.model_shape import ModelSpec


@dataclass(frozen=True)
class StagePart(Generic[N]):
    """The layers and parameters of a rank of one pipeline stage, in one layout or in those of several choices.

    `num_stages_to_end` counts the pipeline stages from its own to the last. `expert_params` are its parameters in
    experts, which are replicated only on every `spread`-th replica; `adapter_params` are the parameters of an adapter
    and of the scalar head that is trained with it, 0 without an adapter, and `adapter_expert_params` those of them in
    experts. `num_full_layers` of its layers attend to all tokens, `num_window_layers` use sliding-window attention, and
    `num_linear_layers` have a state.
    """

    num_layers: N
    num_params: N
    num_stages_to_end: N
    expert_params: N
    adapter_params: N
    adapter_expert_params: N
    num_window_layers: N
    num_full_layers: N
    num_linear_layers: N

    @property
    def trained(self) -> StagePart[N]:
        """The parameters that are trained: refits move them, and the optimizer has state for them."""
        has_adapter = self.adapter_params > 0
        num_params = where(has_adapter, self.adapter_params, self.num_params)
        expert_params = where(has_adapter, self.adapter_expert_params, self.expert_params)
        return replace(self, num_params=num_params, expert_params=expert_params)

    def distinct_params(self, spread: N) -> N:
        """Return the distinct parameters of `spread` replicas together, which a sharded optimizer divides over dp."""
        return self.num_params + (spread - 1) * self.expert_params

    @property
    def is_last(self) -> bool | BoolArray:
        is_last: bool | BoolArray = self.num_stages_to_end == 1
        return is_last


@cache
def stage_parts(
    model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1, *, folded: int = 1
) -> tuple[StagePart[float], ...]:
    """Return the parts of the pipeline stages that may be the fullest.

    They are the first, the last, and one of each size between them that holds more layers or parameters than the first.
    With several pipeline stages the last one repeats a tied embedding. Experts are spread over `spread` replicas
    (`Layout.expert_replicas`): a rank holds the same number of expert parameters whether tp shards each expert or
    assigns whole ones. That of adapters of experts differs, and whole experts are divided over `folded` ranks of a
    replica (`Layout.fold_size`).
    """
    chunks_of_stages = [chunk_layers(model, pp, stage, vpp) for stage in range(pp)]
    first, *others = [_size(model, layers) for layers in chunks_of_stages]
    earliest = {size: stage for stage, size in reversed([*enumerate(others[:-1], start=1)])}
    larger = {stage for size, stage in earliest.items() if size[0] > first[0] or size[1] > first[1]}
    stages = {0, pp - 1} | larger
    shard = model.shard(tp)
    return tuple(_part(shard, chunks_of_stages[stage], pp, spread, stage, folded=folded) for stage in sorted(stages))


def _size(model: ModelSpec, chunks: Sequence[range]) -> tuple[int, int]:
    """Return the layers of a pipeline stage, and their parameters."""
    return sum(map(len, chunks)), sum(model.params_between(layers.start, layers.stop) for layers in chunks)


@cache
def fullest_part(
    model: ModelSpec, tp: int, pp: int, spread: int = 1, vpp: int = 1, *, folded: int = 1
) -> StagePart[float]:
    """Return the part of the pipeline stage with the most parameters."""
    return max(stage_parts(model, tp, pp, spread, vpp, folded=folded), key=lambda part: part.num_params)


@dataclass(frozen=True)
class LayerCounts(Generic[N]):
    """Numbers of layers of the pipeline stages that may be slowest: the most of any stage, and the last stage's."""

    most: N
    last: N

    @classmethod
    def of(cls, model: ModelSpec, pp: int) -> LayerCounts[float]:
        counts = layers_per_stage(model, pp)
        return LayerCounts(max(counts), counts[-1])

    def slowest(self, layer_seconds: N, ends_seconds: N) -> tuple[N, N]:
        """Return the layers of the slowest pipeline stage, and 1 if it is the last, which has embedding and head, or 0.

        The last stage is the slowest unless it has fewer layers and its ends take less than the missing layers.
        """
        is_last = (self.most - self.last) * layer_seconds <= ends_seconds
        return where(is_last, self.last, self.most), 1 * is_last + 0 * layer_seconds


@dataclass(frozen=True)
class ShardedModel(Generic[N]):
    """How one layout shards a model, or how the layouts of several choices do.

    `fullest` is the part of the pipeline stage with the most parameters. `parts` are those of the stages that may need
    the most memory (`stage_parts`); layouts with fewer of them repeat their first.
    """

    model: ModelSpec
    layout: Degrees[N]
    layer_counts: LayerCounts[N]
    fullest: StagePart[N]
    parts: tuple[StagePart[N], ...]

    @property
    def max_params(self) -> N:
        """The most parameters of any of the `parts`."""
        return reduce(maximum, [part.num_params for part in self.parts])


@cache
def sharded(model: ModelSpec, layout: Layout) -> ShardedModel[float]:
    """Return how a layout shards a model."""
    axes, folded = (layout.tp, layout.pp, layout.expert_replicas), layout.fold_size
    parts = stage_parts(model, *axes, layout.vpp, folded=folded)
    fullest = fullest_part(model, *axes, folded=folded)
    return ShardedModel(model, layout, LayerCounts.of(model, layout.pp), fullest, parts)


def sharded_by_each(model: ModelSpec, layout: LayoutColumns) -> ShardedModel[FloatArray]:
    """Return how the layouts of several choices shard a model, each amount [choices]."""
    each = [sharded(model, one) for one in layout.layouts]
    most = max(len(one.parts) for one in each)
    padded = [one.parts + one.parts[:1] * (most - len(one.parts)) for one in each]
    return ShardedModel(
        model,
        layout,
        LayerCounts(*layout.expand_to_choices([field_values(one.layer_counts) for one in each])),
        StagePart(*layout.expand_to_choices([field_values(one.fullest) for one in each])),
        tuple(
            StagePart(*layout.expand_to_choices([field_values(p) for p in parts]))
            for parts in zip(*padded, strict=True)
        ),
    )


def micro_batches_in_flight(layout: Degrees[N], num_behind: N, num_batches: N) -> N:
    """Return the number of micro-batches whose activations in all of its layers a pipeline stage holds at once.

    With q = `num_behind`, the number of pipeline stages from this one to the last, and m micro-batches, it is min(q, m)
    under 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.1). An interleaved pipeline passes
    2(q - 1) + (v - 1)p + 1 micro-batches through one of its v chunks before its first backward pass, which is
    p + (p - 1)/v on the first stage (Korthikanti et al., arXiv:2205.05198, section 4.2.3; Megatron-core,
    `get_pp_rank_microbatches`).
    """
    pp, vpp = layout.pp, layout.vpp
    in_chunks = minimum(vpp * num_batches, 2 * (num_behind - 1) + (vpp - 1) * pp + 1) / vpp
    return where(vpp == 1, minimum(num_batches, num_behind), in_chunks)


def _part(
    shard: ModelSpec, chunks: Sequence[range], pp: int, spread: int, stage: int, *, folded: int
) -> StagePart[float]:
    all_experts = sum(shard.expert_params_between(layers.start, layers.stop) for layers in chunks)
    num_params = sum(shard.params_between(layers.start, layers.stop) for layers in chunks)
    num_params += all_experts // spread - all_experts
    if stage == 0:
        num_params += shard.embedding_params
    if stage == pp - 1:
        repeats = pp > 1 and shard.tied_embeddings and not shard.scalar_head
        num_params += shard.hidden_size + (shard.embedding_params if repeats else shard.head_params)
    num_layers = sum(map(len, chunks))
    adapter_params, of_experts = 0.0, 0.0
    for layers in chunks if shard.adapter else ():
        between = layers.start, layers.stop
        of_experts += shard.adapter_expert_params_between(*between, folded) / spread
        adapter_params += shard.adapter_params_between(*between) - shard.adapter_expert_params_between(*between)
    adapter_params += of_experts
    held_params = num_params + adapter_params
    if shard.adapter and stage == pp - 1:
        adapter_params += shard.trained_head_params
    num_window_layers = sum(shard.window.num_layers(each.start, each.stop) for each in chunks) if shard.window else 0
    num_attention_layers = sum(shard.attention_layers_between(each.start, each.stop) for each in chunks)
    return StagePart(
        num_layers,
        float(held_params),
        pp - stage,
        float(all_experts // spread),
        float(adapter_params),
        of_experts,
        num_window_layers,
        num_attention_layers - num_window_layers,
        sum(shard.linear_layers_between(each.start, each.stop) for each in chunks),
    )
