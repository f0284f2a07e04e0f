"""A run that trains an adapter leaves weights as they are, goes on bit for bit, and needs no reference of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, Adapter
from meshwright.runtime.execution.model_export import export_models
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.model.adapters import is_adapter_parameter
from meshwright.runtime.model.model_shard import named_global_parameters
from tests.runtime.adapting import adapted_job
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.execution.test_train import read_lines
from tests.runtime.laws.test_experts import mixture, write_mixture_job
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.runtime.updates import How, assert_updates_are_those_of_one_rank
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS = 4
TOLERANCE = 1e-4
PLANS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "offloaded": (1, ("actor_train.offload=optimizer",)),
    "tp2, refit to pp2": (2, ("actor_train.layout=tp2,sp", "actor_generate.layout=pp2", "ref_logprob.layout=pp2")),
    "reference apart": (2, ("actor_train.layout=dp2", "actor_generate.layout=dp2", "ref_logprob.layout=tp2")),
    "tp2, pp2": (4, ("actor_train.layout=tp2,pp2", "actor_generate.layout=dp4", "ref_logprob.layout=dp4")),
}
"""By name: ranks and pins."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def asked(directory: Path, name: str, out: str, *, steps: int = STEPS, resume: bool = False) -> RunRequest:
    """A run of the plan of this name."""
    num_ranks, pins = PLANS[name]
    job = adapted_job(write_job(directory, num_ranks=num_ranks))
    return request(job, directory / out, *pins, steps=steps, resume=resume)


Lines: TypeAlias = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def lines(directory: Path) -> Lines:
    """The metrics of a run under the plan of a name, which runs when it is first asked for."""

    @functools.cache
    def of(name: str) -> list[dict[str, float]]:
        run = asked(directory, name, name)
        run_plan(run)
        return read_lines(run.out / "metrics.jsonl")

    return of


@pytest.mark.check_all
def test_every_plan_learns_the_same(lines: Lines) -> None:
    first = lines("one rank")
    assert first[-1]["kl_to_ref"] != 0
    for name in PLANS:
        for line, known in zip(lines(name), first, strict=True):
            for metric in known.keys() - OF_TIME:
                assert line[metric] == pytest.approx(known[metric], abs=TOLERANCE), (name, metric)


def test_the_reference_has_a_copy_of_its_own_where_it_is_cut_otherwise_alone(directory: Path) -> None:
    for name in PLANS:
        plan = asked(directory, name, "none").plan
        assert (plan.copy_of("ref_logprob") == "ref_logprob") == (name == "reference apart"), name


@cases("name", ["one rank", "tp2, refit to pp2"], few=1)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(directory: Path, lines: Lines, name: str) -> None:
    run_plan(asked(directory, name, f"{name} cut", steps=2))
    run = asked(directory, name, f"{name} cut", resume=True)
    run_plan(run)
    for line, known in zip(read_lines(run.out / "metrics.jsonl"), lines(name), strict=True):
        assert {key: line[key] for key in line.keys() - OF_TIME} == {key: known[key] for key in known.keys() - OF_TIME}
    written = [
        _weights(export_models(directory / out, directory / f"{out} written", models={})[0])
        for out in (name, run.out.name)
    ]
    assert all(torch.equal(written[0][key], written[1][key]) for key in written[0])


@pytest.mark.check_all
def test_another_layout_takes_an_adapter_up(directory: Path, lines: Lines) -> None:
    run_plan(asked(directory, "one rank", "moved", steps=2))
    run = asked(directory, "tp2, pp2", "moved", resume=True)
    run_plan(run)
    for line, known in zip(read_lines(run.out / "metrics.jsonl"), lines("one rank"), strict=True):
        for metric in known.keys() - OF_TIME:
            assert line[metric] == pytest.approx(known[metric], abs=TOLERANCE), metric


def test_a_checkpoint_holds_the_adapter_and_no_weights_beside_it(directory: Path, lines: Lines) -> None:
    assert lines("one rank")
    for checkpoint in (directory / "one rank" / "checkpoints").glob("step-*"):
        held = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        of_actor = [key for key in held if key.startswith("actor_train.decoder")]
        assert of_actor
        assert all(map(is_adapter_parameter, of_actor))
        assert any(key.startswith("critic_train.decoder") for key in held)


def test_weights_keep_their_bits_and_adapters_do_not(directory: Path) -> None:
    run = replace(asked(directory, "tp2, refit to pp2", "watched"), steps=2)
    run.out.mkdir()
    for weights, adapters in run_on_ranks(2, _moved, run):
        assert weights == set()
        assert {name.split("/")[0] for name in adapters} >= {"actor_train", "actor_generate"}


def _moved(run: RunRequest) -> tuple[set[str], set[str]]:
    """Of the actor's copies what training changed: of the weights, and of the adapters."""
    rank = RankRun(run)
    before = {name: value.clone() for name, value in _held(rank).items()}
    rank.recorder.open(0)
    for turn in rank.periods:
        rank.run_period(turn)
    rank.finish()
    after = _held(rank)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    rank.close()
    adapters = {name for name in moved if is_adapter_parameter(name)}
    return moved - adapters, adapters


def _held(rank: RankRun) -> dict[str, Tensor]:
    actors = {stage: copy.model for stage, copy in rank.copies.items() if stage.startswith("actor") and copy.model}
    return {
        f"{stage}/{name}": p.detach() for stage, model in actors.items() for name, p in named_global_parameters(model)
    }


def _weights(written: Path) -> dict[str, Tensor]:
    return {name: tensor for path in written.glob("*.safetensors") for name, tensor in load_file(path).items()}


ALL, ATTENTION_ALONE = Adapter(rank=4, alpha=32.0), Adapter(rank=4, alpha=32.0, targets=ATTENTION_LINEARS)
DENSE = [
    How("cp2", 1),
    How("tp2,cp2,sp", 1, "full"),
    How("pp2,cp2", 2),
    How("pp2,vpp2", 1, "full"),
    How("tp2,pp2,vpp2,sp", 2),
    How("tp2", 2, "selective"),
]
MIXED = [How("dp2,ep2", 1), How("tp2,dp2,ep2,sp", 1), How("pp2,dp2,ep2", 1, "full")]


@pytest.mark.check_all
def test_an_adapter_is_trained_alike_with_sequences_and_pipelines_cut(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "Qwen2", num_hidden_layers=4)
    assert_updates_are_those_of_one_rank(directory, DENSE, tmp_path, adapter=ALL)


@pytest.mark.check_all
def test_attention_beside_experts_is_trained_alike_wherever_they_are(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert_updates_are_those_of_one_rank(directory, MIXED, tmp_path, adapter=ATTENTION_ALONE)


EXPERTS = [
    How("tp2,sp", 2, "full"),
    How("tp2,dp2,ep2,sp", 1),
    How("tp2,dp2,ep2,etp1,sp", 1, "full"),
    How("pp2,dp2,ep2", 1),
]


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Glm4Moe", "Llama4"])
def test_experts_are_adapted_alike_wherever_they_are(tmp_path: Path, family: str) -> None:
    """Routed ones, shared ones and dense layers before them."""
    assert_updates_are_those_of_one_rank(mixture(tmp_path / "model", family), EXPERTS, tmp_path, adapter=ALL)


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Llama4"])
def test_a_run_adapts_experts_and_is_resumed_where_they_are_divided_otherwise(tmp_path: Path, family: str) -> None:
    """At first two replicas hold half of the experts each, then two ranks of one half of each expert, and half of them
    whole in the end; the reference is the actor without its adapter."""
    job, out = adapted_job(write_mixture_job(tmp_path, family)), tmp_path / "out"
    stages = ("actor_generate", "actor_logprob", "actor_train")
    for number, layout in enumerate(("dp2,ep2", "tp2", "tp2,ep2,etp1"), start=1):
        sharded = layout.startswith("tp2")
        pins = [f"{stage}.layout={layout}{',sp' if sharded and stage != stages[0] else ''}" for stage in stages]
        asked = request(job, out, *pins, f"ref_logprob.layout={layout}", steps=number, resume=number > 1)
        assert asked.plan.facts.models.actor.adapts_experts
        assert run_plan(asked)
    lines = read_lines(out / "metrics.jsonl")
    assert len(lines) == 3
    assert all(line["generator_gap"] < 1e-4 for line in lines)
    assert any(line["kl_to_ref"] != 0 for line in lines)
    (written,) = [path for path in export_models(out, tmp_path / "exported", models={}) if path.name == "actor"]
    assert not (written / "adapter").exists()
    before, after = _weights(tmp_path / "actor"), _weights(written)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any("experts" in name for name in moved)
    assert not any("router" in name or name.endswith("mlp.gate.weight") for name in moved)
