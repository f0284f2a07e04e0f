"""The graphs that a job can name."""

from __future__ import annotations

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH, Algorithm, graph_of
from meshwright.profiles.stages import TEACHERS, Role

CRITIC_FREE: tuple[Algorithm, ...] = ("grpo", "rloo", "reinforce++")


def test_ppo_trains_an_actor_and_a_critic_and_has_a_reference_always() -> None:
    assert graph_of("ppo") == graph_of("ppo", has_ref=False) == PPO_GRAPH
    assert PPO_GRAPH.train_stage == {Role.ACTOR: "actor_train", Role.CRITIC: "critic_train"}
    assert set(PPO_GRAPH.roles) == set(Role) - set(TEACHERS)


@pytest.mark.parametrize("algorithm", CRITIC_FREE)
def test_what_compares_samples_has_no_critic(algorithm: Algorithm) -> None:
    graph = graph_of(algorithm)
    assert graph.train_stage == {Role.ACTOR: "actor_train"}
    assert Role.CRITIC not in graph.roles
    assert not any("critic" in name or "value" in name for name in (*graph.names, *graph.writer))


@pytest.mark.parametrize("algorithm", CRITIC_FREE)
def test_a_job_without_a_reference_has_no_stage_of_one(algorithm: Algorithm) -> None:
    graph = graph_of(algorithm, has_ref=False)
    assert set(graph_of(algorithm).names) - set(graph.names) == {"ref_logprob"}
    assert "ref_logprobs" not in graph.by_name["actor_train"].reads
    assert graph.roles == (Role.ACTOR, Role.REWARD)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "reinforce++"])
def test_rewards_on_hosts_stand_beside_a_reward_model_or_in_its_place(algorithm: Algorithm) -> None:
    with_model = graph_of(algorithm, has_environment=True)
    without = graph_of(algorithm, has_environment=True, has_reward=False)
    assert Role.REWARD in with_model.roles
    assert Role.REWARD not in without.roles
    for graph in (with_model, without):
        assert {edge.consumer for edge in graph.host_edges} == set(graph.train_stage.values())
        assert {edge.producer for edge in graph.host_edges} == {"environment_score"}
        assert "environment_score" not in graph.names


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_distillation_has_its_teachers_and_nothing_else_that_scores(number: int) -> None:
    graph = graph_of("distill", num_teachers=number)
    assert graph.roles == (Role.ACTOR, *TEACHERS[:number])
    assert graph.train_stage == {Role.ACTOR: "actor_train"}
    assert set(graph.names) == {
        "actor_generate",
        *(f"{role}_logprob" for role in TEACHERS[:number]),
        "actor_logprob",
        "actor_train",
    }
    assert graph.streaming == tuple(f"{role}_logprob" for role in TEACHERS[:number])
    assert set(graph.by_name["actor_train"].reads) == set(graph.writer)
