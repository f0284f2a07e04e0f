"""The environment stage on a rank that generates: it scores responses on host workers as soon as they end."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import REWARD_ERROR, REWARD_SECONDS, REWARDS
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardError, RewardSample
from meshwright.runtime.environment.unit_tests import describe_sandbox
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.environment.worker_pool import RewardAnswer, RewardCaller, RewardWorkers
from meshwright.runtime.messages.experience import Experience, StepExperience

_Rows: TypeAlias = Mapping[int, tuple[Future[RewardAnswer], ...]]
"""For each row of a batch, one future of each reward."""


class Environment:
    """Scores the responses of one rank by the rewards of a job."""

    def __init__(self, reward_workers: Sequence[RewardWorkers]) -> None:
        self._reward_workers = tuple(reward_workers)
        self._in_progress: dict[int, tuple[Future[RewardAnswer], ...]] = {}
        """Responses that are not yet delivered, by number, each with one future per reward."""
        self._delivered: dict[int, _Rows] = {}
        """The rows of each delivered batch, by batch key."""
        self._send_queue: queue.SimpleQueue[tuple[_Rows, Callable[[Experience], object]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="rewards", daemon=True)

    def start_scoring(self, number: int, sample: Callable[[], RewardSample]) -> None:
        """Start scoring a finished response, unless that has started; `number` identifies it until it is delivered."""
        if number not in self._in_progress:
            built_sample = sample()
            self._in_progress[number] = tuple(workers.score(built_sample) for workers in self._reward_workers)

    def assign_rows(self, key: int, rows: Mapping[int, int]) -> None:
        """Assign responses whose scoring has started to rows of a batch; `rows` maps their numbers to rows."""
        self._delivered[key] = {row: self._in_progress.pop(number) for number, row in rows.items()}

    def put_scores(self, batch: StepExperience) -> None:
        """Wait for the scores of the rows of a batch that this rank delivered, and write them."""
        _put(batch.experience, self._delivered.get(batch.key, {}))

    def when_scored(self, batch: StepExperience, send: Callable[[Experience], object]) -> None:
        """Call `send` with the scores of the rows that this rank delivered, from another thread and in batch order.

        For a batch that was restored from a checkpoint with its scores, `send` is called at once.
        """
        if batch.key not in self._delivered:
            send(batch.experience)
            return
        if not self._sender.is_alive():
            self._sender.start()
        answers = self._delivered[batch.key]
        self._send_queue.put((answers, send))

    def _send(self) -> None:
        while unsent := self._send_queue.get():
            answers, send = unsent
            scores = Experience()
            _put(scores, answers)
            send(scores)

    def drop_step(self, step: int) -> None:
        """Drop the scores of a trained step."""
        self._delivered.pop(step, None)

    def close(self) -> None:
        """Stop the thread that sends scores, and all workers."""
        self._send_queue.put(None)
        for workers in self._reward_workers:
            workers.close()


def require_scores(experience: Experience) -> None:
    """Raises RunFailed for the first row whose reward failed, on any rank."""
    for row in experience.rows(REWARD_ERROR):
        sentence = bytes(experience.get(REWARD_ERROR, row).tolist()).decode()
        raise RunFailed(f"{sentence}; give the reward a failure_score for what may fail, and run again with --resume")


def reward_metrics(batch: StepExperience, names: Sequence[str]) -> dict[str, float]:
    """Return the mean score and the mean latency of each reward in a batch."""
    if not names:
        return {}
    scores, seconds = (
        torch.stack([batch.experience.get(field, row) for row in batch.rows]).mean(dim=0).tolist()
        for field in (REWARDS, REWARD_SECONDS)
    )
    mean_scores = {f"reward_{name}": score for name, score in zip(names, scores, strict=True)}
    return mean_scores | {
        f"reward_{name}_seconds": mean_seconds for name, mean_seconds in zip(names, seconds, strict=True)
    }


def build_environment(rewards: Sequence[Reward], workers: Mapping[str, int]) -> Environment:
    """Start the workers of each reward; `workers` maps its name to their number."""
    return Environment(
        [
            RewardWorkers(
                reward.name,
                functools.partial(build_caller, reward),
                num_workers=workers[reward.name],
                batch_size=reward.batch_size,
                failure_score=reward.failure_score,
                retry_seconds=reward.retry_seconds,
            )
            for reward in rewards
        ]
    )


def startup_notes(rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Return what a run reports about its rewards at the start: how code in responses is sandboxed, if any is run."""
    return (describe_sandbox(),) if any(reward.function == "unit_tests" for reward in rewards) else ()


def build_caller(reward: Reward) -> RewardCaller:
    """Return the caller of a reward: an HTTP judge or a worker process."""
    if reward.url is not None:
        return Judge(reward.url, timeout_seconds=reward.timeout_seconds)
    assert reward.function is not None
    return Worker(reward.function, reward.timeout_seconds)


def _put(experience: Experience, rows: _Rows) -> None:
    """Wait for the scores and write them."""
    for row, answers in rows.items():
        _put_row(experience, row, answers)


def _put_row(experience: Experience, row: int, answers: Sequence[Future[RewardAnswer]]) -> None:
    try:
        results = [answer.result() for answer in answers]
    except RewardError as error:
        experience.put(
            REWARD_ERROR, row, torch.tensor(list(str(error).encode("utf-8", "backslashreplace")), dtype=torch.uint8)
        )
        results = [RewardAnswer(0.0, 0.0)] * len(answers)
    experience.put(REWARDS, row, torch.tensor([answer.score for answer in results]))
    experience.put(REWARD_SECONDS, row, torch.tensor([answer.seconds for answer in results]))
