"""A stage on two kinds of nodes, whose rows are dealt by speed, scores and learns as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.program.durations import Planned
from meshwright.profiles.hardware import Cluster, Link, MixedCluster
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.trace import read_spans
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.request import RunRequest
from tests.planner.jobs import mixed_facts
from tests.runtime.execution.test_train import run_steps
from tests.runtime.laws.test_ahead import Ran, assert_same
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import edited_job, write_job
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS = 3
BATCH = {"batch_size": 16, "num_minibatches": 2}


def by_tokens(most: int, rows: tuple[int, int]) -> Schedule:
    return Schedule(micro_batch_size=0, micro_batch_tokens=most, rows=rows)


TWO_RANKS: dict[str, dict[str, Where]] = {
    "trains": {
        "actor_train": Where("0:2", "dp2", Schedule(micro_batch_size=2, rows=(6, 2))),
        "critic_train": Where("0:2", "dp2", Schedule(micro_batch_size=1, rows=(2, 6), offload=Offload.OPTIMIZER)),
        "other": Where("0:1"),
    },
    "scores too, by tokens": {
        "actor_generate": Where("1:1"),
        "actor_train": Where("0:2", "dp2", by_tokens(64, (6, 2))),
        "critic_train": Where("0:2", "dp2", by_tokens(32, (7, 1))),
        "other": Where("0:2", "dp2", by_tokens(64, (12, 4))),
    },
}
"""Of a minibatch of 8 rows one rank has 6 and the other 2, a deal of 3:1, in micro-batches of two: 3 and 1 of them."""

FOUR_RANKS: dict[str, dict[str, Where]] = {
    "cut layers": {
        "actor_generate": Where("0:2", "dp2"),
        "actor_train": Where("0:4", "tp2,dp2,sp", Schedule(micro_batch_size=2, rows=(6, 2), recompute=Recompute.FULL)),
        "other": Where("0:4", "tp2,dp2", Schedule(micro_batch_size=4, rows=(5, 11))),
        "critic_train": Where("0:4", "dp4", Schedule(micro_batch_size=1, rows=(5, 3))),
    },
}


def on_two_kinds(facts: Facts) -> Facts:
    """The same job on a node of each of two kinds, with as many ranks together."""
    assert isinstance(facts.cluster, Cluster)
    half = facts.cluster.model_copy(update={"ranks_per_node": facts.cluster.num_ranks // 2})
    between = Link(seconds=1e-4, bytes_per_second=1e9)
    return facts.model_copy(update={"cluster": MixedCluster(parts=(half, half), between=between)})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def ran(directory: Path, out: Path, where: dict[str, Where], num_ranks: int) -> Ran:
    """What a few steps hold and tell, of a plan by hand."""
    job = read_job(edited_job(write_job(directory, num_ranks=num_ranks), "workload", **BATCH))
    facts = resolve(job, directory)
    plan = plan_by_hand(on_two_kinds(facts) if num_ranks > 1 else facts, where)
    return run_steps(RunRequest(plan=plan, job=job, directory=directory, out=out, steps=STEPS))


@pytest.fixture(scope="module")
def alone(directory: Path) -> Ran:
    return ran(directory, directory / "alone", {"other": Where("0:1")}, 1)


@cases("name", TWO_RANKS, few=1)
def test_a_deal_of_three_to_one_learns_what_one_rank_learns(
    directory: Path, tmp_path: Path, alone: Ran, name: str
) -> None:
    found = ran(directory, tmp_path / "run", TWO_RANKS[name], 2)
    assert_same(alone, found)
    assert all(sorted(step["tokens"]) == list(range(16)) for step in found[0])


@pytest.mark.check_all
def test_the_kind_that_is_dealt_more_rows_scores_more_tokens(directory: Path, tmp_path: Path) -> None:
    ran(directory, tmp_path / "run", TWO_RANKS["scores too, by tokens"], 2)
    for stage in ("ref_logprob", "critic_value"):
        mine, other = (
            sum(
                span.facts["num_tokens"]
                for span in read_spans(tmp_path / "run" / "trace.jsonl")
                if (span.instruction, span.rank) == (stage, rank)
            )
            for rank in range(2)
        )
        assert 2.5 < mine / other < 3.5


@pytest.mark.check_all
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_several_replicas_of_each_kind_learn_what_one_rank_learns(
    directory: Path, tmp_path: Path, alone: Ran, name: str
) -> None:
    assert_same(alone, ran(directory, tmp_path / "run", FOUR_RANKS[name], 4))


@pytest.mark.check_all
def test_rows_that_are_dealt_by_speed_are_rehearsed_in_the_simulated_time() -> None:
    facts = mixed_facts(batch_size=16, memory_bytes=(2**50, 2**50))
    workload = facts.workload.model_copy(update=BATCH)
    plan = plan_by_hand(facts.model_copy(update={"workload": workload}), FOUR_RANKS["cut layers"])
    found = rehearse(plan, Planned(plan), steps=2, speed=2 / plan.period_seconds, ranks_per_process=2)
    assert -0.001 < found.error < 0.25
    tokens = {span.rank: span.facts["num_tokens"] for span in found.spans if span.instruction == "ref_logprob"}
    assert [tokens[rank] / plan.facts.workload.max_tokens for rank in range(4)] == [5, 5, 11, 11]
