"""A model with an adapter answers as its equation says, at every layout, and without it as its weights alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.adapters import init_adapter, is_adapter_parameter, merge_adapter, without_adapter
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.runtime.checkpoints import BIASED_LLAMA, expected_logprobs, tokens, write_checkpoint
from tests.runtime.laws.test_experts import mixture
from tests.runtime.ranks import run_on_ranks

ADAPTER = Adapter(rank=4, alpha=6.0)
LAYOUTS = ["tp1", "tp2", "tp2,sp", "pp2", "tp2,pp2,sp"]


def _answers(directory: Path, layout: str, *, moved: bool, out: Path | None = None) -> list[list[Tensor]] | None:
    """With the adapter and without it, on the ranks of the last stage; B is given numbers where it has `moved`."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = replace(read_model(directory), adapter=ADAPTER)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    init_adapter(dict(named_global_parameters(model)), 0, tp=mesh.layout.tp, tp_rank=mesh.tp_rank, etp=mesh.layout.etp)
    for name, parameter in named_global_parameters(model) if moved else ():
        if name.endswith("adapter_up"):  # the same at every layout, so that each answers alike
            nn.init.constant_(parameter, 0.02)
    blocks = [MicroBatch.pack(tokens())]
    both = [forward_logprobs(model, mesh, blocks)]  # type: ignore[arg-type]
    with without_adapter(model):
        both.append(forward_logprobs(model, mesh, blocks))  # type: ignore[arg-type]
    if out is not None:
        save_weights(model, spec, mesh, out, config_from=directory)
    return [[torch.stack(block.split_rows(a)) for block, a in zip(blocks, found, strict=False)] for found in both]


def _of_last_stage(found: list[list[list[Tensor]] | None]) -> list[tuple[Tensor, Tensor]]:
    return [(with_it[0], alone[0]) for with_it, alone in filter(None, found) if with_it]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_its_start_an_adapter_changes_nothing(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model")
    for adapted, alone in _of_last_stage(run_on_ranks(4, _at_start, directory, layout)):
        assert torch.equal(adapted, alone)
        torch.testing.assert_close(alone, expected_logprobs(directory, tokens()), atol=1e-5, rtol=0)


def _at_start(directory: Path, layout: str) -> list[list[Tensor]] | None:
    return _answers(directory, layout, moved=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_what_is_written_answers_in_transformers_as_the_adapted_model_does(
    tmp_path: Path, layout: str, family: str
) -> None:
    options = BIASED_LLAMA if family == "Llama" else {}
    directory = write_checkpoint(tmp_path / "model", family, **options)
    found = _of_last_stage(run_on_ranks(4, _written, directory, layout, tmp_path / "out"))
    expected = expected_logprobs(tmp_path / "out", tokens())
    assert (expected - expected_logprobs(directory, tokens())).abs().max() > 1e-3
    for adapted, alone in found:
        torch.testing.assert_close(adapted, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(alone, expected_logprobs(directory, tokens()), atol=1e-5, rtol=0)


@pytest.mark.check_all
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2,ep2,etp1", "pp2,dp2,ep2"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Glm4Moe", "Llama4"])
def test_adapted_experts_answer_in_transformers_as_here(tmp_path: Path, layout: str, family: str) -> None:
    directory = mixture(tmp_path / "model", family)
    found = _of_last_stage(run_on_ranks(4, _written, directory, layout, tmp_path / "out"))
    expected = expected_logprobs(tmp_path / "out", tokens())
    assert (expected - expected_logprobs(directory, tokens())).abs().max() > 1e-3
    for adapted, alone in found:
        torch.testing.assert_close(adapted, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(alone, expected_logprobs(directory, tokens()), atol=1e-5, rtol=0)


def _written(directory: Path, layout: str, out: Path) -> list[list[Tensor]] | None:
    return _answers(directory, layout, moved=True, out=out)


def test_training_gives_gradients_to_the_adapter_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    [named] = run_on_ranks(1, _trained_names, directory)
    assert all(wants == is_adapter_parameter(name) for name, wants in named.items())
    assert sum(named.values()) == 8 * read_model(directory).num_layers


def _trained_names(directory: Path) -> dict[str, bool]:
    spec = replace(read_model(directory), adapter=ADAPTER)
    model = build_model(spec, build_mesh(Layout(), 0), trainable=True)
    return {name: parameter.requires_grad for name, parameter in named_global_parameters(model)}


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_cut_starts_with_its_part_of_what_is_whole(tp: int) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.adapter_down"
    whole, parts = nn.Parameter(torch.zeros(3, 8)), [nn.Parameter(torch.zeros(3, 8 // tp)) for _ in range(tp)]
    init_adapter({name: whole}, 5, tp=1, tp_rank=0)
    for rank, part in enumerate(parts):
        part.tensor_model_parallel = True  # type: ignore[attr-defined]
        init_adapter({name: part}, 5, tp=tp, tp_rank=rank)
    assert torch.equal(torch.cat([part.detach() for part in parts], dim=1), whole.detach())
    assert 0 < whole.abs().max() <= 8**-0.5


def test_linears_layers_and_seeds_start_apart() -> None:
    starts = {}
    for seed in (0, 1):
        for module in ("decoder.layers.0.mlp.linear_fc2", "decoder.layers.1.mlp.linear_fc2"):
            starts[seed, module] = nn.Parameter(torch.zeros(2, 4))
            init_adapter({f"{module}.adapter_down": starts[seed, module]}, seed, tp=1, tp_rank=0)
    assert len({tuple(start.flatten().tolist()) for start in starts.values()}) == len(starts)


def test_a_sum_is_rounded_once_and_what_has_no_adapter_stays() -> None:
    draw = torch.Generator().manual_seed(0)
    up, down = torch.randn(6, 2, generator=draw), torch.randn(2, 4, generator=draw)
    held = {
        "linear_fc1.weight": torch.ones(6, 4, dtype=torch.bfloat16),
        "linear_fc1.bias": torch.ones(6),
        "linear_fc1.adapter_up": up,
        "linear_fc1.adapter_down": down,
        "linear_fc2.weight": torch.ones(3),
    }
    exact = 1 + ADAPTER.scale * up.double() @ down.double()
    assert torch.equal(merge_adapter(held, "linear_fc1.weight", ADAPTER), exact.float().bfloat16())
    for name in ("linear_fc1.bias", "linear_fc2.weight"):
        assert torch.equal(merge_adapter(held, name, ADAPTER), held[name])
    assert torch.equal(merge_adapter(held, "linear_fc1.weight", None), held["linear_fc1.weight"])


def _expert_gradients(directory: Path, out: Path) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Each parameter of the adapters of MLPs and experts with its gradient, on one rank; the merged model is written to
    `out`."""
    mesh = build_mesh(Layout(), 0)
    if not mesh.is_member:
        return None
    spec = replace(read_model(directory), adapter=ADAPTER)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    named = dict(named_global_parameters(model))
    init_adapter(named, 0, tp=1, tp_rank=0)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in named.items():
        if name.endswith("adapter_up"):
            nn.init.normal_(parameter, std=0.05, generator=draw)
    save_weights(model, spec, mesh, out, config_from=directory)
    rows, length = tokens().shape
    logits = model(tokens().view(1, -1), (length,) * rows)[..., : spec.vocab_size]  # type: ignore[operator]
    _squares(logits.view(rows, length, -1)).backward()
    return {
        name: (parameter.detach(), parameter.grad)
        for name, parameter in named.items()
        if is_adapter_parameter(name) and ".mlp." in name and parameter.grad is not None
    }


def _squares(logits: Tensor) -> Tensor:
    """The sum of the squares of log-probabilities of next tokens, from logits [B, S, V]."""
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, tokens()[:, 1:, None])
    return logprobs.square().sum() / 1000


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_gradients_of_adapters_of_experts_follow_from_those_of_merged_weights_in_float64(
    tmp_path: Path, family: str
) -> None:
    """With G the gradient of W + s B A: dA = s B^T G and dB = s G A^T."""
    directory, out = mixture(tmp_path / "model", family), tmp_path / "out"
    [found] = filter(None, run_on_ranks(1, _expert_gradients, directory, out))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64, experts_implementation="eager")
    _squares(model(tokens()).logits).backward()
    num_experts = 0
    for module in {name.rpartition(".")[0] for name in found}:
        layer, expert = int(module.split(".")[2]), module.partition("local_experts.")[2].partition(".")[0]
        mlp = model.model.layers[layer].mlp
        if expert:
            stack = mlp.experts.gate_up_proj if module.endswith("fc1") else mlp.experts.down_proj
            of_merged = stack.grad[int(expert)]
        else:
            linears = ["gate_proj", "up_proj"] if module.endswith("fc1") else ["down_proj"]
            of_merged = torch.cat([mlp.shared_expert.get_submodule(name).weight.grad for name in linears])
        num_experts += bool(expert)
        (up, up_grad), (down, down_grad) = (found[f"{module}.adapter_{kind}"] for kind in ("up", "down"))
        expected_up = ADAPTER.scale * of_merged @ down.double().T
        expected_down = ADAPTER.scale * up.double().T @ of_merged
        torch.testing.assert_close(up_grad.double(), expected_up, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(down_grad.double(), expected_down, atol=2e-6, rtol=1e-4)
    assert num_experts >= 8
