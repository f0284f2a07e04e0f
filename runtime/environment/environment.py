"""The environment stage on a rank that generates: responses go to its workers as they end, scores come back by row."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from meshwright.planner.environment.rewards import Reward
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import REWARD_ERROR, REWARD_SECONDS, REWARDS
from meshwright.runtime.environment.crew import Caller, Crew, RewardAnswer
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardError, RewardSample
from meshwright.runtime.environment.unit_tests import told_measures
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.messages.experience import Experience
from meshwright.runtime.messages.step_experience import StepExperience

_Rows: TypeAlias = Mapping[int, tuple[Future[RewardAnswer], ...]]
"""By row of a batch, an answer of each reward."""


class Environment:
    """The rewards of a job, for the responses that one rank answers for."""

    def __init__(self, crews: Sequence[Crew]) -> None:
        self._crews = tuple(crews)
        self._begun: dict[int, tuple[Future[RewardAnswer], ...]] = {}
        """By number of the sequence, an answer of each reward."""
        self._delivered: dict[int, _Rows] = {}
        """By key of the batch."""
        self._unsent: queue.SimpleQueue[tuple[_Rows, Callable[[Experience], object]] | None] = queue.SimpleQueue()
        self._sends = threading.Thread(target=self._send, name="rewards", daemon=True)

    def begin(self, number: int, sample: Callable[[], RewardSample]) -> None:
        """A response has ended, and is known by this number until it is delivered; once begun it goes on."""
        if number not in self._begun:
            made = sample()
            self._begun[number] = tuple(crew.score(made) for crew in self._crews)

    def deliver(self, key: int, rows: Mapping[int, int]) -> None:
        """The sequences of these numbers, all of which were begun, fill these rows of the batch of this key."""
        self._delivered[key] = {row: self._begun.pop(number) for number, row in rows.items()}

    def put_scores(self, batch: StepExperience) -> None:
        """Waits for the scores of the rows of a batch that were delivered here, and puts them."""
        _put(batch.experience, self._delivered.get(batch.key, {}))

    def when_scored(self, batch: StepExperience, send: Callable[[Experience], object]) -> None:
        """Calls `send` with the scores of the rows that were delivered here, from another thread when they are there
        and those of all batches before were sent. A batch that a checkpoint kept has them already."""
        if batch.key not in self._delivered:
            send(batch.experience)
            return
        if not self._sends.is_alive():
            self._sends.start()
        answers = self._delivered[batch.key]
        self._unsent.put((answers, send))

    def _send(self) -> None:
        while unsent := self._unsent.get():
            answers, send = unsent
            found = Experience()
            _put(found, answers)
            send(found)

    def forget(self, step: int) -> None:
        """The step was trained."""
        self._delivered.pop(step, None)

    def close(self) -> None:
        """Ends all workers."""
        self._unsent.put(None)
        for crew in self._crews:
            crew.close()


def require_scores(experience: Experience) -> None:
    """Raises RunFailed for the first row whose reward failed, wherever that was."""
    for row in experience.rows(REWARD_ERROR):
        sentence = bytes(experience.get(REWARD_ERROR, row).tolist()).decode()
        raise RunFailed(f"{sentence}; give the reward a failure_score for what may fail, and run again with --resume")


def host_metrics(batch: StepExperience, names: Sequence[str]) -> dict[str, float]:
    """The mean score of each reward in a batch, and of the seconds after a response in which it was known."""
    if not names:
        return {}
    scores, seconds = (
        torch.stack([batch.experience.get(field, row) for row in batch.rows]).mean(dim=0).tolist()
        for field in (REWARDS, REWARD_SECONDS)
    )
    of_scores = {f"reward_{name}": score for name, score in zip(names, scores, strict=True)}
    return of_scores | {f"reward_{name}_seconds": spent for name, spent in zip(names, seconds, strict=True)}


def build_environment(plan: Plan, rewards: Sequence[Reward]) -> Environment:
    """The workers that the plan gives each reward."""
    workers = {one.reward: one.workers for one in plan.workers}
    return Environment(
        [
            Crew(
                reward.name,
                functools.partial(caller_of, reward),
                num_workers=workers[reward.name],
                batch_size=reward.batch_size,
                failure_score=reward.failure_score,
                retry_seconds=reward.retry_seconds,
            )
            for reward in rewards
        ]
    )


def notes_of(rewards: Sequence[Reward]) -> tuple[str, ...]:
    """What a run says of its rewards when it starts: how code of responses is shut in, where any is run."""
    return (told_measures(),) if any(reward.function == "unit_tests" for reward in rewards) else ()


def caller_of(reward: Reward) -> Caller:
    """What makes the calls of a reward, one at a time."""
    if reward.url is not None:
        return Judge(reward.url, timeout_seconds=reward.timeout_seconds)
    assert reward.function is not None
    return Worker(reward.function, reward.timeout_seconds)


def _put(experience: Experience, rows: _Rows) -> None:
    """Waits for the answers."""
    for row, answers in rows.items():
        _put_row(experience, row, answers)


def _put_row(experience: Experience, row: int, answers: Sequence[Future[RewardAnswer]]) -> None:
    try:
        found = [answer.result() for answer in answers]
    except RewardError as error:
        experience.put(
            REWARD_ERROR, row, torch.tensor(list(str(error).encode("utf-8", "backslashreplace")), dtype=torch.uint8)
        )
        found = [RewardAnswer(0.0, 0.0)] * len(answers)
    experience.put(REWARDS, row, torch.tensor([answer.score for answer in found]))
    experience.put(REWARD_SECONDS, row, torch.tensor([answer.seconds for answer in found]))
