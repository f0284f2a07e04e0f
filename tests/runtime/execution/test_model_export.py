"""What users take home: models that transformers reads, bit for bit those of the run, whatever the layouts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from meshwright.planner.job.job import read_job
from meshwright.planner.job.sections import ModelSource
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.model_export import TrainedModel, write_models
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import FAMILIES, expected_scores, tokens, write_checkpoint
from tests.runtime.command import Call
from tests.runtime.laws.test_experts import mixture
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import request, write_job
from tests.runtime.updates import written
from tests.seeds import cases

pytestmark = pytest.mark.slow

CHAT = {"tokenizer_config.json": '{"eos_token": "<eos>"}', "chat_template.jinja": "{{ messages }}", "merges.txt": "a b"}
OTHER_TIE = {"Llama": True, "Qwen2": False}
DENSE = ["tp2", "pp2", "tp2,pp2", "pp2,vpp2"]
EXPERTS = ["dp2,ep2", "tp2,pp2", "tp2", "pp2"]


def _round_trips(cases: list[tuple[Path, str]], target: Path, dtype: torch.dtype) -> None:
    """Reads each model in its layout, gives it to a trainer that does nothing, and writes it."""
    for directory, name in cases:
        mesh = build_mesh(Layout.parse(name), 0)
        spec, model = read_model(directory), None
        if mesh.is_member:
            model = build_model(spec, mesh, dtype=dtype, trainable=True)
            load_weights(model, spec, mesh, directory)
            Trainer(model, mesh, learning_rate=1.0)
        job = read_job(target / "job-1.yaml")
        models = job.models.model_copy(update={"actor": ModelSource(path=str(directory))})
        trained = TrainedModel(role=Role.ACTOR, spec=spec, mesh=mesh, model=model)
        place = target / f"{directory.name} {name}"
        write_models([trained], job.model_copy(update={"models": models}), target, place)


@cases("every", [False, True], few=1, ids=["a layout of each", "every layout"])
@cases("dtype", [torch.float32, torch.bfloat16], few=1)
def test_what_was_not_trained_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, every: bool) -> None:
    """Every family, tied and untied, in every kind of layout, with the tokenizer of the job beside it."""
    write_job(tmp_path, num_ranks=1)
    for name, text in CHAT.items():
        (tmp_path / "tokenizer" / name).write_text(text)
    sources = [write_checkpoint(tmp_path / family, family, **changes) for family, changes in FAMILIES.items()]
    for family, tied in OTHER_TIE.items():
        changes = {**FAMILIES[family], "tie_word_embeddings": tied}
        sources.append(write_checkpoint(tmp_path / f"{family} {tied}", family, **changes))
    mixtures = [mixture(tmp_path / family, family) for family in ("Mixtral", "Qwen3Moe")]
    for source in (*sources, *mixtures) if dtype != torch.float32 else ():
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(source)
    of_each = ((sources, DENSE), (mixtures, EXPERTS))
    cases = [
        (source, layout)
        for models, layouts in of_each
        for number, source in enumerate(models)
        for layout in (layouts if every else layouts[number % len(layouts) :][:1])
    ]
    run_on_ranks(4, _round_trips, cases, tmp_path, dtype, timeout=300)
    for source, layout in cases:
        found, stored = written(tmp_path / f"{source.name} {layout}" / "actor"), written(source)
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], tensor), (source.name, layout, name)
        files = {path.name for path in (tmp_path / f"{source.name} {layout}" / "actor").iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json", *CHAT} <= files
        config = json.loads((tmp_path / f"{source.name} {layout}" / "actor" / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert not list(tmp_path.glob("*.partial"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps in layouts of two ranks."""
    directory = tmp_path_factory.mktemp("job")
    path = write_job(directory, num_ranks=2)
    asked = request(path, directory / "run", "actor_train.layout=tp2", "critic_train.layout=pp2", steps=2)
    assert run_plan(replace(asked, export_every=1))
    return asked.out


def test_a_run_leaves_its_models_and_export_writes_the_same(run: Path, tmp_path: Path, call: Call) -> None:
    assert sorted(path.name for path in (run / "models").iterdir()) == ["step-000001", "step-000002"]
    first, last = (run / "models" / f"step-00000{step}" for step in (1, 2))
    outcome = call("export", run, "--to", "hf", "-o", tmp_path / "models", "--ranks", 2, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"models": [str(tmp_path / "models" / role) for role in ("actor", "critic")]}
    for role in ("actor", "critic"):
        exported, trained = written(tmp_path / "models" / role), written(last / role)
        assert exported.keys() == trained.keys()
        assert all(torch.equal(exported[name], trained[name]) for name in trained)
        assert any((written(first / role)[name] != trained[name]).any() for name in trained)


def test_a_trained_actor_loads_in_transformers_generates_and_has_the_log_probabilities_of_the_run(
    tmp_path: Path,
) -> None:
    """The proximal log-probabilities of step 2 are those of the policy after two updates."""
    path = write_job(tmp_path, num_ranks=1)
    asked = request(path, tmp_path / "run", steps=3)
    asked.out.mkdir()
    [held] = run_on_ranks(1, _experience_and_export, asked, timeout=300)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "models" / "step-000002" / "actor")
    assert model.config.eos_token_id == [1]
    for row, ids in held["tokens"].items():
        with torch.no_grad():
            expected = model(ids[None].long()).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None].long())[:, 0]
        torch.testing.assert_close(held["proximal_logprobs"][row][:-1], expected, atol=1e-5, rtol=0)
    prompt = held["tokens"][0][None, :3].long()
    drawn = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, pad_token_id=0)
    assert drawn.shape[1] > prompt.shape[1]
    critic = tmp_path / "run" / "models" / "step-000002" / "critic"
    assert transformers.AutoConfig.from_pretrained(critic).num_labels == 1
    assert expected_scores(critic, tokens(rows=1) % 32).isfinite().all()


def _experience_and_export(asked: RunRequest) -> dict[str, dict[int, Tensor]]:
    """What the last step trained on; the models are written after the second."""
    run = RankRun(asked)
    run.recorder.open(0)
    for turn in run.periods:
        if turn == 2:
            run.export(2)
        experience = run.run_period(turn).experience
    run.finish()
    run.close()
    fields = ("tokens", "proximal_logprobs")
    return {field: {row: experience.get(field, row) for row in experience.rows(field)} for field in fields}


def test_what_cannot_be_exported_gets_a_sentence_and_nothing_is_written(run: Path, tmp_path: Path, call: Call) -> None:
    there = tmp_path / "there"
    there.mkdir()

    def said(*arguments: object, output: Path = tmp_path / "new") -> str:
        outcome = call("export", *arguments, "-o", output)
        assert (outcome.code, outcome.out) == (2, "")
        assert len(outcome.err.splitlines()) == 1
        assert not (tmp_path / "new").exists()
        return outcome.err

    assert "exists already; export overwrites nothing" in said(run, "--to", "hf", output=there)
    assert list(there.iterdir()) == []
    assert "--ranks 5: " in said(run, "--to", "hf", "--ranks", 5)
    assert "holds no plan.json" in said(there, "--to", "hf")
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("checkpoints", "models"))
    assert "holds no checkpoint to export" in said(other, "--to", "hf")
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    for path in (other / "checkpoints").rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in said(other, "--to", "hf")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.check_all
def test_models_that_have_moved_since_the_run_are_named(run: Path, tmp_path: Path, call: Call) -> None:
    """The run's directory is copied with the job's models under other names; export needs their shapes and config."""
    sources = run.parent
    shutil.copytree(sources / "tokenizer", tmp_path / "tokenizer")
    moved = {role: shutil.copytree(sources / role, tmp_path / "elsewhere" / role) for role in ("actor", "reward")}
    document = json.loads((run / "run.json").read_text())
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "run.json").write_text(json.dumps({**document, "directory": str(tmp_path)}))
    outcome = call("export", copy, "--to", "hf", "-o", tmp_path / "models")
    assert outcome.code == 2
    assert "restore it to export, or give its directory as --model actor=DIR" in outcome.err
    options = [f"--model={role}={path}" for role, path in moved.items()]
    outcome = call("export", copy, "--to", "hf", "-o", tmp_path / "models", *options)
    assert outcome.code == 0, outcome.err
    config = json.loads((moved["actor"] / "config.json").read_text())
    (moved["actor"] / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    outcome = call("export", copy, "--to", "hf", "-o", tmp_path / "again", *options)
    assert outcome.code == 2
    assert "has another shape than the run's actor" in outcome.err
