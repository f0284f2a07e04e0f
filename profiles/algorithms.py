"""The preset algorithms that a job can name, as graphs of stages.

PPO (arXiv:1707.06347) has a reward model, a critic and a KL penalty to a reference model. GRPO (arXiv:2402.03300), RLOO
(arXiv:2402.14740) and REINFORCE++ (arXiv:2501.03262) compare the samples of a step with each other and have no critic;
the reference is optional. On-policy distillation (Lu et al., On-Policy Distillation, Thinking Machines Lab, 2025; GKD,
arXiv:2306.13649; MiniLLM, arXiv:2306.08543) samples from a student, the actor, and trains it on the log-probabilities
that teachers give the samples, alone or beside rewards.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias

from meshwright.profiles.stages import (
    ENVIRONMENT,
    GENERATE,
    REWARD_ERROR,
    REWARD_SECONDS,
    REWARDS,
    SAMPLING_MASK,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHERS,
    HostStage,
    Mode,
    Role,
    Stage,
    StageGraph,
)

Algorithm: TypeAlias = Literal["ppo", "grpo", "rloo", "reinforce++", "distill"]

OldLogprobs: TypeAlias = Literal["recompute", "generator", "training"]
"""The source of the log-probabilities of the policy before the updates of a step, which the policy ratio divides by.

recompute: a forward pass of the actor before the updates. generator: the log-probabilities that the generation recorded
when it sampled (verl's bypass mode, slime's --use-rollout-logprobs). training: the forward pass of the only update of a
step, which starts from the same weights, so that the ratio is 1 (NeMo-RL's force_on_policy_ratio).
"""

BEHAVIOUR_LOGPROBS = "behaviour_logprobs"
"""Field with the log-probabilities of the policy that sampled each token, as the generation recorded them."""

GROUP_ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Algorithms whose advantages compare a sample with the other samples of its prompt."""

_GENERATE = Stage(
    name=GENERATE,
    role=Role.ACTOR,
    modes=(Mode.PREFILL, Mode.DECODE),
    reads=(),
    writes=("tokens", "prompt_lengths", "truncated", BEHAVIOUR_LOGPROBS, "versions"),
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


def _teacher_stage(role: Role, top_tokens: int) -> Stage:
    """The inference of a teacher. One that reports `top_tokens` of each prediction does so for responses alone: it also
    reads where they begin, which no chunk of a stream says."""
    distributions = (TEACHER_TOP_TOKENS[role], TEACHER_TOP_LOGPROBS[role]) if top_tokens else ()
    return Stage(
        name=f"{role}_logprob",
        role=role,
        modes=(Mode.FORWARD,),
        reads=("tokens", "prompt_lengths") if top_tokens else ("tokens",),
        writes=(TEACHER_LOGPROBS[role], *distributions),
        may_stream=not top_tokens,
        top_tokens=top_tokens,
    )


def _training_stage(role: Role, *reads: str) -> Stage:
    return Stage(name=f"{role}_train", role=role, modes=(Mode.TRAIN,), reads=reads, writes=(), is_trained=True)


_SEQUENCE_FIELDS = ("tokens", "prompt_lengths", "truncated")
_SAMPLING_FIELDS = (BEHAVIOUR_LOGPROBS, "versions")
_HOST_REWARDS = HostStage(
    name=ENVIRONMENT, reads=("tokens", "prompt_lengths"), writes=(REWARDS, REWARD_SECONDS, REWARD_ERROR)
)


@cache
def graph_of(
    algorithm: Algorithm,
    *,
    has_ref: bool = True,
    has_reward: bool | None = None,
    has_environment: bool = False,
    has_turns: bool = False,
    ref_is_base: bool = False,
    num_teachers: int = 1,
    has_waves: bool = False,
    has_filter: bool = False,
    old_logprobs: OldLogprobs = "recompute",
    teacher_top_k: int | None = None,
) -> StageGraph:
    """Return the graph of an algorithm with or without a reference model, a reward model and rewards on hosts.

    PPO always has a reference, and `distill`, which alone has teachers, never. Only `distill` has no reward model by
    default. `has_environment`: rewards are computed on hosts. `has_turns`: the critic of multi-turn
    rollouts also reads which tokens were sampled.
    `ref_is_base`: the reference is the actor without its adapter. `has_waves`: prompts are sampled in waves, and other
    stages wait for the scores of the reward model, which select the groups. `has_filter`: the best samples of each
    prompt are selected, so that no stage streams. `old_logprobs`: only with "recompute" the actor has a forward pass of
    its own before the updates. `teacher_top_k`: each teacher reports so many tokens of every prediction.
    """
    proximal = (_PROXIMAL,) if old_logprobs == "recompute" else ()
    is_ppo, is_distillation = algorithm == "ppo", algorithm == "distill"
    top_tokens = (teacher_top_k or 0) if is_distillation else 0
    has_reward = not is_distillation if has_reward is None else has_reward
    if is_distillation:
        inferences = [_teacher_stage(role, top_tokens) for role in TEACHERS[:num_teachers]]
    else:
        inferences = [replace(_REF, base_of=Role.ACTOR) if ref_is_base else _REF] if has_ref or is_ppo else []
    inferences += [_VALUE, *proximal] if is_ppo else proximal
    if has_filter or (has_reward and has_waves):
        # Stages work on the selected samples only. The selection needs the scores of whole samples, so that they cannot
        # stream, and they read the scores to start after them.
        scores = ("scores",) if has_reward else ()
        inferences = [replace(stage, reads=(*stage.reads, *scores), may_stream=False) for stage in inferences]
    inferences = [replace(_SCORE, may_stream=not has_filter), *inferences] if has_reward else inferences
    reads = (*_SEQUENCE_FIELDS, *(field for stage in inferences for field in stage.writes))
    reads += (REWARDS, REWARD_SECONDS) if has_environment else ()
    training = [replace(_training_stage(Role.ACTOR, *reads, *_SAMPLING_FIELDS), top_tokens=top_tokens)]
    # `versions` marks the tokens that were not sampled, which a tool has appended.
    critic_reads = (*reads, *(("versions",) if has_turns else ()))
    critic_reads += () if proximal else (BEHAVIOUR_LOGPROBS,)  # the KL penalty in its returns
    training += [_training_stage(Role.CRITIC, *critic_reads)] if is_ppo else []
    return StageGraph((_GENERATE, *inferences, *training), (_HOST_REWARDS,) if has_environment else ())


def with_sampling_mask(graph: StageGraph) -> StageGraph:
    """Return the graph of a preset in which generation writes the sampling mask, and every stage that computes
    log-probabilities reads it. The mask of a response is complete when the response is, so these stages do not stream.
    """
    stages = []
    for stage in graph.stages:
        if stage.generates:
            stages.append(replace(stage, writes=(*stage.writes, *SAMPLING_MASK)))
        elif stage.role in (Role.CRITIC, Role.REWARD):
            stages.append(stage)
        else:
            stages.append(replace(stage, reads=(*stage.reads, *SAMPLING_MASK), may_stream=False))
    return replace(graph, stages=tuple(stages))


PPO_GRAPH = graph_of("ppo")
"""The graph of PPO with a reference and a reward model."""
