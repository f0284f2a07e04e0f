"""Stages make a graph when each stands behind what it reads, one generates, and one trains each trained role."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from meshwright.profiles.algorithms import PPO_GRAPH, Algorithm, graph_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import FieldType, Role, Stage, StageGraph, field_type

ALGORITHMS: tuple[Algorithm, ...] = ("ppo", "grpo", "rloo", "reinforce++")
GRAPHS = [graph_of(algorithm, has_ref=has_ref) for algorithm in ALGORITHMS for has_ref in (True, False)]


def drawn_up(graph: StageGraph) -> nx.DiGraph[str]:
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(graph.names)
    found.add_edges_from((edge.producer, edge.consumer) for edge in graph.edges)
    return found


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_has_no_cycle_and_starts_with_generation(graph: StageGraph) -> None:
    drawn = drawn_up(graph)
    assert nx.is_directed_acyclic_graph(drawn)
    assert [name for name in drawn if drawn.in_degree(name) == 0] == ["actor_generate"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_field_that_is_read_is_written_by_exactly_one_stage(graph: StageGraph) -> None:
    written = [field for stage in graph.stages for field in stage.writes]
    assert len(written) == len(set(written))
    assert {field for stage in graph.stages for field in stage.reads} <= set(written) == set(graph.writer)


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_edge_carries_what_its_producer_writes_and_its_consumer_reads(graph: StageGraph) -> None:
    for producer, consumer, fields in graph.edges:
        assert fields
        assert set(fields) == set(graph.by_name[producer].writes) & set(graph.by_name[consumer].reads)
        assert graph.position[producer] < graph.position[consumer]


@pytest.mark.parametrize("graph", GRAPHS)
def test_each_trained_role_has_one_training_stage_and_the_others_of_its_role_are_refit(graph: StageGraph) -> None:
    for role, trained in graph.train_stage.items():
        owner, *others = graph.sharers(role)
        assert owner == trained
        assert others == [name for name in graph.refit_targets if graph.trainer_of(name) == trained]
        for target in others:
            assert graph.refit_readers(target)[0] == target
            assert trained not in graph.refit_readers(target)


def test_edges_carry_what_the_consumer_reads() -> None:
    fields = {(producer, consumer): carried for producer, consumer, carried in PPO_GRAPH.edges}
    assert fields["actor_generate", "reward_score"] == ("tokens",)
    assert fields["actor_generate", "actor_train"] == (
        "tokens",
        "prompt_lengths",
        "truncated",
        "behaviour_logprobs",
        "versions",
    )
    assert ("actor_logprob", "reward_score") not in fields


GENERATE, SCORE, REF, VALUE, PROXIMAL, ACTOR, CRITIC = PPO_GRAPH.stages


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ((GENERATE, SCORE, SCORE), "the stage reward_score is listed 2 times; list it once"),
        (
            (GENERATE, REF, VALUE, PROXIMAL, ACTOR, CRITIC),
            "actor_train reads scores, which no stage writes; add a stage that does",
        ),
        ((SCORE, GENERATE), "reward_score reads tokens before actor_generate writes it; put actor_generate first"),
        (
            (GENERATE, replace(SCORE, reads=("b",), writes=("a",)), replace(REF, reads=("a",), writes=("b",))),
            r"reward_score reads b before ref_logprob writes it, .* in a cycle \(reward_score -> ref_logprob -> "
            r"reward_score\); let one of them read less",
        ),
        (
            (GENERATE, SCORE, replace(REF, writes=("scores",))),
            "ref_logprob writes scores, and so does reward_score; let one stage write it",
        ),
        (
            (replace(PROXIMAL, reads=(), is_trained=False),),
            r"exactly one stage that generates, and this has 0 \(none\)",
        ),
        ((replace(GENERATE, name="roll_out"),), "the stage that generates is called roll_out; call it actor_generate"),
        (
            (replace(GENERATE, role=Role.REF, is_trained=False),),
            "actor_generate generates with the ref, which is not trained; let the actor generate",
        ),
        ((GENERATE, SCORE), "actor_generate has is_trained, and no stage trains the actor; add one that does"),
        (
            (GENERATE, replace(ACTOR, reads=()), replace(ACTOR, name="again", reads=())),
            "the actor is trained by actor_train and again; let one stage train it",
        ),
        (
            (GENERATE, replace(PROXIMAL, is_trained=False), replace(ACTOR, reads=())),
            "actor_logprob has no is_trained, and actor_train trains the actor; set it",
        ),
    ],
)
def test_stages_that_make_no_graph_are_refused_in_one_sentence(stages: tuple[Stage, ...], sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^algorithm: .*{sentence}"):
        StageGraph(stages)


def test_what_is_known_of_values_is_of_fields_that_some_stage_writes() -> None:
    written = {field for stage in PPO_GRAPH.stages for field in stage.writes}
    special = {field for field in written if field_type(field) != FieldType()}
    assert special == {"tokens", "prompt_lengths", "truncated", "scores", "versions"}
    assert field_type("tokens").num_bytes == 8
    assert field_type("values") == FieldType("float32", per_sequence=False)


def test_a_stage_that_trains_is_not_refit_and_one_of_fixed_weights_neither() -> None:
    refit = [stage.name for stage in PPO_GRAPH.stages if stage.needs_refit]
    assert refit == ["actor_generate", "critic_value", "actor_logprob"]
    assert PPO_GRAPH.by_name["actor_generate"].generates
    assert not PPO_GRAPH.by_name["actor_train"].generates
