"""The graphs of stages that a job can name.

PPO (arXiv:1707.06347) scores with a reward model, values with a critic and keeps to a reference. GRPO
(arXiv:2402.03300), RLOO (arXiv:2402.14740) and REINFORCE++ (arXiv:2501.03262) compare the samples of a step with each
other, so that they have no critic; without a reference nothing keeps the actor to one.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, TypeAlias

from meshwright.profiles.stages import GENERATE, Mode, Role, Stage, StageGraph

Algorithm: TypeAlias = Literal["ppo", "grpo", "rloo", "reinforce++"]

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


def _train(role: Role, *reads: str) -> Stage:
    return Stage(name=f"{role}_train", role=role, modes=(Mode.TRAIN,), reads=reads, writes=(), is_trained=True)


_SAMPLED = ("tokens", "prompt_lengths", "truncated", "scores")
_VALUED = (*_SAMPLED, "ref_logprobs", "values", "proximal_logprobs")
_DRAWN = ("behaviour_logprobs", "versions")

PPO_GRAPH = StageGraph(
    (
        _GENERATE,
        _SCORE,
        _REF,
        _VALUE,
        _PROXIMAL,
        _train(Role.ACTOR, *_VALUED, *_DRAWN),
        _train(Role.CRITIC, *_VALUED),
    )
)
"""Proximal policy optimisation of an actor and a critic."""


@cache
def graph_of(algorithm: Algorithm, *, has_ref: bool = True) -> StageGraph:
    """The graph of an algorithm for a job that names a reference model or does not; that of PPO has one always."""
    if algorithm == "ppo":
        return PPO_GRAPH
    if has_ref:
        training = _train(Role.ACTOR, *_SAMPLED, "ref_logprobs", "proximal_logprobs", *_DRAWN)
        return StageGraph((_GENERATE, _SCORE, _REF, _PROXIMAL, training))
    return StageGraph((_GENERATE, _SCORE, _PROXIMAL, _train(Role.ACTOR, *_SAMPLED, "proximal_logprobs", *_DRAWN)))
