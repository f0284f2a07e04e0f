"""The graphs of stages that a job can name.

PPO (arXiv:1707.06347) scores with a reward model, values with a critic and keeps to a reference. GRPO
(arXiv:2402.03300), RLOO (arXiv:2402.14740) and REINFORCE++ (arXiv:2501.03262) compare the samples of a step with each
other, so that they have no critic; without a reference nothing keeps the actor to one. On-policy distillation (Lu et
al., On-Policy Distillation, Thinking Machines Lab, 2025; GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543) draws from a
student, the actor, and has teachers say how likely what it drew is: nothing else scores it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias

from meshwright.profiles.stages import (
    ENVIRONMENT,
    GENERATE,
    REWARD_ERROR,
    REWARD_SECONDS,
    REWARDS,
    TEACHER_LOGPROBS,
    TEACHERS,
    HostStage,
    Mode,
    Role,
    Stage,
    StageGraph,
)

Algorithm: TypeAlias = Literal["ppo", "grpo", "rloo", "reinforce++", "distill"]

COMPARES_GROUPS: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Those whose advantages are a sample's distance to the others of its prompt."""

_GENERATE = Stage(
    name=GENERATE,
    role=Role.ACTOR,
    modes=(Mode.PREFILL, Mode.DECODE),
    reads=(),
    writes=("tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"),
    is_trained=True,
)
_SCORE = Stage(
    name="reward_score",
    role=Role.REWARD,
    modes=(Mode.FORWARD,),
    reads=("tokens",),
    writes=("scores",),
    may_stream=True,
)
_REF = Stage(
    name="ref_logprob",
    role=Role.REF,
    modes=(Mode.FORWARD,),
    reads=("tokens",),
    writes=("ref_logprobs",),
    may_stream=True,
)
_VALUE = Stage(
    name="critic_value",
    role=Role.CRITIC,
    modes=(Mode.FORWARD,),
    reads=("tokens",),
    writes=("values",),
    is_trained=True,
    may_stream=True,
)
_PROXIMAL = Stage(
    name="actor_logprob",
    role=Role.ACTOR,
    modes=(Mode.FORWARD,),
    reads=("tokens",),
    writes=("proximal_logprobs",),
    is_trained=True,
)


def _teach(role: Role) -> Stage:
    return Stage(
        name=f"{role}_logprob",
        role=role,
        modes=(Mode.FORWARD,),
        reads=("tokens",),
        writes=(TEACHER_LOGPROBS[role],),
        may_stream=True,
    )


def _train(role: Role, *reads: str) -> Stage:
    return Stage(name=f"{role}_train", role=role, modes=(Mode.TRAIN,), reads=reads, writes=(), is_trained=True)


_SAMPLED = ("tokens", "prompt_lengths", "truncated")
_DRAWN = ("behaviour_logprobs", "versions")
_HOSTED = HostStage(
    name=ENVIRONMENT, reads=("tokens", "prompt_lengths"), writes=(REWARDS, REWARD_SECONDS, REWARD_ERROR)
)


@cache
def graph_of(
    algorithm: Algorithm,
    *,
    has_ref: bool = True,
    has_reward: bool = True,
    has_environment: bool = False,
    has_turns: bool = False,
    ref_is_base: bool = False,
    num_teachers: int = 1,
    has_waves: bool = False,
    has_filter: bool = False,
) -> StageGraph:
    """The graph of an algorithm for a job that names a reference model or does not, a reward model, and rewards on
    hosts; that of PPO has a reference always. Where rollouts have several turns, a critic too is told which tokens were
    drawn. The reference may be the actor without its adapter. Where prompts are drawn in waves, the reward model's
    scores say which groups the other stages are given; where a filter keeps the best samples of a prompt, which
    samples, and nothing is read while it is generated. What distils has `num_teachers` and nothing else that scores."""
    if algorithm == "distill":
        return _distillation(TEACHERS[:num_teachers])
    is_ppo = algorithm == "ppo"
    ref = replace(_REF, base_of=Role.ACTOR) if ref_is_base else _REF
    before = [ref] if has_ref or is_ppo else []
    before += [_VALUE, _PROXIMAL] if is_ppo else [_PROXIMAL]
    if has_filter or (has_reward and has_waves):
        scores = ("scores",) if has_reward else ()
        before = [replace(stage, reads=(*stage.reads, *scores), may_stream=False) for stage in before]
    before = [replace(_SCORE, may_stream=not has_filter), *before] if has_reward else before
    reads = (*_SAMPLED, *(field for stage in before for field in stage.writes))
    reads += (REWARDS, REWARD_SECONDS) if has_environment else ()
    training = [_train(Role.ACTOR, *reads, *_DRAWN)]
    training += [_train(Role.CRITIC, *reads, *(("versions",) if has_turns else ()))] if is_ppo else []
    return StageGraph((_GENERATE, *before, *training), (_HOSTED,) if has_environment else ())


def _distillation(teachers: Iterable[Role]) -> StageGraph:
    before = (*map(_teach, teachers), _PROXIMAL)
    reads = (*_SAMPLED, *(field for stage in before for field in stage.writes))
    return StageGraph((_GENERATE, *before, _train(Role.ACTOR, *reads, *_DRAWN)))


PPO_GRAPH = graph_of("ppo")
"""Proximal policy optimisation of an actor and a critic."""
