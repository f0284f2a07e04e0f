"""Profiling of a job's rewards and its tool: calls are timed on one worker of this host, one at a time.

There is no policy to sample from, so responses are made up: the prompt's reference answer, or the prompt itself. A tool
call is the prompt followed by the end-of-call marker.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from meshwright.planner.job.job import Job
from meshwright.planner.job.rewards_and_tools import Tool, reward_call_key, tool_call_key, unstated_calls
from meshwright.profiles.environment.latency import CallKey, TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.allowed_functions import require_allowed_rewards, require_allowed_tool
from meshwright.runtime.environment.environment import build_caller
from meshwright.runtime.environment.samples import RewardError, RewardSample, ToolCall
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.rollout.prompts import PromptData, read_data

_MAX_CALLS = 64
"""Maximum number of calls of one function or judge; the standard error of their mean is then an eighth of their
standard deviation."""

_MAX_SAMPLES = 64


def time_calls(
    job: Job, directory: Path, known: Sequence[TimedCalls], *, seconds: float, allowed: Collection[str]
) -> tuple[TimedCalls, ...]:
    """Time the calls whose latency the job does not state and that are not `known`, within about `seconds` in all.

    Returns an empty tuple for a job without data. Raises BadInput for a function of a module that is not allowed, and
    if no call of a function or judge is answered.
    """
    timed = {one.called for one in known}
    missing = [called for called in unstated_calls(job.rewards, job.tool, job.workload) if called not in timed]
    if not missing or not job.data:
        return ()
    rewards = {called: reward for reward in job.rewards if (called := reward_call_key(reward)) in missing}
    tool = job.tool if job.tool and tool_call_key(job.tool) in missing else None
    data = read_data(job, directory)
    require_allowed_rewards(tuple(rewards.values()), allowed, without_answers=data.without_answers(job.evaluation))
    samples = [of_prompt[0] for of_prompt in made_up_samples(data, _MAX_SAMPLES, "profile")]
    budget, results = seconds / len(missing), []
    for called, reward in rewards.items():
        with closing(build_caller(reward)) as caller:
            results.append(_time(called, caller.score, samples, budget))
    if tool:
        require_allowed_tool(tool, allowed)
        with closing(Worker(tool.function, tool.timeout_seconds, "tool")) as worker:
            results.append(_time(tool_call_key(tool), worker.answers, _calls(samples, tool), budget))
    return tuple(results)


def made_up_samples(data: PromptData, num_prompts: int, step: str) -> Iterator[tuple[RewardSample, ...]]:
    """Yield the made-up samples of each of the first prompts of a job's data: with the reference answer as response,
    if the prompt has one, and with the prompt itself. Their ids are those of rows of `step`."""
    for prompt in data.batch(0)[:: data.group_size][:num_prompts]:
        text, answer, messages = data.text(prompt.tokens), data.answer(prompt), data.messages(prompt)
        yield tuple(
            RewardSample(
                id=f"{step}/{prompt.row}",
                prompt=text,
                response=response,
                prompt_ids=prompt.tokens,
                response_ids=data.encode(response),
                answer=answer,
                messages=messages,
            )
            for response in ((text,) if answer is None else (answer, text))
        )


def _calls(samples: Sequence[RewardSample], tool: Tool) -> list[ToolCall]:
    """Return a tool call of the first turn for each sample."""
    return [
        ToolCall(**{**sample.message, "response": response}, turn=1, sampled=response)
        for sample in samples
        for response in (sample.prompt + tool.call_end,)
    ]


def _time(
    called: CallKey, call: Callable[[Sequence[RewardSample]], object], samples: Sequence[RewardSample], seconds: float
) -> TimedCalls:
    """Time successive calls for `seconds`, at least one, after a first one as warm-up."""
    cycle = itertools.cycle(samples)
    outcomes: list[float | RewardError] = []
    end = time.monotonic() + seconds
    while len(outcomes) < 2 or (len(outcomes) <= _MAX_CALLS and time.monotonic() < end):
        outcomes.append(_seconds_of(call, list(itertools.islice(cycle, called.batch_size))))
    answered = [outcome for outcome in outcomes[1:] if isinstance(outcome, float)]
    failed = [outcome for outcome in outcomes[1:] if isinstance(outcome, RewardError)]
    if not answered:
        raise BadInput(
            f"{called.kind} {called.target}: none of {len(failed)} calls was answered; the last failed with "
            f"{failed[-1]}; make it answer on this machine, or state its latency_seconds in the job."
        )
    today = datetime.date.today().isoformat()
    return TimedCalls(called=called, seconds=tuple(answered), num_failed=len(failed), date=today)


def _seconds_of(call: Callable[[Sequence[RewardSample]], object], batch: Sequence[RewardSample]) -> float | RewardError:
    start = time.monotonic()
    try:
        call(batch)
    except RewardError as error:
        return error
    return time.monotonic() - start
