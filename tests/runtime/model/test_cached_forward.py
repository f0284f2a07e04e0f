"""Rows that go through the decoder in pieces, their keys and values kept, answer as they do whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshwright.profiles.experts import LatentAttention
from meshwright.profiles.layout import Layout, chunk_layers
from meshwright.profiles.model_parts.layer_kinds import LayerKind
from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.kv_cache import PagedCache, allocate_cache
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.stage_passes import PipelineLink, forward_cached
from tests.planner.jobs import model_spec
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

SPEC = replace(model_spec("actor"), num_kv_heads=2)
LATENT = LatentAttention(query_rank=12, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12)
DELTA = LinearAttention(
    rule="gated delta", num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_kernel=3, chunk_tokens=4
)
SPECS = {
    "grouped heads": SPEC,
    "latent attention": replace(SPEC, latent=LATENT, num_kv_heads=SPEC.num_heads, head_dim=24, attention_scale=0.3),
    "sinks": replace(SPEC, attention_sinks=True),
    "states and gates": replace(
        SPEC, attention_gate=True, linear=DELTA, layer_kinds=(LayerKind("linear"), LayerKind("attention")) * 2
    ),
}
ROWS = (torch.arange(9) * 7 % 256, torch.arange(4) * 31 % 256)
PIECES = ((5, 1), (1, 2), (3, 1))
"""Tokens of each row that go through together; none of their sums is a multiple of two but the last."""


def _both_ways(layout: str, spec: ModelSpec) -> tuple[Tensor, ...] | None:
    """On the last stage, logits [S, 1, V / tp] of each row in pieces, of each row at once, and on a single stage of
    rows without a cache, row behind row."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "down_proj" in name:  # which is the same on all ranks
            parameter.data.normal_(std=0.2, generator=generator)
        elif "softmax_offset" in name:
            parameter.data.fill_(0.7)
    done, answers = [0, 0], ([], [])
    relay, cache = PipelineLink(mesh, torch.device("cpu")), _cache(mesh, spec)
    for sizes in PIECES:
        fed = [row[start : start + size] for row, start, size in zip(ROWS, done, sizes, strict=True)]
        for row, output in enumerate(_passed(model, mesh, relay, cache, fed=fed, cached=done)):
            answers[row].append(output)
        done = [start + size for start, size in zip(done, sizes, strict=True)]
    whole = _passed(model, mesh, relay, _cache(mesh, spec), fed=list(ROWS), cached=[0, 0])
    relay.flush()
    found = [torch.cat([*answers[0], *answers[1]]), torch.cat(whole)]
    if mesh.layout.pp == 1:
        found.append(model(torch.cat(ROWS).unsqueeze(0), [len(row) for row in ROWS]).detach())
    return tuple(found) if mesh.is_last_stage else None


def _cache(mesh: Mesh, spec: ModelSpec) -> PagedCache:
    [layers] = chunk_layers(spec, mesh.layout.pp, mesh.pp_rank)
    return allocate_cache(
        spec,
        layers,
        mesh.layout.tp,
        num_blocks=3,
        num_rows=3,
        max_tokens=9,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _passed(
    model: Decoder, mesh: Mesh, relay: PipelineLink, cache: PagedCache, *, fed: list[Tensor], cached: list[int]
) -> tuple[Tensor, ...]:
    """What the stage makes of the rows, in slots 2 and 0; before the last stage it is sent on."""
    sizes = [len(row) for row in fed]
    for row, start, size in zip((2, 0), cached, sizes, strict=True):
        cache.tables.allocate(row, start + size)
    output = forward_cached(model, mesh, relay, torch.cat(fed), cache.continue_rows([2, 0], cached, sizes))
    if not mesh.is_last_stage:
        relay.send_hidden(output)
    return output[: sum(sizes)].split(sizes)


@cases(
    ("kind", "layout"),
    [(kind, layout) for kind in SPECS for layout in ("tp1", "pp2", "tp2,sp", "tp2,pp2")],
    few=[
        *[("grouped heads", layout) for layout in ("tp1", "pp2", "tp2,sp", "tp2,pp2")],
        ("latent attention", "tp2,sp"),
    ],
)
def test_rows_in_pieces_answer_as_rows_at_once(kind: str, layout: str) -> None:
    assert [sum(sizes) for sizes in zip(*PIECES, strict=True)] == [len(row) for row in ROWS]
    answers = [answer for answer in run_on_ranks(4, _both_ways, layout, SPECS[kind]) if answer]
    assert len(answers) == Layout.parse(layout).tp
    for pieces, *whole in answers:
        for each in whole:
            torch.testing.assert_close(pieces, each, atol=1e-5, rtol=1e-5)
