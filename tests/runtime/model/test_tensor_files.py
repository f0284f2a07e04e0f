"""Tensors of a Hugging Face directory: slices are read as they lie, in one file or several, and nothing else is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.profiles.errors import BadInput
from meshwright.runtime.model.hf_checkpoint import (
    INDEX,
    SINGLE,
    Header,
    StoredTensor,
    TensorFiles,
    unstack_experts,
)

TABLE = torch.arange(24.0).view(6, 4)
NORM = torch.arange(4.0).bfloat16()


@pytest.fixture(params=["one file", "two files"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        save_file({"table": TABLE, "norm": NORM}, tmp_path / SINGLE)
        return tmp_path
    save_file({"table": TABLE}, tmp_path / "first.safetensors")
    save_file({"norm": NORM}, tmp_path / "second.safetensors")
    files = {"table": "first.safetensors", "norm": "second.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_a_slice_is_read_along_either_axis_and_less_where_the_tensor_ends(directory: Path) -> None:
    table = StoredTensor("table", (6, 4))
    with TensorFiles(directory, "model") as files:
        assert torch.equal(files.read(table), TABLE)
        assert torch.equal(files.read(table, axis=0, start=2, stop=4), TABLE[2:4])
        assert torch.equal(files.read(table, axis=1, start=1, stop=3), TABLE[:, 1:3])
        assert torch.equal(files.read(table, axis=0, start=4, stop=9), TABLE[4:])
        assert torch.equal(files.read(StoredTensor("norm", (4,)), start=1), NORM[1:])


def test_headers_tell_shapes_and_types(directory: Path) -> None:
    with TensorFiles(directory, "model") as files:
        assert files.headers() == {"table": Header((6, 4), "F32"), "norm": Header((4,), "BF16")}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (StoredTensor("lm_head.weight", (6, 4)), "has no tensor 'lm_head.weight', which model small needs; give"),
        (StoredTensor("table", (6, 5)), r"tensor 'table' has shape \(6, 4\) and model small needs \(6, 5\); give"),
    ],
)
def test_another_tensor_than_the_model_needs_is_refused(directory: Path, stored: StoredTensor, said: str) -> None:
    with TensorFiles(directory, "small") as files, pytest.raises(BadInput, match=said):
        files.read(stored)


def test_files_are_closed_behind_the_last_read(directory: Path) -> None:
    with TensorFiles(directory, "model") as files:
        files.read(StoredTensor("table", (6, 4)))
    with pytest.raises(Exception, match="closed"):
        files.read(StoredTensor("table", (6, 4)))


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no weights: neither model\.safetensors nor .* is there; give a"):
        TensorFiles(tmp_path, "model")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(BadInput, match="is a device or a pipe"):
        TensorFiles(tmp_path, "model")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": [1]}', '{"weight_map": {"a": "../b"}}', "{}", "{"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(BadInput, match=r"checkpoint index .* cannot be read: .*; write the checkpoint again"):
        TensorFiles(tmp_path, "model")


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**63, 2**64 - 1])
def test_a_header_that_is_not_as_long_as_it_says_is_refused(tmp_path: Path, length: int) -> None:
    save_file({"table": TABLE}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(BadInput, match=r"model\.safetensors cannot be read"):
        TensorFiles(tmp_path, "model")


GATE_UP, DOWN = torch.arange(48.0).view(2, 6, 4), torch.arange(24.0).view(2, 4, 3)


def stacked(directory: Path, **more: torch.Tensor) -> Path:
    """Two experts of width 3 in stacks, in the language model of a model of images and text."""
    block = "model.language_model.layers.0.mlp.experts"
    save_file({f"{block}.gate_up_proj": GATE_UP, f"{block}.down_proj": DOWN, **more}, directory / SINGLE)
    return directory


def test_experts_in_stacks_are_read_one_by_one(tmp_path: Path) -> None:
    block = "model.layers.0.mlp.experts"
    gate, up = (StoredTensor(f"{block}.1.{weight}_proj.weight", (3, 4)) for weight in ("gate", "up"))
    down = StoredTensor(f"{block}.0.down_proj.weight", (4, 3))
    with TensorFiles(stacked(tmp_path), "model") as files:
        assert torch.equal(files.read(gate), GATE_UP[1, :3])
        assert torch.equal(files.read(up), GATE_UP[1, 3:])
        assert torch.equal(files.read(up, axis=0, start=1, stop=2), GATE_UP[1, 4:5])
        assert torch.equal(files.read(down, axis=1, start=1, stop=3), DOWN[0, :, 1:3])
        unstacked = unstack_experts(files.headers())
        assert unstacked == {
            f"{block}.{n}.{weight}_proj.weight": Header(shape, "F32")
            for n in range(2)
            for weight, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3)))
        }
        for stored in (StoredTensor(gate.name, (4, 4)), StoredTensor(f"{block}.2.gate_proj.weight", (3, 4))):
            with pytest.raises(BadInput, match=r"experts.gate_up_proj' has shape \(2, 6, 4\) and model model needs"):
                files.read(stored)


def test_a_tensor_with_two_names_is_refused(tmp_path: Path) -> None:
    stacked(tmp_path, **{"model.norm.weight": NORM, "model.language_model.norm.weight": NORM + 1})
    with pytest.raises(BadInput, match="two tensors for one parameter; remove the one that is not the model's"):
        TensorFiles(tmp_path, "model")
