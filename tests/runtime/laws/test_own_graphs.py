"""A graph that a job states itself trains as a preset that has it, and is refused in one sentence without settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.program.durations import Planned
from meshwright.profiles.algorithms import graph_of
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import StageGraph
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.request import check
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.launch.rendezvous import Rendezvous
from tests.planner.jobs import stated
from tests.runtime.rewarded import lines
from tests.runtime.small_job import OF_TIME, request, write_job

PINS = ("actor_generate.pool=0:1", "actor_train.pool=0:1", "critic_train.pool=1:1", "critic_value.pool=1:1")


def write_own(path: Path, graph: StageGraph | None = None, *, odd: bool = False, settings: str | None = None) -> Path:
    """The job with a graph of its own, by default the one it has; an `odd` one has a stage of another name. The
    settings are those of PPO, or under another key where one is given, or under none where it is empty."""
    job = yaml.safe_load(path.read_text())
    own = json.loads(canonical_json(stated(graph or resolve(read_job(path), path.parent).graph)))
    if odd:
        own["stages"][1]["name"] = "judged"
        own["stages"][-1]["loss"] = "value"
    if settings is not None:
        del job["ppo"]
    if settings is not None and not odd:
        del job["models"]["critic"]
        job["workload"]["group_size"] = 4
        job |= {settings: {}} if settings else {}
    target = path.with_name("own.yaml")
    target.write_text(yaml.safe_dump({**job, "algorithm": own}))
    return target


@pytest.mark.slow
def test_a_graph_of_the_stages_of_a_preset_trains_as_the_preset_does(tmp_path: Path) -> None:
    path = write_job(tmp_path, num_ranks=2)
    told = []
    for name, job in (("preset", path), ("own", write_own(path, odd=True))):
        run_plan(request(job, tmp_path / name, *PINS, steps=2))
        told.append([{k: v for k, v in line.items() if k not in OF_TIME} for line in lines(tmp_path / name)])
    assert told[0] == told[1]
    assert len(told[0]) == 2


@pytest.mark.check_all
def test_a_graph_of_no_preset_samples_the_groups_that_a_preset_does(tmp_path: Path) -> None:
    path = write_job(tmp_path, num_ranks=2)
    job = yaml.safe_load(path.read_text())
    del job["ppo"], job["models"]["critic"]
    job["workload"] |= {"group_size": 4, "dynamic_sampling": {"acceptance": 0.6}}
    settings = {"reward_clip": 0.02, "actor_learning_rate": 3e-3}
    preset, own = path.with_name("preset.yaml"), path.with_name("own.yaml")
    preset.write_text(yaml.safe_dump({**job, "algorithm": "grpo", "grpo": settings}))
    graph = json.loads(canonical_json(stated(resolve(read_job(preset), tmp_path).graph)))
    graph["stages"][1]["name"] = "judged"
    own.write_text(yaml.safe_dump({**job, "algorithm": graph, "grpo": settings}))
    assert read_job(own).preset is None
    told = []
    for one in (preset, own):
        out = tmp_path / one.stem
        run_plan(request(one, out, "actor_generate.pool=0:2", steps=2))
        told.append([{k: v for k, v in line.items() if k not in OF_TIME} for line in lines(out)])
    assert told[0] == told[1]
    assert all(line["groups_with_signal"] < 1 for line in told[0])


@pytest.mark.check_all
def test_a_graph_of_no_preset_is_rehearsed(tmp_path: Path) -> None:
    asked = request(write_own(write_job(tmp_path, num_ranks=2), odd=True), tmp_path / "run")
    found = rehearse(asked.plan, Planned(asked.plan), steps=2, speed=0.01)
    assert {span.instruction for span in found.spans} >= {"judged", "actor_train", "critic_train"}


def test_a_graph_of_no_preset_is_refused_by_run_until_settings_say_how_it_is_trained(tmp_path: Path) -> None:
    asked = request(write_own(write_job(tmp_path, num_ranks=1), odd=True, settings=""), tmp_path / "run")
    with pytest.raises(BadInput, match="no settings say how it is trained; give those of ppo or grpo or rloo or rei"):
        check(asked, Rendezvous())
    assert not asked.out.exists()


def test_a_graph_that_several_presets_have_is_refused_until_settings_say_which(tmp_path: Path) -> None:
    path, graph = write_job(tmp_path, num_ranks=1), graph_of("grpo")
    asked = request(write_own(path, graph, settings=""), tmp_path / "run")
    with pytest.raises(BadInput, match=r"give those of grpo or rloo or reinforce, like grpo: \{\}\."):
        check(asked, Rendezvous())
    check(request(write_own(path, graph, settings="rloo"), tmp_path / "run"), Rendezvous())
