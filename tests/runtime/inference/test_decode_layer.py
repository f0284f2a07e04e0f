"""Parts of a decode step on single tokens agree with the modules that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.inference import decode_layer
from meshwright.runtime.inference.attention import step_reads
from meshwright.runtime.inference.decode_layer import Norm, allocate_scratch
from meshwright.runtime.inference.decode_step import DecodeStep
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from tests.planner.jobs import model_spec
from tests.runtime.model.filled_caches import with_room
from tests.runtime.ranks import run_on_ranks


def opened() -> tuple[Decoder, DecodeStep]:
    mesh, spec = build_mesh(Layout(), 0), model_spec("actor")
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    cache = with_room(spec, 4, 8, 64)
    return model, DecodeStep(model, mesh, cache)


def stepped(step: DecodeStep, rows: int, length: int = 0) -> Tensor:
    reads = step_reads(step.cache, np.arange(rows), np.full(rows, length))
    return step(torch.arange(rows), reads)


def with_weights_fetched_first() -> tuple[Tensor, Tensor]:
    _, step = opened()
    plain = stepped(step, 3)
    decode_layer._CPU_CACHE_BYTES = 0
    _, fetching = opened()
    assert fetching._are_fetched
    return plain, stepped(fetching, 3)


def with_weights_elsewhere() -> tuple[Tensor, Tensor]:
    """Logits after weights have moved and changed, and of a step that was made on them."""
    model, step = opened()
    stepped(step, 3)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    step.refresh_weights()
    return stepped(step, 3), stepped(DecodeStep(model, build_mesh(Layout(), 0), step.cache), 3)


def of_few_rows_after_many() -> tuple[Tensor, Tensor]:
    _, step = opened()
    return stepped(step, 4)[:2], stepped(step, 2)


def norms() -> tuple[Tensor, Tensor]:
    model, _ = opened()
    norm, hidden = model.decoder.final_layernorm, torch.randn(5, model.spec.hidden_size) * 3
    torch.nn.init.normal_(norm.weight)
    hidden[0] = 0.0
    return Norm(norm, by_kernel=False)(hidden, allocate_scratch(5, model, build_mesh(Layout(), 0))).clone(), norm(
        hidden
    )


@pytest.mark.parametrize("two", [with_weights_fetched_first, with_weights_elsewhere, of_few_rows_after_many, norms])
def test_both_are_the_same(two: object) -> None:
    found, expected = run_on_ranks(1, in_inference, two)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def in_inference(two: object) -> tuple[Tensor, Tensor]:
    return two()  # type: ignore[operator,no-any-return]
