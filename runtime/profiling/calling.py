"""Times the calls of a job's own rewards and of its tool, on one worker of this host, one call at a time.

There is no policy here that draws, so that a response is made up: the answer beside its prompt, or the prompt again;
and a call of a tool is the prompt and what ends a call.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path

from meshwright.planner.environment.measured_latency import called_by, called_of, open_calls
from meshwright.planner.environment.tool import Tool
from meshwright.planner.plan.job import Job
from meshwright.profiles.environment.timed_calls import Called, TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.allowed import require_functions, require_tool
from meshwright.runtime.environment.environment import caller_of
from meshwright.runtime.environment.samples import RewardError, RewardSample, ToolCall
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.generation.prompts import PromptData, read_data

_MOST_CALLS = 64
"""Of one function or judge: their mean is then known within an eighth of their deviation."""

_MOST_SAMPLES = 64


def time_calls(
    job: Job, directory: Path, known: Sequence[TimedCalls], *, seconds: float, allowed: Collection[str]
) -> tuple[TimedCalls, ...]:
    """The calls that the job leaves open and that are not `known`, timed within about so many seconds; none for a job
    without data.

    Raises BadInput for a function of a module that is not allowed, and where no call of one is answered.
    """
    timed = {one.called for one in known}
    wanted = [called for called in open_calls(job.rewards, job.tool, job.workload) if called not in timed]
    if not wanted or not job.data:
        return ()
    rewards = {called: reward for reward in job.rewards if (called := called_by(reward)) in wanted}
    tool = job.tool if job.tool and called_of(job.tool) in wanted else None
    data = read_data(job, directory)
    require_functions(tuple(rewards.values()), allowed, has_answers=data.has_answers)
    samples, share, found = _samples(data), seconds / len(wanted), []
    for called, reward in rewards.items():
        with closing(caller_of(reward)) as caller:
            found.append(_timed(called, caller.score, samples, share))
    if tool:
        require_tool(tool, allowed)
        with closing(Worker(tool.function, tool.timeout_seconds, "tool")) as worker:
            found.append(_timed(called_of(tool), worker.answers, _calls(samples, tool), share))
    return tuple(found)


def _samples(data: PromptData) -> list[RewardSample]:
    """Of the first prompts of the job's data, with responses that are made up."""
    found = []
    for prompt in data.batch(0)[:: data.group_size][:_MOST_SAMPLES]:
        text, answer = data.text(prompt.tokens), data.answer(prompt)
        response = text if answer is None else answer
        found.append(
            RewardSample(
                id=f"profile/{prompt.row}",
                prompt=text,
                response=response,
                prompt_ids=prompt.tokens,
                response_ids=data.encode(response),
                answer=answer,
            )
        )
    return found


def _calls(samples: Sequence[RewardSample], tool: Tool) -> list[ToolCall]:
    """A first turn of each, which ends with a call."""
    return [
        ToolCall(**{**sample.message, "response": drawn}, turn=1, drawn=drawn)
        for sample in samples
        for drawn in (sample.prompt + tool.call_end,)
    ]


def _timed(
    called: Called, call: Callable[[Sequence[RewardSample]], object], samples: Sequence[RewardSample], seconds: float
) -> TimedCalls:
    """Calls one after the other until the time is over, one at least, behind one that starts what answers them."""
    turning = itertools.cycle(samples)
    outcomes: list[float | RewardError] = []
    end = time.monotonic() + seconds
    while len(outcomes) < 2 or (len(outcomes) <= _MOST_CALLS and time.monotonic() < end):
        outcomes.append(_seconds_of(call, list(itertools.islice(turning, called.batch_size))))
    taken = [outcome for outcome in outcomes[1:] if isinstance(outcome, float)]
    failed = [outcome for outcome in outcomes[1:] if isinstance(outcome, RewardError)]
    if not taken:
        raise BadInput(
            f"{called.kind} {called.target}: none of {len(failed)} calls was answered, at last {failed[-1]}; have it "
            "answer here, or state its latency_seconds in the job."
        )
    today = datetime.date.today().isoformat()
    return TimedCalls(called=called, seconds=tuple(taken), num_failed=len(failed), date=today)


def _seconds_of(call: Callable[[Sequence[RewardSample]], object], batch: Sequence[RewardSample]) -> float | RewardError:
    begun = time.monotonic()
    try:
        call(batch)
    except RewardError as error:
        return error
    return time.monotonic() - begun
