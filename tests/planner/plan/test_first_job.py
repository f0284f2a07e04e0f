"""A first job is one: it is read and resolved, and says of every line what it means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from meshwright.planner.job.first_job import FirstJob
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput

ROOT = Path(__file__).parents[3]
ASKED = FirstJob(model=ROOT / "examples/models/llama-2-7b", device="h100-sxm", batch_size=64, prompt=128, response=256)


def facts_of(asked: FirstJob, directory: Path) -> Facts:
    path = directory / "job.yaml"
    path.write_text(asked.text(directory))
    return resolve(read_job(path), directory)


def test_a_first_job_has_the_numbers_that_it_was_asked_for(tmp_path: Path) -> None:
    facts = facts_of(ASKED, tmp_path)
    assert facts.workload.batch_size == 64
    assert (facts.workload.prompt.max, facts.workload.response.max) == (128, 256)
    assert (facts.cluster.name, facts.cluster.nodes) == ("8 x h100-sxm", 1)
    assert facts.models.critic.scalar_head
    assert not facts.models.actor.scalar_head


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_an_unknown_network_is_refused_on_one_node_too(tmp_path: Path, num_ranks: int) -> None:
    with pytest.raises(BadInput, match="network 'string' is not known"):
        replace(ASKED, network="string", num_ranks=num_ranks).text(tmp_path)


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_every_algorithm_has_a_first_job_with_as_many_prompts_as_asked(tmp_path: Path, algorithm: Algorithm) -> None:
    facts = facts_of(replace(ASKED, algorithm=algorithm), tmp_path)
    assert facts.algorithm == algorithm
    assert facts.workload.num_prompts == 64
    assert facts.workload.group_size == (1 if algorithm in {"ppo", "distill"} else 8)


@pytest.mark.parametrize(("asked", "nodes", "ranks_per_node"), [(4, 1, 4), (8, 1, 8), (24, 3, 8)])
def test_ranks_are_whole_nodes_or_a_part_of_one(tmp_path: Path, asked: int, nodes: int, ranks_per_node: int) -> None:
    cluster = facts_of(replace(ASKED, num_ranks=asked, network="ib-ndr-400"), tmp_path).cluster
    assert (cluster.nodes, cluster.ranks_per_node) == (nodes, ranks_per_node)


def test_a_config_file_is_a_model_and_this_machine_a_device(tmp_path: Path) -> None:
    asked = replace(ASKED, model=ASKED.model / "config.json", device="local", num_ranks=2)
    facts = facts_of(asked, tmp_path)
    assert (facts.cluster.kind, facts.precision) == ("cpu", "fp32")


def test_every_line_that_is_a_choice_says_what_it_means(tmp_path: Path) -> None:
    lines = ASKED.text(tmp_path).splitlines()
    for key in ("batch_size", "response", "num_minibatches", "num_epochs", "staleness", "  device"):
        line = next(line for line in lines if line.strip().startswith(f"{key.strip()}:"))
        assert "  # " in line


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (replace(ASKED, device="h10"), "device 'h10' is not known; did you mean"),
        (replace(ASKED, num_ranks=12), "12 devices are not whole nodes of 8; use 8 or 16."),
        (replace(ASKED, model=Path("nowhere")), "give a Hugging Face directory or a config.json"),
        (replace(ASKED, num_ranks=16, network="ib"), "network 'ib' is not known"),
    ],
)
def test_what_cannot_be_a_job_is_refused_in_a_sentence(tmp_path: Path, asked: FirstJob, sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        asked.text(tmp_path)
    assert sentence in str(refusal.value)
