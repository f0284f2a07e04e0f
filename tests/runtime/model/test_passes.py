"""What goes straight over the weights says and caches what goes through megatron's modules does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.decode_rounds import NO_STEPS, ForwardPasses, StepRows
from meshwright.runtime.inference.decode_step import PackedStep
from meshwright.runtime.model.adapters import init_adapter
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model, named_global_parameters
from meshwright.runtime.model.stage_passes import PipelineLink
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import BIASED_LLAMA, FAMILIES, tokens, write_checkpoint
from tests.runtime.model.test_adapted import ADAPTER
from tests.runtime.model.test_quantised import refitted
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

pytestmark = pytest.mark.slow

NUM_SLOTS, MAX_TOKENS = 8, 80
TEXTS = [row.tolist() for row in tokens(NUM_SLOTS, MAX_TOKENS)]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
Said = list[Tensor]


def held(directory: Path, layout: str, kind: str) -> tuple[Decoder | None, Mesh]:
    """The model on a rank of the layout."""
    if kind == "in 8 bits":
        return refitted(directory, layout)
    mesh, spec = build_mesh(Layout.parse(layout), 0), read_model(directory)
    if not mesh.is_member:
        return None, mesh
    if kind == "adapted":
        spec = replace(spec, adapter=ADAPTER)
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    load_weights(model, spec, mesh, directory)
    if kind == "adapted":
        named = dict(named_global_parameters(model))
        init_adapter(named, 0, tp=mesh.layout.tp, tp_rank=mesh.tp_rank)
        for name, parameter in named.items():
            if name.endswith("adapter_up"):
                torch.nn.init.constant_(parameter, 0.02)
    return model, mesh


def opened(model: Decoder, mesh: Mesh, *, by_modules: bool) -> tuple[ForwardPasses, PagedCache, PipelineLink]:
    spec, device = model.spec, torch.device("cpu")
    cache = PagedCache(
        num_layers=len(model.decoder.layers),
        num_blocks=24,
        num_rows=NUM_SLOTS,
        num_kv_heads=spec.num_kv_heads // mesh.layout.tp,
        max_tokens=MAX_TOKENS,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=device,
    )
    relay, step = PipelineLink(mesh, device), PackedStep(model, mesh, cache)
    passes = ForwardPasses(step, step, model, mesh, relay)
    passes._uses_modules = by_modules
    return passes, cache, relay


def steps_of(cached: dict[int, int]) -> StepRows:
    """The next token of each slot of which so many are cached."""
    tokens = [TEXTS[slot][length] for slot, length in cached.items()]
    return StepRows(*(np.array(column, dtype=np.int64) for column in ([*cached], [*cached.values()], tokens)))


def rounds(model: Decoder, mesh: Mesh, *, by_modules: bool) -> tuple[Said, Said]:
    """What the last stage says in rounds in which rows begin, go on, share a prefix and take steps beside all that;
    and what this stage caches."""
    passes, cache, relay = opened(model, mesh, by_modules=by_modules)
    lengths = {0: 5, 1: 40, 2: 33, 3: 5, 4: 50, 5: 7, 7: 3}
    for slot, length in lengths.items():
        assert cache.tables.allocate(slot, length + 4)
    texts = {slot: (slot, TEXTS[slot][:length]) for slot, length in lengths.items()}
    first = [(0, 0, 5), (1, 0, 40), (2, 0, 33), (3, 0, 5), (4, 0, 10)]
    said = [passes(NO_STEPS, [texts[slot] for slot in range(5)], [first, [(4, 10, 20)]])]
    # One text goes on for two packs more, the first of them behind steps; another pack begins a row.
    begun = {slot: lengths[slot] for slot in range(4)}
    said.append(passes(steps_of(begun), [texts[4], texts[5]], [[(0, 20, 35)], [(0, 35, 50)], [(1, 0, 7)]]))
    # A row reads the prompt of another, and both go on.
    cache.tables.share(1, 6, 40)
    assert cache.tables.allocate(6, 44)
    cache.share(1, 6, 40)
    begun = {slot: length + 1 for slot, length in begun.items()} | {4: 50, 5: 7}
    said.append(passes(steps_of(begun | {6: 40}), [], []))
    begun = {slot: length + 1 for slot, length in begun.items()} | {6: 41}
    said.append(passes(steps_of(begun), [texts[7]], [[(0, 0, 3)]]))
    relay.flush()
    caches = [held for slot, length in {**begun, 7: 2}.items() for held in cache.read(slot, length + 1)]
    return [logits[:, : model._num_token_columns()] for logits in said if logits is not None], caches


@torch.no_grad()
def both_ways(directory: Path, layout: str, kind: str) -> tuple[Said, Said] | None:
    """What is said and cached straight and through the modules."""
    model, mesh = held(directory, layout, kind)
    if model is None:
        return None
    straight, through = (rounds(model, mesh, by_modules=by_modules) for by_modules in (False, True))
    assert [len(said) for said in straight[0]] == ([4, 6, 7, 8] if mesh.is_last_stage else [])
    return [*straight[0], *straight[1]], [*through[0], *through[1]]


@cases("kind", [*FAMILIES, "biased", "adapted", "with experts"], few=2)
def test_both_ways_say_and_cache_the_same(tmp_path: Path, kind: str) -> None:
    if kind == "with experts":
        directory = write_checkpoint(tmp_path / "model", "Mixtral", **EXPERTS)
    elif kind == "biased":
        directory = write_checkpoint(tmp_path / "model", **BIASED_LLAMA)
    else:
        directory = write_checkpoint(tmp_path / "model", "Llama" if kind == "adapted" else kind)
    for layout in ("tp1", "tp2", "pp2", "tp2,pp2"):
        answers = [one for one in run_on_ranks(4, both_ways, directory, layout, kind) if one is not None]
        assert len(answers) == Layout.parse(layout).num_ranks
        for straight, through in answers:
            for one, other in zip(straight, through, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_both_ways_say_the_same_in_8_bits(tmp_path: Path) -> None:
    """But where a number lies halfway between two, which may go either way."""
    directory = write_checkpoint(tmp_path / "model", **BIASED_LLAMA)
    for layout in ("tp1", "tp2", "pp2"):
        for straight, through in filter(None, run_on_ranks(4, both_ways, directory, layout, "in 8 bits")):
            off = torch.cat([(one - other).abs().flatten() for one, other in zip(straight, through, strict=True)])
            assert float(off.median()) < 1e-4
            assert float(off.mean()) < 0.05
