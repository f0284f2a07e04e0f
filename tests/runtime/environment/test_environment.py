"""Scores come back by row of the batch that a response is delivered in, or the sentence that says why not."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence

import pytest

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import REWARD_SECONDS, REWARDS
from meshwright.runtime.environment.environment import Environment, require_scores, reward_metrics
from meshwright.runtime.environment.samples import RewardSample
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.environment.worker_pool import RewardWorkers
from meshwright.runtime.messages.experience import Experience, StepExperience
from tests.runtime.environment.samples import MODULE, sample


def environment(*functions: str) -> Environment:
    crews = (
        RewardWorkers(name, lambda name=name: Worker(f"{MODULE}:{name}", 5.0), num_workers=1) for name in functions
    )
    return Environment(tuple(crews))


def test_every_row_has_a_score_of_each_reward_and_the_seconds_it_took() -> None:
    hosts, batch = environment("length", "fussy"), StepExperience(step=3, rows=range(2))
    hosts.start_scoring(10, lambda: sample("abc"))
    hosts.start_scoring(11, lambda: sample("a"))
    hosts.start_scoring(11, lambda: pytest.fail("it was begun"))
    hosts.assign_rows(batch.key, {10: 1, 11: 0})
    hosts.put_scores(batch)
    assert batch.experience.get(REWARDS, 0).tolist() == [1.0, 1.0]
    assert batch.experience.get(REWARDS, 1).tolist() == [3.0, 1.0]
    assert all(batch.experience.get(REWARD_SECONDS, 1) > 0)
    found = reward_metrics(batch, ["length", "fussy"])
    assert found["reward_length"] == 2.0
    assert found["reward_fussy"] == 1.0
    assert found["reward_length_seconds"] > 0
    hosts.close()


def test_scores_are_sent_when_they_are_there_and_those_of_a_checkpoint_at_once() -> None:
    hosts, batch = environment("length"), StepExperience(step=3, rows=range(1))
    hosts.start_scoring(10, lambda: sample("abc"))
    hosts.assign_rows(batch.key, {10: 0})
    sent: queue.SimpleQueue[Experience] = queue.SimpleQueue()
    hosts.when_scored(batch, sent.put)
    assert sent.get(timeout=20.0).get(REWARDS, 0).tolist() == [3.0]
    hosts.drop_step(3)
    hosts.when_scored(batch, sent.put)
    assert sent.get_nowait() is batch.experience
    hosts.close()


def test_scores_of_a_later_step_wait_for_those_of_an_earlier_one() -> None:
    """Of messages between two ranks the receiver knows the order alone."""
    first_is_there = threading.Event()

    class Held:
        def score(self, samples: Sequence[RewardSample]) -> list[float]:
            if samples[0].id == "0/0":
                assert first_is_there.wait(20.0)
            return [float(samples[0].id[0])] * len(samples)

        def close(self) -> None:
            pass

    hosts = Environment([RewardWorkers("held", Held, num_workers=2)])
    sent: queue.SimpleQueue[float] = queue.SimpleQueue()
    for step in (0, 1):
        batch = StepExperience(step=step, rows=range(1))
        hosts.start_scoring(step, functools.partial(sample, id=f"{step}/0"))
        hosts.assign_rows(step, {step: 0})
        hosts.when_scored(batch, lambda found: sent.put(float(found.get(REWARDS, 0))))
    with pytest.raises(queue.Empty):
        sent.get(timeout=0.2)
    first_is_there.set()
    assert [sent.get(timeout=20.0) for _ in range(2)] == [0.0, 1.0]
    hosts.close()


def test_a_reward_that_fails_is_told_by_whoever_reads_the_row() -> None:
    hosts, batch = environment("fussy"), StepExperience(step=3, rows=range(1))
    hosts.start_scoring(10, lambda: sample("raise", id="3/0"))
    hosts.assign_rows(batch.key, {10: 0})
    hosts.put_scores(batch)
    arrived = Experience()
    arrived.unpack(batch.experience.pack(batch.experience.fields(), 3))
    with pytest.raises(RunFailed, match="reward fussy of sample 3/0: ValueError: no such word; give the reward a"):
        require_scores(arrived)
    hosts.close()


def test_a_job_without_rewards_on_hosts_reports_none() -> None:
    assert reward_metrics(StepExperience(step=0, rows=range(1)), []) == {}
