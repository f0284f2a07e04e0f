"""How many parameters a rank holds."""

from __future__ import annotations

from functools import cache

from meshwright.profiles.model import ModelSpec


@cache
def stage_params(model: ModelSpec, tp: int, pp: int) -> tuple[float, float]:
    """Parameters on a rank of the first and of the last pipeline stage; the same number twice when there is one stage.

    The last of several stages repeats a tied embedding.
    """
    shard = model.shard(tp)
    if pp == 1:
        return float(shard.num_params), float(shard.num_params)
    layers = shard.num_layers * shard.layer_params / pp
    tied = shard.tied_embeddings and not shard.scalar_head
    head = shard.embedding_params if tied else shard.head_params
    return layers + shard.embedding_params, layers + shard.hidden_size + head
