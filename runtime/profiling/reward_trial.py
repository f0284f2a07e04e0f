"""A dry run of a job's rewards: they score made-up responses to the first prompts of its data, before anything starts.

There is no policy to sample from. Each prompt gets its reference answer as one response, which most rewards should
score high, and the prompt itself as another, which most should score low.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path

from meshwright.planner.job.job import Job
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.allowed_functions import require_allowed_rewards
from meshwright.runtime.environment.environment import build_caller
from meshwright.runtime.environment.samples import RewardError, RewardSample
from meshwright.runtime.environment.worker_pool import RewardAnswer, RewardWorkers
from meshwright.runtime.profiling.call_benchmarks import made_up_samples
from meshwright.runtime.records.results import RewardTrial, TriedSample, TriedScore
from meshwright.runtime.rollout.prompts import read_data


def try_rewards(job: Job, directory: Path, *, num_prompts: int, allowed: Collection[str]) -> RewardTrial:
    """Score made-up responses to the first prompts of the job's data; a failed call is recorded and not retried.

    Raises BadInput for a job without rewards or data, and for a function of a module that is not allowed.
    """
    if not job.rewards:
        raise BadInput("the job has no rewards to try; add rewards, a list of functions and judges.")
    if not job.data:
        raise BadInput("the job has no data, whose prompts the rewards would score; add data.prompts and a tokenizer.")
    data = read_data(job, directory)
    require_allowed_rewards(job.rewards, allowed, without_answers=data.without_answers(job.evaluation))
    samples = [
        (len(of_prompt) > 1 and position == 0, sample)  # the first of two has the reference answer as its response
        for of_prompt in made_up_samples(data, num_prompts, "0")
        for position, sample in enumerate(of_prompt)
    ]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(_workers(reward))) for reward in job.rewards]
        futures = [[one.score(sample) for one in workers] for _, sample in samples]
        tried = tuple(
            _tried(job.rewards, is_answer, sample, answers)
            for (is_answer, sample), answers in zip(samples, futures, strict=True)
        )
    return RewardTrial(samples=tried, notes=tuple(_notes(job.rewards, tried)))


def _workers(reward: Reward) -> RewardWorkers:
    return RewardWorkers(reward.name, lambda: build_caller(reward), num_workers=1, batch_size=reward.batch_size)


def _tried(
    rewards: Sequence[Reward], is_answer: bool, sample: RewardSample, answers: Sequence[Future[RewardAnswer]]
) -> TriedSample:
    scores = tuple(_score(reward, answer) for reward, answer in zip(rewards, answers, strict=True))
    known = [reward.weight * one.score for reward, one in zip(rewards, scores, strict=True) if one.score is not None]
    return TriedSample(
        id=sample.id,
        is_answer=is_answer,
        prompt=sample.prompt,
        response=sample.response,
        scores=scores,
        total=sum(known) if len(known) == len(scores) else None,
    )


def _score(reward: Reward, answer: Future[RewardAnswer]) -> TriedScore:
    try:
        known = answer.result()
    except RewardError as error:
        return TriedScore(reward=reward.name, score=None, seconds=None, error=str(error))
    return TriedScore(reward=reward.name, score=known.score, seconds=known.seconds)


def _notes(rewards: Sequence[Reward], tried: Sequence[TriedSample]) -> Iterator[str]:
    """Yield a remark on each reward whose scores do not differ where they should."""
    for position, reward in enumerate(rewards):
        known = [(one.is_answer, one.scores[position].score) for one in tried]
        scores = [(is_answer, score) for is_answer, score in known if score is not None]
        values = {score for _, score in scores}
        if len(scores) > 1 and len(values) == 1:
            yield (
                f"{reward.name} scores every response {values.pop():g}: a group whose scores are equal teaches nothing."
            )
        elif any(is_answer for is_answer, _ in scores):
            answers = [score for is_answer, score in scores if is_answer]
            others = [score for is_answer, score in scores if not is_answer]
            if others and sum(answers) / len(answers) <= sum(others) / len(others):
                yield f"{reward.name} does not score reference answers above the prompts themselves; check its sign."
