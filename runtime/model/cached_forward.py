"""A forward pass of this rank's pipeline stage over rows whose earlier tokens are in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.runtime.model.context_parallel import num_padding_tokens
from meshwright.runtime.model.kv_cache import ContinuedRows
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import PipelineLink


@torch.no_grad()
def forward_cached(
    model: Decoder, mesh: Mesh, relay: PipelineLink, tokens: Tensor, rows: ContinuedRows, *, ends_only: bool = False
) -> Tensor:
    """The decoder's output for tokens [S] of packed rows on the last stage; hidden states to send on other stages.

    Hidden states are received from the previous stage, which must pass the same rows.
    """
    hidden = None
    if not mesh.is_first_stage:
        num_tokens = len(tokens) + num_padding_tokens(len(tokens), mesh.layout)
        local_tokens = num_tokens // mesh.layout.tp if mesh.layout.sp else num_tokens
        hidden = relay.receive_hidden((local_tokens, 1, model.spec.hidden_size), model.config.params_dtype)
    model.set_input_tensor(hidden)
    output: Tensor = model(tokens.unsqueeze(0), rows.lengths, rows, ends_only=ends_only)
    return output
