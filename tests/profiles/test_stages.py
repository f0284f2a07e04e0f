import networkx as nx

from meshwright.profiles.stages import STAGE_BY_NAME, STAGES, TRAIN_STAGE, Role, Values, stage_graph, values_of


def test_the_graph_of_a_step_has_no_cycle_and_starts_with_generation() -> None:
    graph = stage_graph()
    assert nx.is_directed_acyclic_graph(graph)
    assert [name for name in graph if graph.in_degree(name) == 0] == ["actor_generate"]


def test_every_field_that_is_read_is_written_by_exactly_one_stage() -> None:
    written = [field for stage in STAGES for field in stage.writes]
    assert len(written) == len(set(written))
    assert {field for stage in STAGES for field in stage.reads} <= set(written)


def test_edges_carry_what_the_consumer_reads() -> None:
    graph = stage_graph()
    assert graph.edges["actor_generate", "reward_score"]["fields"] == ("tokens",)
    fields = graph.edges["actor_generate", "actor_train"]["fields"]
    assert fields == ("tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions")
    assert not graph.has_edge("actor_logprob", "reward_score")


def test_each_trained_role_has_one_training_stage() -> None:
    assert TRAIN_STAGE == {Role.ACTOR: "actor_train", Role.CRITIC: "critic_train"}
    assert STAGE_BY_NAME["actor_generate"].generates
    assert not STAGE_BY_NAME["actor_train"].generates


def test_what_is_known_of_values_is_of_fields_that_some_stage_writes() -> None:
    written = {field for stage in STAGES for field in stage.writes}
    special = {field for field in written if values_of(field) != Values()}
    assert special == {"tokens", "prompt_lengths", "truncated", "scores", "versions"}
    assert values_of("tokens").num_bytes == 8
    assert values_of("values") == Values("float32", is_one=False)
