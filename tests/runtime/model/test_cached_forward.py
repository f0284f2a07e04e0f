"""Rows that go through the decoder in pieces, their keys and values kept, answer as they do whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.stage_passes import PipelineLink, forward_cached
from tests.planner.jobs import model_spec
from tests.runtime.ranks import run_on_ranks

SPEC = replace(model_spec("actor"), num_kv_heads=2)
ROWS = (torch.arange(9) * 7 % 256, torch.arange(4) * 31 % 256)
PIECES = ((5, 1), (1, 2), (3, 1))
"""Tokens of each row that go through together; none of their sums is a multiple of two but the last."""


def _both_ways(layout: str) -> tuple[Tensor, Tensor] | None:
    """On the last stage, logits [S, 1, V / tp] of each row in pieces and of each row at once, row behind row."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    model = build_model(SPEC, mesh)
    assert isinstance(model, Decoder)
    done, answers = [0, 0], ([], [])
    relay, cache = PipelineLink(mesh, torch.device("cpu")), _cache(mesh)
    for sizes in PIECES:
        fed = [row[start : start + size] for row, start, size in zip(ROWS, done, sizes, strict=True)]
        for row, output in enumerate(_passed(model, mesh, relay, cache, fed=fed, cached=done)):
            answers[row].append(output)
        done = [start + size for start, size in zip(done, sizes, strict=True)]
    whole = _passed(model, mesh, relay, _cache(mesh), fed=list(ROWS), cached=[0, 0])
    relay.flush()
    return (torch.cat([*answers[0], *answers[1]]), torch.cat(whole)) if mesh.is_last_stage else None


def _cache(mesh: Mesh) -> PagedCache:
    return PagedCache(
        num_layers=SPEC.num_layers // mesh.layout.pp,
        num_blocks=3,
        num_rows=3,
        num_kv_heads=SPEC.num_kv_heads // mesh.layout.tp,
        max_tokens=9,
        head_dim=SPEC.head_dim,
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


@pytest.mark.parametrize("layout", ["tp1", "pp2", "tp2,sp", "tp2,pp2"])
def test_rows_in_pieces_answer_as_rows_at_once(layout: str) -> None:
    assert [sum(sizes) for sizes in zip(*PIECES, strict=True)] == [len(row) for row in ROWS]
    answers = [answer for answer in run_on_ranks(4, _both_ways, layout) if answer]
    assert len(answers) == Layout.parse(layout).tp
    for pieces, whole in answers:
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)
