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
    first: float
    last: float
    if shard.experts:
        each = -(-shard.num_layers // pp)
        first, last = shard.params_between(0, each), shard.params_between(shard.num_layers - each, shard.num_layers)
    else:
        first = last = shard.num_layers * shard.layer_params / pp
    tied = shard.tied_embeddings and not shard.scalar_head
    head = shard.embedding_params if tied else shard.head_params
    return first + shard.embedding_params, last + shard.hidden_size + head
