"""Configurations that trainers ship are read; one that is not is refused by its key.

The keys that matter are retyped in tests/planner/trainers/shipped, each with the file and the commit it was read in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from meshwright.planner.trainers.importer import JobSource
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.registry import READERS
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import CONFIG

FOLDER = Path(__file__).parents[1] / "trainers" / "shipped"

LEAST_SHARE = 0.94
LEAST_NUMBER = 70


@dataclass(frozen=True, kw_only=True)
class Shipped:
    trainer: str
    path: str
    commit: str
    text: str
    refused: str = ""
    becomes: Mapping[str, object] = field(default_factory=dict)


ALL = [
    Shipped(trainer=file.stem, **one)
    for file in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load(file.read_text())
]
NAMED = [pytest.param(one, id=f"{one.trainer}/{Path(one.path).name}") for one in ALL]


def configured(shipped: Shipped, directory: Path) -> ParsedConfig:
    """What it says, as far as a whole job: every model has one made-up shape, also a reward model that it does not
    name."""
    path = directory / Path(shipped.path).name
    path.write_text(shipped.text)
    shape = directory / "config.json"
    shape.write_text(json.dumps(CONFIG))
    found = READERS[shipped.trainer].read(path)
    shapes = {"": shape} if "reward.function" in found.by_name else {"": shape, "reward": shape}
    source = JobSource(path=path, trainer=shipped.trainer, engine="vllm", device="h100-sxm", shapes=shapes)
    job = source.job(found, directory)
    assert job.workload.batch_size == found.by_name["workload.batch_size"]
    return found


@pytest.mark.parametrize("shipped", NAMED)
def test_it_is_read_as_a_job_or_refused_by_its_key(shipped: Shipped, tmp_path: Path) -> None:
    if shipped.refused:
        with pytest.raises(BadInput, match=shipped.refused):
            configured(shipped, tmp_path)
    else:
        found = configured(shipped, tmp_path)
        assert len(found.fields) > 10
        values = {"steps_ahead": found.steps_ahead, **found.by_name}
        assert {name: values.get(name) for name in shipped.becomes} == shipped.becomes


def test_so_many_are_read() -> None:
    read = [one for one in ALL if not one.refused]
    assert len(ALL) >= LEAST_NUMBER
    assert len(read) / len(ALL) >= LEAST_SHARE
    assert len({(one.trainer, one.path) for one in ALL}) == len(ALL)
