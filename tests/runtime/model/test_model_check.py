"""Weights that disagree with their config are refused before anything starts, each with one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.weight_check import weight_violations
from tests.runtime.checkpoints import FAMILIES, edit_config, write_checkpoint
from tests.runtime.command import Call
from tests.runtime.laws.test_experts import mixture


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama, tmp_path / "model")
    return tmp_path / "model"


def said(directory: Path, *, scalar_head: bool | None = None) -> list[str]:
    return list(weight_violations(read_model(directory, scalar_head=scalar_head), directory))


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Puts tensors into the file, and takes those that are None out of it; dots are written as two underscores."""
    stored = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "head"),
    [
        (family, head)
        for family in FAMILIES
        for head in ("ForCausalLM", "ForSequenceClassification")
        if hasattr(transformers, family + head)
    ],
)
def test_weights_of_every_family_are_those_of_their_config(tmp_path: Path, family: str, head: str) -> None:
    assert said(write_checkpoint(tmp_path, family, head=head)) == []


def test_experts_are_those_of_their_config(tmp_path: Path) -> None:
    assert said(mixture(tmp_path)) == []


def test_a_critic_may_start_from_a_language_model_and_old_buffers_are_passed_over(model: Path) -> None:
    assert said(model, scalar_head=True) == []
    change(model, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert said(model) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 3}, "holds 4 layers and config.json says 3"),
        ({"num_hidden_layers": 5}, "holds 4 layers and config.json says 5"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "has auto_map: .* code of its own"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"has quantization_config \(gptq\)"),
        ({"attention_bias": True}, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"intermediate_size": 128}, r"gate_proj.weight' has shape \(96, 64\) and model model needs \(128, 64\)"),
        ({"vocab_size": 320}, r"'model.embed_tokens.weight' has shape \(260, 64\) .* needs \(320, 64\)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has no 'score.weight', the head that gives a score"),
    ],
)
def test_a_config_of_other_weights_is_refused(model: Path, changes: dict[str, object], sentence: str) -> None:
    edit_config(model, **changes)
    assert any(re.search(sentence, each) for each in said(model)), said(model)


def test_other_tensors_are_refused(model: Path) -> None:
    change(model, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    assert "'model.layers.0.self_attn.q_proj.bias', which LlamaForCausalLM does not have with this" in said(model)[0]
    change(model, model__layers__0__self_attn__q_proj__bias=None, model__norm__weight=None)
    assert "has no tensor 'model.norm.weight'" in said(model)[0]
    change(model, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert "'model.norm.weight' is I8, not one of F32, BF16, F16" in said(model)[0]


def test_files_that_are_no_safetensors_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-100], b"", b"not tensors", b"\0" * 4096):
        file.write_bytes(broken)
        assert ["model.safetensors cannot be read" in each for each in said(model)] == [True]
    file.unlink()
    assert "holds no weights" in said(model)[0]
    (model / "pytorch_model.bin").touch()
    assert "can run code when it is read; save them as safetensors" in said(model)[0]
    (model / "config.json").rename(model / "other.json")
    assert "has no config.json" in next(weight_violations(read_model(model / "other.json"), model))


def test_an_index_of_other_files_is_refused(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    files = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    index.write_text(json.dumps({"weight_map": files}))
    assert said(model) == []
    index.write_text(json.dumps({"weight_map": {**files, "more": "second.st"}}))
    assert "second.st does not exist; check the path" in said(model)[0]
    index.write_text(json.dumps({"weight_map": {**files, "more": "model.safetensors"}}))
    assert "says that model.safetensors holds 'more' and it does not" in said(model)[0]
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'):
        index.write_text(text)
        assert "model.safetensors.index.json cannot be read" in said(model)[0]


def test_plan_refuses_a_reward_without_a_head_and_run_whatever_its_ranks_could_not_load(
    job: Path, tmp_path: Path, call: Call
) -> None:
    directory = tmp_path / "job"
    shutil.copytree(job.parent, directory)
    path, plan, out = directory / job.name, tmp_path / "plan.json", tmp_path / "out"
    assert call("plan", path, "-o", plan).code == 0

    def run() -> str:
        outcome = call("run", plan, path, "--steps", "1", "--out", out)
        assert (outcome.code, outcome.out, out.exists()) == (2, "", False)
        assert len(outcome.err.splitlines()) == 1
        return outcome.err

    (directory / "reward" / "model.safetensors").write_bytes(b"")
    assert "critic: checkpoint file" in run()
    shutil.rmtree(directory / "reward")
    shutil.copytree(directory / "actor", directory / "reward")
    for said_of in (run(), call("plan", path, "-o", tmp_path / "other.json").err):
        assert "models.reward: " in said_of
        assert "holds a LlamaForCausalLM, which has no scalar head (score.weight)" in said_of
    assert not (tmp_path / "other.json").exists()


def test_run_refuses_a_tokenizer_larger_than_the_vocabulary(job: Path, tmp_path: Path, call: Call) -> None:
    directory = tmp_path / "job"
    shutil.copytree(job.parent, directory)
    tokenizer = directory / "tokenizer" / "tokenizer.json"
    plan = tmp_path / "plan.json"
    assert call("plan", directory / job.name, "-o", plan).code == 0
    document = json.loads(tokenizer.read_text())
    document["model"]["vocab"]["more"] = 32
    tokenizer.write_text(json.dumps(document))
    outcome = call("run", plan, directory / job.name, "--steps", "1", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "has ids up to 32 and the actor has a vocabulary of 32" in outcome.err


def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_must_be_the_same(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "model", "Qwen2")
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    change(tied, lm_head__weight=embedding)
    assert said(tied) == []
    embedding[-1, -1] += 0.5
    change(tied, lm_head__weight=embedding)
    assert (
        "stores a 'lm_head.weight' other than 'model.embed_tokens.weight', and config.json ties them" in said(tied)[0]
    )


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
def test_layers_that_predict_further_tokens_may_be_stored_and_are_not_read(tmp_path: Path, family: str) -> None:
    directory = mixture(tmp_path, family)
    change(directory, model__layers__4__eh_proj__weight=torch.zeros(3))
    assert said(directory) == []
    edit_config(directory, num_nextn_predict_layers=0)
    assert any("holds 5 layers and config.json says 4" in sentence for sentence in said(directory))
