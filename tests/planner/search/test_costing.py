from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Cost, Memory, Term
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.plan.steps_ahead import SearchCase, synchronous
from meshwright.planner.search.choice_costs import TOO_LARGE_FOR_HOST, TOO_SLOW, TimeLimit
from meshwright.planner.search.frontiers import PoolKind, frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Offload
from tests.planner.jobs import RandomModel, small_facts

FACTS = small_facts()


class Shrinking(RandomModel):
    """A larger micro-batch takes less memory, as chunks that were measured may say."""

    def memory(self, query: StageQuery) -> Memory:
        return Memory(resident=Cost(), transient=Cost((Term("activations", 2**31 / query.schedule.micro_batch_size),)))


def test_a_model_whose_memory_may_shrink_is_asked_about_every_choice() -> None:
    found = frontier(FACTS, Shrinking(3, 2**29), PPO_GRAPH.by_name["reward_score"], ())
    sizes = {c.schedule.micro_batch_size for candidates in found.candidates.values() for c in candidates}
    assert 1 not in sizes
    assert max(sizes) == FACTS.workload.batch_size


def test_what_is_too_slow_is_not_weighed() -> None:
    model = cost_model(FACTS.cluster, FACTS.workload, FACTS.precision)
    stage, most = PPO_GRAPH.by_name["actor_train"], {PoolKind(0, FACTS.cluster.num_ranks): TimeLimit(1e-9, 1e-9)}
    found = frontier(FACTS, model, stage, (), time_limits=most)
    assert found.rejected[TOO_SLOW] >= found.queries.num_time_costs > 0
    assert found.queries.num_memory_costs == 0


def test_a_generation_that_is_too_slow_however_it_is_played_is_not_timed() -> None:
    model = cost_model(FACTS.cluster, FACTS.workload, FACTS.precision)
    stage, kind = PPO_GRAPH.by_name["actor_generate"], PoolKind(0, FACTS.cluster.num_ranks)
    found = frontier(FACTS, model, stage, (), time_limits={kind: TimeLimit(1e-9, 1e-9)})
    assert found.rejected[TOO_SLOW] >= found.queries.num_memory_costs > 0
    assert found.queries.num_time_costs == found.queries.num_generations == 0


class Crowded(RandomModel):
    """Only state that waits in the host makes room."""

    def memory(self, query: StageQuery) -> Memory:
        num_bytes = 2**50 if query.schedule.offload is Offload.NONE else 0
        return Memory(resident=Cost(), transient=Cost((Term("activations", num_bytes),)))


def test_what_fits_with_state_in_host_memory_is_found_behind_what_does_not_fit_without() -> None:
    scope = SearchCase(ahead=synchronous(PPO_GRAPH), offload=True)
    found = frontier(FACTS, Crowded(3, 2**29), PPO_GRAPH.by_name["actor_train"], (), search_case=scope)
    kept = [candidate for candidates in found.candidates.values() for candidate in candidates]
    assert {candidate.schedule.offload for candidate in kept} == {Offload.OPTIMIZER}


class Heavy(RandomModel):
    """Offloaded state takes more than any host has."""

    def memory(self, query: StageQuery) -> Memory:
        num_bytes = 0 if query.schedule.offload is Offload.NONE else 2**60
        return Memory(resident=Cost(), transient=Cost(), host=Cost((Term("moments", num_bytes),)))


def test_state_that_is_larger_than_its_share_of_the_hosts_memory_does_not_fit() -> None:
    scope = SearchCase(ahead=synchronous(PPO_GRAPH), offload=True)
    found = frontier(FACTS, Heavy(3, 2**29), PPO_GRAPH.by_name["actor_train"], (), search_case=scope)
    kept = [candidate for candidates in found.candidates.values() for candidate in candidates]
    assert {candidate.schedule.offload for candidate in kept} == {Offload.NONE}
    assert found.rejected[TOO_LARGE_FOR_HOST] > 0
