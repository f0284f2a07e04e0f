"""Mutated documents: drawn again the same, near a good one, and what a command does with one is seen."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.survival import documents
from benchmarks.survival.documents import Finding, Reader, Tried, _drawn
from benchmarks.survival.hostile_world import OUT, Kind, Read
from benchmarks.survival.mutations import Form, Special

TREE = {"models": {"actor": {"path": "x"}}, "numbers": [1, 2.5, None]}
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
GOOD = {
    Form.JSON: json.dumps(TREE).encode(),
    Form.YAML: yaml.safe_dump(TREE).encode(),
    Form.LINES: json.dumps(TREE).encode() + b"\n" + json.dumps(TREE).encode() + b"\n",
    Form.SAFETENSORS: len(HEADER).to_bytes(8, "little") + HEADER + bytes(4),
    Form.TEXT: b"python3 train.py --lr 1e-6\n",
    Form.BYTES: bytes(range(64)),
}


def kind(form: Form, *reads: Read) -> Kind:
    return Kind(name=form.value, path="file", form=form, reads=reads)


@pytest.mark.parametrize("form", Form)
def test_mutations_are_the_same_for_the_same_seed_and_of_every_sort(form: Form) -> None:
    first, again, other = ([*_drawn(kind(form), GOOD[form], 200, seed)] for seed in ("0", "0", "1"))
    assert first == again != other
    assert len({*first}) > 100
    assert {*Special} & {*first}
    assert any(len(one) < 2 * len(GOOD[form]) for one in first if isinstance(one, bytes))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    (directory / OUT).mkdir()
    return directory


@pytest.fixture(scope="module")
def reader(world: Path) -> Reader:
    return Reader(world)


def test_a_reader_sees_what_is_raised_and_what_is_written_elsewhere(reader: Reader, world: Path) -> None:
    assert reader.call(lambda _: None) == (False, "")
    assert "ZeroDivisionError" in reader.call(lambda _: 1 / 0)[1]
    assert reader.call(lambda here: (here / OUT / "a").write_text("a")) == (False, "")
    assert not (world / OUT / "a").exists()
    assert "writes" in reader.call(lambda here: (here / "a").write_text("a"))[1]
    assert "writes" in reader.call(lambda here: (here / "b").mkdir())[1]
    assert reader.call(("verify", str(world / "none"))) == (True, "")


def test_a_reader_sees_what_takes_long(reader: Reader, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PATIENCE_SECONDS", 0.2)
    os.mkfifo(world / "pipe")
    assert "still there" in reader.call(lambda here: (here / "pipe").read_text())[1]
    monkeypatch.setattr(documents, "MOST_SECONDS", 0.0)
    assert "takes more than 0 s" in reader.call(lambda _: [None for _ in range(10**5)])[1]
    assert "still there" in reader.call(lambda _: time.sleep(5))[1]


def test_what_was_found_is_told_with_the_file() -> None:
    found = Finding(kind="job", read="plan job.yaml", what="TypeError at a.py:3: x", kept="kept/job-0-1")
    tried = Tried(numbers=documents.Counter(job=2), refused=documents.Counter(job=1), findings=(found,))
    told = documents.report(tried)
    assert told.startswith("2 files, 1 not survived.")
    assert "| job | 2 | 1 |" in told
    assert "- job: `plan job.yaml`: TypeError at a.py:3: x (kept/job-0-1)" in told
    assert not tried.holds
